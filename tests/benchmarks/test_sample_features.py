"""Features of the sample images by another backbone are of the rows of the sample features."""

import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks import sample_features
from benchmarks.harness import samples
from fedsurrogate.common.backbones.backbones import load_backbone

ROWS = {"train": [5, 0, 3, 6], "test": [2, 7]}


@pytest.fixture
def folder(tmp_path: Path, mobilenet_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder of sample data: eight images in each table, weights at random."""
    own = tmp_path / "shared"
    for part in ("weights", "features", "data/cifar10", "data/pacs", "data/pneumonia"):
        (own / part).mkdir(parents=True)
    weights = own / "weights/mobilenet_v2-imagenet.safetensors"
    shutil.copy(mobilenet_weights, weights)
    torch.manual_seed(0)
    network = timm.create_model("tf_efficientnet_lite0")
    save_file(network.state_dict(), own / "weights/tf_efficientnet_lite0-imagenet.safetensors")
    random = np.random.default_rng(0)
    pixels = random.integers(0, 255, (8, 4, 4, 3), dtype=np.uint8)
    images = [Image.fromarray(each).resize((32, 32), Image.Resampling.BICUBIC) for each in pixels]
    labels = [0, 1] * 4
    for name in ("cifar10/", "pacs/photo-", "pacs/sketch-"):
        for part in ROWS:
            cells = [{"bytes": written(image)} for image in images]
            table = pa.table({"image": cells, "label": labels})
            pq.write_table(table, own / "data" / f"{name}{part}.parquet")
    backbone = load_backbone("torchvision:mobilenet_v2", str(weights), 128, "cpu")
    x = backbone.forward(torch.stack(list(map(backbone.preprocess, images))))
    for part, rows in ROWS.items():
        stored = {"x": x[rows].half(), "y": torch.tensor(labels)[rows]}
        save_file(stored, own / "features" / f"cifar10-{part}.safetensors")
    rays = {f"{part}_images": pixels[:, :, :, 0] for part in ROWS}
    rays |= {f"{part}_labels": np.array(labels)[:, None] for part in ROWS}
    np.savez(own / "data/pneumonia/pneumonia-28px.npz", **rays)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDSURROGATE_SAMPLES", "")
    return own


def written(image: Image.Image) -> bytes:
    """An image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_each_record_is_the_image_of_that_row_of_the_sample_features(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sample_features.py", str(folder), "--backbone", "lite0"])
    sample_features.main()
    assert "features of EfficientNet-Lite0" in capsys.readouterr().out
    made = samples.features_folder("lite0")
    assert {file.name for file in made.glob("*.safetensors")} == {
        f"{name}-{part}.safetensors"
        for name in ("cifar10", "pacs-photo", "pacs-sketch", "xrays")
        for part in ROWS
    }
    backbone = samples.BACKBONES["lite0"].loaded(128)
    for part, rows in ROWS.items():
        files, labels = samples.stored_images(f"data/cifar10/{part}.parquet")
        images = sample_features.decoded([files[row] for row in rows])
        x, y = samples.stored_features("cifar10", part, "lite0")
        wanted = backbone.forward(torch.stack(list(map(backbone.preprocess, images))))
        torch.testing.assert_close(x, wanted.half().float(), rtol=2e-3, atol=1e-5)
        assert y.tolist() == [labels[row] for row in rows]
    before = (made / "pacs-photo-test.safetensors").stat().st_mtime_ns
    assert len(load_file(made / "pacs-photo-test.safetensors")["y"]) == 8
    sample_features.main()
    assert (made / "pacs-photo-test.safetensors").stat().st_mtime_ns == before
