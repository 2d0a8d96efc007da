"""Work on one record: what it raises concerns this record alone, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsurrogate.client_app.datasets import dicom, dicom_files, image_folders
from fedsurrogate.client_app.datasets import images as duplicates
from fedsurrogate.client_app.datasets.left_out import SourceError, attempt, described
from fedsurrogate.client_app.datasets.tables import ParquetImages
from fedsurrogate.client_app.features.device_processes import in_parts
from fedsurrogate.client_app.features.site_features import SiteFeatures
from fedsurrogate.client_app.governance.release import with_records
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.preprocessing import OwnTransform, Preprocessing
from fedsurrogate.common.run import parse_run
from tests.attacks.privacy.neighbours import Record, write
from tests.attacks.privacy.visits import METHODS, PRIVATE

RUN = parse_run(PRIVATE | METHODS["sums spherical"])
# Grey levels; a step fails at the record with level ODD.
ODD, RECORDS = 99, (Record("a", "1", grey=10), Record("b", "2", grey=99), Record("b", "3", grey=30))


class PanicException(BaseException):
    """As pyo3 raises for a panic in a library in Rust."""


class SpeechlessError(Exception):
    """Its text fails as well."""

    def __str__(self) -> str:
        raise SystemExit(3)


ERRORS: tuple[BaseException, ...] = (
    ValueError("embedded null byte"),
    SystemExit(1),
    PanicException("index out of bounds"),
    MemoryError(),
    RecursionError(),
    SpeechlessError(),
    GeneratorExit(),
    # By themselves these are causes of a whole site: raised for one record, they are not.
    SourceError("no such folder"),
    OSError(28, "No space left on device"),
)


def of_path(file: Path) -> bool:
    return file.stem == "1"


# By kind of data: the steps over one record, and which argument names the record with level ODD.
STEPS: dict[str, list[tuple[Any, str, Callable[..., bool]]]] = {
    "folder": [
        (image_folders, "open_rgb", lambda file, _: of_path(file)),
        (Preprocessing, "__call__", lambda _, picture: picture.getpixel((0, 0))[0] == ODD),
        (duplicates, "_size", of_path),
        (duplicates, "_sample", of_path),
        (duplicates, "_digest", of_path),
    ],
    "parquet": [(ParquetImages, "read", lambda _, index: index == 1)],
    "dicom": [
        (dicom, "_read_header", lambda _, file: of_path(file)),
        (dicom_files, "open_dicom", lambda file, _: of_path(file)),
        (dicom_files, "_grey", lambda values, _: bool((values == ODD).any())),
    ],
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    ("kind", "step"), [(kind, step) for kind, steps in STEPS.items() for step in range(len(steps))]
)
def test_what_a_step_raises_for_a_record_leaves_out_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step: int, error: BaseException
) -> None:
    where, name, is_odd = STEPS[kind][step]
    honest = getattr(where, name)

    def raising(*args: Any) -> Any:
        if is_odd(*args):
            raise error
        return honest(*args)

    monkeypatch.setattr(where, name, raising)
    # Copies are compared step by step only where they look alike so far.
    others = (Record("b", "4", grey=30), Record("a", "5", grey=30)) if where is duplicates else ()
    node = write(kind, tmp_path / "data", RECORDS + others)
    own = {"state-dir": str(tmp_path / "s"), "cache-dir": str(tmp_path / "c"), "unit": "record"}
    used, _, failure = with_records(RUN, parse_node_config(node | own), 1.0, _levels)
    assert failure.text == ""
    assert [level for level in used if level != ODD] == ([10] if others else [10, 30])
    # A record whose copies cannot be found is a record.
    assert (ODD in used) == (where is duplicates)


def _levels(site: SiteFeatures, _: NodeConfig) -> list[int]:
    return sorted((site.train.features[:, 0] * 255).round().int().tolist())


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_person_or_a_signal_ends_the_work(end: type[BaseException]) -> None:
    names: dict[str, Any] = {"__name__": "flwr.supercore.exit", "end": end}
    exec("def ends():\n    raise end\n", names)
    with pytest.raises(end):
        attempt(names["ends"])


def test_memory_that_other_records_took_is_not_this_records_fault() -> None:
    tries: list[int] = []

    def work() -> str:
        tries.append(len(tries))
        if len(tries) == 1:
            raise MemoryError
        return "done"

    assert attempt(work) == "done"
    assert isinstance(attempt(lambda: bytes(2**62)), MemoryError)


def test_a_description_is_one_short_line_whatever_the_error_is() -> None:
    assert described(SpeechlessError()) == "SpeechlessError: without a text"
    assert described(ValueError("a\nb " + "x" * 10**6)) == "ValueError: a b " + "x" * 496


def grey(index: int, _: int) -> Image.Image:
    return Image.new("RGB", (4, 4), (index, index, index))


def own(transform: Callable[[Any], Any], forward: Callable[[Any], Any]) -> Backbone:
    return Backbone("own", 1, "f", OwnTransform(transform), forward, torch.device("cpu"))


def as_tensor(picture: Any) -> Any:
    return torch.from_numpy(np.asarray(picture.resize((4, 4))).copy()).permute(2, 0, 1).float()


def mean(images: Any) -> Any:
    return images.mean((1, 2, 3))[:, None]


@pytest.mark.parametrize("odd", [0, 1, 5])
def test_an_image_that_a_backbone_prepares_otherwise_is_broken_alone(odd: int) -> None:
    """Also if it is the first: the others do not have to follow it."""

    def transform(picture: Any) -> Any:
        image = as_tensor(picture)
        return image[:, :2] if float(image.max()) == odd else image[:, :3, :3]

    parts = list(in_parts(grey, [range(9)], own(transform, mean), 4))
    assert [row for part in parts for row in part.rows] == [row for row in range(9) if row != odd]
    assert [row for part in parts for row, _ in part.broken] == [odd]


@pytest.mark.parametrize("odd", [0, 1, 8])
def test_an_image_at_which_a_backbone_fails_is_broken_alone(odd: int) -> None:
    def forward(images: Any) -> Any:
        if bool((images == odd + 1).all((1, 2, 3)).any()):
            raise SystemExit("a layer gave up")
        return mean(images)

    backbone = own(lambda picture: as_tensor(picture) + 1, forward)
    parts = list(in_parts(grey, [range(9)], backbone, 4))
    found = {
        row: float(x) for part in parts if part.features is not None
        for row, x in zip(part.rows, part.features[:, 0], strict=True)
    }  # fmt: skip
    assert found == {row: row + 1.0 for row in range(9) if row != odd}
    assert [row for part in parts for row, _ in part.broken] == [odd]


def test_a_backbone_that_fails_without_any_record_breaks_none() -> None:
    def forward(_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel"):
        list(in_parts(grey, [range(3)], own(as_tensor, forward), 4))
