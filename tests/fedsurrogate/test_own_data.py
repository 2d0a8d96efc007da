"""Images come as users have them: PIL images, files, arrays, tensors and data sets; what does not
fit is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, DataError, FedSurrogateError
from tests.replies import as_received

DIGITS = load_digits()
# (n, 8, 8) in [0, 1], exact in 8 bits.
IMAGES = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8)
Y = DIGITS.target
QUICK: dict[str, Any] = {"head__min_steps": 100, "head__epochs": 1}


class Pairs:
    """A data set that never raises IndexError, as the protocol of torch allows."""

    def __init__(
        self,
        count: int,
        make: Callable[[Any], Any] = Image.fromarray,
        label: Callable[[int], Any] = int,
    ) -> None:
        self.count, self.make, self.label = count, make, label

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.make(IMAGES[index % len(IMAGES)]), self.label(Y[index % len(IMAGES)])


def colour(pixels: Any) -> Any:
    return np.repeat(pixels[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    "make",
    [
        Image.fromarray,
        lambda pixels: pixels,
        lambda pixels: pixels.astype(np.int64),
        lambda pixels: pixels / 255,
        lambda pixels: pixels[:, :, None],
        lambda pixels: pixels[None],
        lambda pixels: torch.tensor(pixels)[None],
        lambda pixels: torch.tensor(pixels / 255).float(),
        colour,
        lambda pixels: torch.tensor(colour(pixels)),
        lambda pixels: torch.tensor(colour(pixels)).permute(2, 0, 1),
    ],
)
def test_every_form_of_an_image_gives_the_same_features(make: Callable[[Any], Any]) -> None:
    wanted = torch.tensor(IMAGES[:20] / 255).float().flatten(1)
    given = [make(each) for each in IMAGES[:20]]
    assert torch.allclose(fs.features(given), wanted, atol=1e-6)
    found, labels = fs.labelled_features(Pairs(20, make))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert labels == list(map(str, Y[:20]))


def test_files_generators_and_whole_arrays_are_images_too(tmp_path: Path) -> None:
    wanted = fs.features(list(IMAGES[:5]))
    for number, each in enumerate(IMAGES[:5]):
        Image.fromarray(each).save(tmp_path / f"{number}.png")
    assert torch.equal(fs.features([tmp_path / f"{number}.png" for number in range(5)]), wanted)
    assert torch.equal(fs.features(Image.fromarray(each) for each in IMAGES[:5]), wanted)
    assert torch.equal(fs.features(IMAGES[:5]), wanted)
    assert torch.equal(fs.features(torch.tensor(IMAGES[:5])), wanted)
    assert torch.equal(fs.features(Pairs(5)), wanted), "the labels are not used"


@pytest.mark.parametrize(
    "label", [np.int64, torch.tensor, lambda y: np.array([y]), str, lambda y: torch.tensor([y])]
)
def test_a_label_may_be_any_single_value(label: Callable[[int], Any]) -> None:
    assert fs.labelled_features(Pairs(8, label=label))[1] == list(map(str, Y[:8]))


def test_a_data_set_is_shared_by_a_partition(tmp_path: Path) -> None:
    result = fs.simulate(
        4, data=Pairs(600), partition="classes", classes_per_site=3, output_dir=tmp_path, **QUICK
    )
    config = json.loads((result.folder / "manifest.json").read_text())["config"]
    assert (config["data"], config["partition"], config["backbone"]) == (
        "safetensors",
        "classes",
        "pixels",
    )
    assert result.metrics["sites"]["used"] == 4
    assert result.accuracy > 0.6
    arrays = fs.simulate(
        4,
        data=(IMAGES[:600], Y[:600]),
        partition="classes",
        classes_per_site=3,
        output_dir=tmp_path,
        **QUICK,
    )
    assert arrays.metrics["accuracy"] == result.metrics["accuracy"], (
        "arrays and data sets are the same records"
    )


def test_every_site_may_have_a_data_set_or_arrays_of_images(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Flatten())
    as_tensor = Pairs(300, lambda pixels: torch.tensor(pixels / 255)[None])
    arrays = (IMAGES[300:600, None] / 255, Y[300:600])
    test = (IMAGES[600:900, None] / 255, Y[600:900])
    result = fs.simulate(
        [as_tensor, arrays], backbone=module, test=test, output_dir=tmp_path, **QUICK
    )
    assert json.loads((result.folder / "manifest.json").read_text())["config"]["backbone"] == "own"
    model = as_received(result.model)
    assert result.accuracy == pytest.approx(
        model.score(fs.features(test[0], module), test[1]), abs=1e-6
    )
    fs.register_backbone("sixteen", module)
    named = fs.simulate(
        [as_tensor, arrays], backbone="sixteen", test=test, output_dir=tmp_path, **QUICK
    )
    assert named.accuracy == result.accuracy


def test_a_function_in_python_is_a_backbone_for_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_eyes.py").write_text(
        "import torch\nfrom torchvision.transforms.functional import pil_to_tensor, resize\ndef "
        "make():\n    return torch.nn.Flatten(), lambda image: resize(pil_to_tensor(image), [8, "
        "8])[:1] / 255\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in range(200):
        folder = tmp_path / "images" / str(Y[number])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[number]).save(folder / f"{number}.png")
    assert torch.allclose(
        fs.features(IMAGES[:5], "python:own_eyes:make"), fs.features(IMAGES[:5]), atol=1e-6
    )
    settings = {
        "partition": "iid",
        "output_dir": tmp_path,
        "data": "imagefolder",
        "data_dir": str(tmp_path / "images"),
    }
    own = fs.simulate(2, backbone="python:own_eyes:make", **settings, **QUICK)
    pixels = fs.simulate(2, backbone="pixels", **settings, **QUICK)
    assert own.metrics["accuracy"] == pixels.metrics["accuracy"]
    config = json.loads((own.folder / "manifest.json").read_text())["config"]
    assert config["backbone"] == "own", "the run does not name code"


class NoLabel(Pairs):
    def __getitem__(self, index: int) -> Any:
        return self.make(IMAGES[index])


FLAT = torch.nn.Flatten()


WRONG: dict[type[FedSurrogateError], list[tuple[Callable[[], Any], str]]] = {
    DataError: [
        (lambda: fs.features(IMAGES[0]), r"record 0 of shape \(8,\) is no image"),
        (lambda: fs.features([IMAGES[0], IMAGES[:2, :, :]]), r"record 1 of shape \(2, 8, 8\)"),
        (lambda: fs.features(IMAGES[:3] / 16), "values from 0 to 14.9375.*0 to 1"),
        (lambda: fs.features(IMAGES[:3].astype(int) * 9), "0 to 255"),
        (lambda: fs.features([IMAGES[0], IMAGES[1, :4]]), r"record 1 \(3, 4, 8\).*image_size"),
        (lambda: fs.features([(IMAGES[0], 1, 2)]), "tuple of 3"),
        (lambda: fs.features([{"image": IMAGES[0]}]), "dict of 1"),
        (lambda: fs.features("/data"), "one file or folder"),
        (lambda: fs.features(3), "__getitem__"),
        (lambda: fs.features([]), "at least one"),
        (lambda: fs.features(["/nowhere.png"]), "cannot be read"),
        (lambda: fs.labelled_features(IMAGES[:3]), "record 0 has no label; give pairs"),
        (lambda: fs.simulate([NoLabel(3)]), "record 0 has no label; give pairs"),
        (
            lambda: fs.features(IMAGES[:3] / 255, torch.nn.Linear(5, 2)),
            r"batch of shape \(3, 8, 8\)",
        ),
        (lambda: fs.features(IMAGES[:3], torch.nn.Identity()), r"returns shape \(3, 8, 8\)"),
        (lambda: fs.features([object()], FLAT), "object is no image, array or tensor"),
        (lambda: fs.simulate(3, data=3), "__getitem__"),
        (lambda: fs.simulate(3, data=Pairs(20), test=(IMAGES[0], Y[:8])), "is no image|dimensions"),
        (lambda: fs.simulate([]), "no site"),
    ],
    ConfigError: [
        (lambda: fs.register_backbone("pixels", FLAT), "a name of the product"),
        (lambda: fs.simulate(3, test=Pairs(20)), "data of your own"),
        (lambda: fs.simulate([Pairs(9)], data=Pairs(9)), "both hold records"),
        (lambda: fs.simulate(3, backbone=FLAT), "as 'python:package.module:function'"),
        (lambda: fs.simulate(3, backbone="own"), "give the module"),
        (lambda: fs.simulate(0), "at least one"),
    ],
}


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [(call, error, why) for error, rows in WRONG.items() for call, why in rows],
)
def test_what_does_not_fit_is_named(
    call: Callable[[], Any], error: type[FedSurrogateError], why: str
) -> None:
    with pytest.raises(error, match=why):
        call()
