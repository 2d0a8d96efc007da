"""`site features` writes every image and names the broken ones; `site join` looks at the data
before it connects.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from fedsurrogate.client_app.cli.join import check_settings
from fedsurrogate.client_app.datasets.dataset import DataSource, load, read_schema
from fedsurrogate.client_app.diagnostics.first_look import first_look
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import BackboneError, ConfigError, DataError
from tests.commands import site
from tests.grid import Scalar

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    yield
    log = logging.getLogger("fedsurrogate.site")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def images(folder: Path, *places: str, count: int = 10) -> Path:
    random = np.random.default_rng(0)
    for place in places:
        (folder / place).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(
                folder / place / f"{i}.png"
            )
    return folder


def node(tmp_path: Path, data: Path, **more: Scalar) -> dict[str, Scalar]:
    own = {
        "data": "imagefolder",
        "data-dir": str(data),
        "state-dir": str(tmp_path / "s"),
        "cache-dir": str(tmp_path / "c"),
    }
    return own | {"device": "cpu", "site": "north"} | more


def text(settings: dict[str, Scalar]) -> str:
    return " ".join(f'{key}="{value}"' for key, value in settings.items())


@pytest.mark.parametrize("places", [("a", "b"), ("train/a", "train/b", "test/a", "test/b")])
def test_features_of_all_images_are_written_and_broken_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, places: tuple[str, ...]
) -> None:
    data, out = images(tmp_path / "data", *places), tmp_path / "f.safetensors"
    (data / places[0] / "torn.png").write_bytes(b"no image")
    words = [
        "features",
        "--out",
        out,
        "--node-config",
        text(node(tmp_path, data)),
        "-c",
        "image-size=8",
    ]
    assert site(monkeypatch, *words) == 0
    shown = capsys.readouterr()
    with safe_open(out, "pt") as file:
        assert file.get_slice("x").get_shape() == [10 * len(places), 64]
    assert "torn.png" in shown.err
    assert "1 images left out" in shown.out
    sizes = []
    for part in ("train", "test"):
        assert site(monkeypatch, *words, "--part", part) == 0
        with safe_open(out, "pt") as file:
            sizes.append(file.get_slice("x").get_shape()[0])
    assert sum(sizes) == 10 * len(places)
    assert 0 < sizes[1] < sum(sizes)


DEEP = {
    "one folder around the classes": (
        ("data/normal", "data/ill"),
        "if these are the classes, set data-dir to",
    ),
    "train without test": (("train/normal", "train/ill"), "put a folder 'test' next to 'train'"),
    "other names of a split": (("train/normal", "val/normal"), "name them 'train' and 'test'"),
}


@pytest.mark.parametrize("name", DEEP)
def test_folders_one_level_too_deep_are_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    places, words = DEEP[name]
    data = images(tmp_path / "d", *places)
    with pytest.raises(DataError, match=words) as caught:
        load(DataSource("imagefolder", str(data)), seed=0)
    assert "\n" not in str(caught.value)
    # At a site it is a warning before it joins: whether it joins must not depend on its records.
    settings = parse_node_config(node(tmp_path, data))
    assert words in first_look(settings, 0)[0]


@pytest.mark.parametrize("own", ["PatientID", "patient_id", "Patient ID", "AccessionNumber"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_of_patients_beside_images_says_which_column_is_looked_for(
    tmp_path: Path, own: str, ending: str
) -> None:
    data, mark = images(tmp_path / "d", "x"), "\t" if ending == "tsv" else ","
    (data / f"labels.{ending}").write_text(f"{own}{mark}label\n1{mark}a\n")
    words = (
        f"lacks the columns 'path'; it has '{own}', 'label'; rename them, or add 'path' with the file of each "
        f"image, below the folder of the table ('{own}' names none: set it as patient-column, or "
        "data = 'dicom' for DICOM files)"
    )
    settings = parse_node_config(node(tmp_path, data))
    for ask in (
        lambda: load(DataSource("imagefolder", str(data)), seed=0),
        lambda: first_look(settings, 0),
        lambda: read_schema(DataSource("imagefolder", str(data))),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            ask()
    (data / f"labels.{ending}").write_text(f"file{mark}label\n1{mark}a\n")
    with pytest.raises(DataError, match=r"of each image, below the folder of the table$"):
        load(DataSource("imagefolder", str(data)), seed=0)


def test_a_site_that_cannot_work_does_not_join(tmp_path: Path) -> None:
    data = images(tmp_path / "d", "a", "b")
    (tmp_path / "w.safetensors").write_text("this is no file of weights")
    table = images(tmp_path / "t", "x")
    (table / "t.csv").write_text("path,diagnosis\nx/0.png,a\n")
    with pytest.raises(BackboneError, match="is no safetensors file"):
        check_settings(
            parse_node_config(
                node(tmp_path, data, **{"weights-path": str(tmp_path / "w.safetensors")})
            )
        )
    with pytest.raises(ConfigError, match="GPUs; use 'cpu'"):
        check_settings(parse_node_config(node(tmp_path, data, device="cuda:77")))
    with pytest.raises(DataError, match="lacks the columns 'label'"):
        first_look(parse_node_config(node(tmp_path, table)), 0)
    with pytest.raises(DataError, match="no such sub-folder or table"):
        first_look(parse_node_config(node(tmp_path, data, dataset="none")), 0)
    (tmp_path / "empty").mkdir()
    assert (
        "has no images" in first_look(parse_node_config(node(tmp_path, tmp_path / "empty")), 0)[0]
    )
