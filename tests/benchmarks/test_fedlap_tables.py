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
