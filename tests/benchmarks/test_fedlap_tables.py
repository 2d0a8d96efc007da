"""FedLAP's tables: the archives of MNIST are read, the sites have the paper's classes, the rows are
valid settings.
"""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from benchmarks.reproduce import _idx, fedlap_tables
from fedsurrogate.common.run import parse_run

PIXELS = (torch.arange(60 * 28 * 28) % 251).to(torch.uint8).reshape(60, 28, 28)
LABELS = (torch.arange(60) % 10).to(torch.uint8)


def write(file: Path, array: torch.Tensor, *, packed: bool = False) -> None:
    header = bytes((0, 0, 8, array.dim())) + struct.pack(f">{array.dim()}I", *array.shape)
    content = header + bytes(array.flatten().tolist())
    if packed:
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(content))
    else:
        file.write_bytes(content)


def archive(folder: Path, *, packed: bool = False) -> Path:
    for images, labels in _idx.PARTS.values():
        write(folder / images, PIXELS, packed=packed)
        write(folder / labels, LABELS, packed=packed)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_is_read_as_it_was_written(tmp_path: Path, packed: bool) -> None:
    pixels, labels = _idx.read_images(archive(tmp_path, packed=packed), "train")
    assert torch.equal((pixels * 255).round().to(torch.uint8), PIXELS.flatten(1))
    assert torch.equal(labels, LABELS.long())


def test_an_archive_that_is_cut_short_or_of_another_type_is_refused(tmp_path: Path) -> None:
    file = archive(tmp_path) / _idx.PARTS["test"][0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="fetch it again"):
        _idx.read_images(tmp_path, "test")
    file.write_bytes(b"\0\0\x0d" + whole[3:])
    with pytest.raises(ValueError, match="000008"):
        _idx.read_images(tmp_path, "test")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="t10k-images"):
        _idx.read_images(tmp_path, "test")


def test_sites_have_the_papers_pairs_of_classes_and_the_fraction_of_their_records(
    tmp_path: Path,
) -> None:
    base, whole = fedlap_tables.read("mnist", str(archive(tmp_path)), full=False)
    assert base["image-size"] == 28
    data = fedlap_tables.pairs(whole, 0.5, seed=1)
    assert [tuple(torch.unique(each.train.labels).tolist()) for each in data.sites] == [
        (5, 6),
        (1, 2),
        (0, 8),
        (3, 9),
        (4, 7),
    ]
    assert [len(each.train.labels) for each in data.sites] == [6] * 5
    assert len(data.test.labels) == 60


@pytest.mark.parametrize("data", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("table", ["1", "2", "3"])
@pytest.mark.parametrize("full", [False, True])
def test_every_row_has_valid_settings_and_every_figure_of_the_paper_a_row(
    data: str, table: str, full: bool
) -> None:
    given = fedlap_tables.paper_settings(data, table == "2") if full else {}
    rows = fedlap_tables.rows_of(table, 4, given, 50)
    base = {"backbone": "pixels", "image-size": 28}
    for own in rows.values():
        private = {"delta": 1e-5, "classes": "0,1"} if "epsilon" in own else {}
        run = parse_run(base | private | own)
        if full and run.plan.training.section == "fedlap":
            assert (run.settings.fedlap.width, run.settings.fedlap.kind) == (128, "convnet")
    assert set(fedlap_tables.PAPER[table].get(data, {})) <= set(rows)
