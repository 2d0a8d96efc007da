"""Slides from the files of CLAM, TRIDENT and STAMP: each is the mean of its patches; what cannot be
used is refused by name, or left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load, read_schema
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.client_app.features.site_features import SiteFeatures, load_site
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from tests.slides import MODEL, TOOLS, Slide, slides, write, write_one

PRIVATE = {"epsilon": 1.0, "delta": 1e-5, "classes": "benign,tumour", "features.bag": "mean"}


def site(folder: Path, run: dict[str, Any] | None = None, **node: Any) -> SiteFeatures:
    own = {
        "data": "slides",
        "data-dir": str(folder),
        "cache-dir": str(folder.parent / "cache"),
        "state-dir": str(folder.parent / "state"),
    }
    return load_site(parse_run(run or PRIVATE), parse_node_config(own | node), 100.0)


def source(folder: Path, **more: Any) -> DataSource:
    return DataSource("slides", str(folder), **{"bags": ""} | more)


def means(dataset: Dataset, power: float = 1.0) -> torch.Tensor:
    def none() -> Any:
        raise AssertionError("slides need no backbone")

    return extract(dataset, none, Path("none")).of(torch.arange(len(dataset)), power)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_slide_is_the_mean_of_its_patches(tool: str, tmp_path: Path) -> None:
    found = slides(9, 0)
    write(tmp_path / "data", tool, found)
    own = site(tmp_path / "data", **{"patient-column": "case"})
    assert own.fingerprint == ("features-6" if "clam" in tool else MODEL)
    assert own.train.labels.tolist() == [("benign", "tumour").index(each.label) for each in found]
    assert own.train.units == tuple(each.patient for each in found)
    near = 1e-3 if tool == "stamp" else 1e-6
    wanted = np.stack([each.patches.mean(0) for each in found])
    np.testing.assert_allclose(own.train.features, wanted, atol=near, rtol=near)


def test_slides_of_a_patient_are_one_bag_of_all_their_patches(tmp_path: Path) -> None:
    found = slides(8, 1)
    write(tmp_path / "data", "trident", found)
    dataset = load(source(tmp_path / "data", bags="case"), 0)
    wanted = [
        np.sqrt(np.abs(both)).__mul__(np.sign(both)).mean(0)
        for first, second in zip(found[::2], found[1::2], strict=True)
        for both in [np.concatenate([first.patches, second.patches])]
    ]
    np.testing.assert_allclose(means(dataset, 0.5), np.stack(wanted), atol=1e-6, rtol=1e-5)


def test_h5_is_read_where_pt_is_there_too(tmp_path: Path) -> None:
    found = slides(4, 0)
    write(tmp_path, "clam-pt", [replace(each, patches=each.patches + 9) for each in found])
    write(tmp_path, "clam", found)
    dataset = load(source(tmp_path), 0)
    assert not dataset.left_out
    assert float(means(dataset).max()) < 8


def test_the_form_of_old_torch_is_read(tmp_path: Path) -> None:
    found = slides(4, 0)
    write(tmp_path, "clam-pt", found)
    file = tmp_path / "pt_files" / f"{found[1].name}.pt"
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)
    wanted = np.stack([each.patches.mean(0) for each in found])
    np.testing.assert_allclose(means(load(source(tmp_path), 0)), wanted, atol=1e-6)


def _h5(**content: Any) -> Callable[[Path], None]:
    def written(file: Path) -> None:
        with h5py.File(file, "w") as stream:
            for name, own in content.items():
                stream[name] = own

    return written


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no features": (_h5(coords=np.zeros((3, 2))), "no tensor 'features'"),
    "one vector": (_h5(features=np.zeros(6, np.float32)), r"float32 of shape \(6,\)"),
    "two slides": (_h5(features=np.zeros((2, 3, 6), np.float32)), r"of shape \(2, 3, 6\)"),
    "no patch": (_h5(features=np.zeros((0, 6), np.float32)), r"of shape \(0, 6\)"),
    "numbers of pixels": (_h5(features=np.zeros((3, 6), np.uint8)), "uint8 of shape"),
    "a group": (_h5(**{"features/x": np.zeros((3, 6))}), "no tensor 'features'"),
    "another dimension": (_h5(features=np.zeros((3, 5), np.float32)), "of dimension 5 of a model"),
    "no HDF5": (lambda file: file.write_bytes(b"\x89HDF"), "OSError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_be_used_is_refused_or_left_out_alone(
    fault: str, tmp_path: Path
) -> None:
    write(tmp_path / "data", "trident", found := slides(8, 0))
    file = tmp_path / "data" / f"features_{MODEL}" / f"{found[2].name}.h5"
    make, why = FAULTS[fault]
    file.unlink()
    make(file)
    with pytest.raises(DataError, match=f"1 slides.*{found[2].name}.*{why}|{why}.*{found[2].name}"):
        load(source(tmp_path / "data"), 0)
    own = site(tmp_path / "data")
    assert len(own.train.labels) == 7
    assert [each.count for each in own.report.left_out] == [1]
    assert read_schema(source(tmp_path / "data"))[0] == 6


def test_a_pt_file_with_code_is_not_run(tmp_path: Path) -> None:
    write(tmp_path, "clam-pt", found := slides(4, 0))
    torch.save({"x": Path("code")}, tmp_path / "pt_files" / f"{found[0].name}.pt")
    with pytest.raises(DataError, match=r"1 slides cannot be read.*UnpicklingError"):
        load(source(tmp_path), 0)


def test_patches_that_are_not_finite_are_not_in_the_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = slides(8, 0)
    found[1].patches[0] = np.nan
    broken = replace(found[1], patches=np.concatenate([found[1].patches, np.ones((2, 6))]))
    whole = replace(found[3], patches=np.full((2, 6), np.inf, np.float32))
    write(tmp_path / "data", "clam", [found[0], broken, found[2], whole, *found[4:]])
    own = site(tmp_path / "data")
    assert len(own.train.labels) == 7
    np.testing.assert_allclose(own.train.features[1], broken.patches[1:].mean(0), atol=1e-6)
    assert f"1 of {len(broken.patches)} patches have NaN or infinity" in caplog.text
    assert own.report.left_out[-1].count == 1


def test_slides_without_a_file_and_files_without_a_slide_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "clam", found := slides(6, 0))
    for each in found[:2]:
        (tmp_path / "h5_files" / f"{each.name}.h5").unlink()
    write_one(tmp_path, "clam", Slide("unnamed", "", "", found[0].patches))
    (tmp_path / "h5_files" / f"{found[0].name}.npy").write_bytes(b"")
    dataset = load(source(tmp_path), 0)
    assert len(dataset) == 4
    assert sorted(each.count for each in dataset.left_out) == [1, 2]
    texts = " ".join(each.why for each in dataset.left_out)
    assert "2 slides of" in texts
    assert "such as line 2" in texts
    assert "unnamed.h5" in texts


def test_two_files_of_one_name_are_told_apart_by_paths(tmp_path: Path) -> None:
    write(tmp_path, "trident", found := slides(4, 0))
    write_one(tmp_path, "trident", found[0], "conch")
    with pytest.raises(DataError, match=r"1 slides have several files.*features_conch"):
        load(source(tmp_path), 0)
    table = tmp_path / "cases.csv"
    path = f"features_{MODEL}/{found[0].name}.h5"
    table.write_text(table.read_text().replace(f"{found[0].name}.svs", path))
    assert len(load(source(tmp_path), 0)) == 4


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (None, "has no table of slides"),
        ("scan,label\na,b\n", "no column that names slides"),
        ("slide,kind\na,b\n", "lacks the columns 'label'"),
        ("slide,label\na,b\n", "none of the 1 slides in .* has a file"),
        ("slide,label\ns-000.A,benign\ns-000.A,tumour\n", "line 2 and line 3 .* differ"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: str | None, why: str, tmp_path: Path) -> None:
    write(tmp_path, "clam", slides(4, 0))
    if table is None:
        (tmp_path / "cases.csv").unlink()
    else:
        (tmp_path / "cases.csv").write_text(table)
    with pytest.raises(DataError, match=why):
        load(source(tmp_path), 0)


def test_a_row_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "data", "clam", slides(6, 0))
    table = tmp_path / "data" / "cases.csv"
    table.write_text(table.read_text() + table.read_text().splitlines()[1] + "\n")
    assert len(load(source(tmp_path / "data"), 0)) == 6
    assert len(site(tmp_path / "data").train.labels) == 6


def test_a_run_of_single_images_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", "clam", slides(6, 0))
    with pytest.raises(DataError, match=r"run with features\.bag = 'mean'"):
        site(tmp_path / "data", PRIVATE | {"features.bag": "none"})
