"""Bags: the images of one unit are one record, whose feature is their mean, in every kind of source."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.partition import share
from fedsurrogate.client_app.datasets.records import Records, pooled
from fedsurrogate.client_app.features.extraction import PIECE, means_of
from fedsurrogate.client_app.features.site_features import SiteFeatures, load_site
from fedsurrogate.client_app.governance.release import without_records
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError, DataError, FedSurrogateError
from fedsurrogate.common.run import parse_run
from tests import dicom_files
from tests.bags import KINDS, Picture, pictures, write

PLAIN: dict[str, Any] = {"image-size": 4, "device": "cpu", "classes": "a,b"}
POOLED = PLAIN | {"features.bag": "mean"}
PRIVATE = POOLED | {"epsilon": 1.0, "delta": 1e-5}
POWER = 0.5


def loaded(node: dict[str, Any], run: dict[str, Any]) -> SiteFeatures:
    """The site's features; state and cache stand next to the data."""
    home = Path(node["data-dir"]).parent
    own = {"cache-dir": str(home / "cache"), "state-dir": str(home / "state")}
    return load_site(parse_run(run), parse_node_config(own | node), 100.0)


def records(site: SiteFeatures) -> dict[tuple[str, str], list[float]]:
    """Patient, class, and the first number of each record's feature."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for part in (site.train, site.test):
        names = part.units or ("",) * len(part.labels)
        for name, label, x in zip(names, part.labels.tolist(), part.features, strict=True):
            assert float(x.max() - x.min()) < 1e-6
            found[name, site.classes[label]].append(round(float(x[0]), 5))
    return {key: sorted(own) for key, own in found.items()}


def features_of(site: SiteFeatures) -> list[float]:
    return [x for own in records(site).values() for x in own]


def expected(images: Sequence[Picture], power: float) -> dict[tuple[str, str], list[float]]:
    """The same, from the images themselves."""
    bags: dict[tuple[str, str], list[Picture]] = defaultdict(list)
    for each in images:
        bags[each.patient, each.bag].append(each)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (patient, _), own in bags.items():
        # Features of images are kept in half precision.
        x = [float(np.float16(each.level / 255)) ** power for each in own if not each.broken]
        if x:
            found[patient, own[0].label].append(round(float(np.float32(np.mean(x))), 5))
    return {key: sorted(own) for key, own in found.items()}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bag_is_the_mean_of_its_images_after_power_in_every_kind_of_data(
    kind: str, private: bool
) -> None:
    run = (PRIVATE if private else POOLED) | {"features.power-transform": POWER}

    @settings(max_examples=8, deadline=None)
    @given(pictures())
    def pooled(images: list[Picture]) -> None:
        wanted = expected(images, POWER)
        with TemporaryDirectory() as home:
            node = write(Path(home) / "data", kind, images)
            try:
                found = records(loaded(node, run))
            except DataError:
                # Without a usable image, or with all records of a patient in one small part.
                assert not wanted
                return
        assert {key[1] for key in found} <= {"a", "b"}
        # Half precision of the images' features, half a unit in the third digit.
        assert {key: pytest.approx(own, abs=2e-3) for key, own in wanted.items()} == found

    pooled()


@pytest.mark.parametrize("kind", KINDS)
def test_no_bag_and_no_patient_lies_on_both_sides_of_a_split(kind: str, tmp_path: Path) -> None:
    images = [Picture(at + 1, str(at // 3), str(at // 6), "ab"[at // 3 % 2]) for at in range(60)]
    node = write(tmp_path / "data", kind, images)
    site = loaded(node, POOLED | {"test-fraction": 0.4})
    train, test = set(site.train.units or ()), set(site.test.units or share_of_test(node))
    assert len(site.train.labels) + len(site.test.labels) == 20
    assert train
    assert test
    assert not train & test


def share_of_test(node: dict[str, Any]) -> set[str]:
    """Patients of the test records."""
    run = parse_run(POOLED | {"test-fraction": 0.4})
    found = share(run, parse_node_config(node))
    assert found.dataset.patients is not None
    return {found.dataset.patients[row] for row in found.test.tolist()}


TORN = [
    Picture(10, "1", "1", "a"),
    Picture(20, "1", "1", "b"),
    Picture(30, "2", "1", "b"),
    Picture(40, "1", "2", "a"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bag_with_two_targets_is_refused_by_name_and_under_privacy_left_out_alone(
    kind: str, tmp_path: Path
) -> None:
    node = write(tmp_path / "data", kind, TORN)
    with pytest.raises(DataError, match=r"1 of 3 bags have images with different targets.*bag '1'"):
        loaded(node, POOLED)
    site = loaded(node, PRIVATE)
    assert sorted(features_of(site)) == pytest.approx([30 / 255, 40 / 255], abs=1e-3)
    assert "bag '1'" in site.report.left_out[-1].why


def test_an_image_without_a_bag_is_refused_and_under_privacy_left_out_alone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    node = write(folder, "imagefolder", TORN[2:])
    table = folder / "table.csv"
    table.write_text(table.read_text().replace("a,2,1", "a,2,"))
    with pytest.raises(DataError, match="1 of 2 records have no bag"):
        loaded(node, POOLED)
    assert len(loaded(node, PRIVATE).train.labels) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_bags_that_is_missing_is_a_public_fact(kind: str, tmp_path: Path) -> None:
    node = parse_node_config(write(tmp_path / "data", kind, TORN[2:]) | {"bag-column": "lesion"})
    with pytest.raises(FedSurrogateError, match="lesion"):
        without_records(parse_run(PRIVATE), node)
    with pytest.raises(FedSurrogateError, match="lesion"):
        load_site(parse_run(PRIVATE), node, 100.0)


def dicom(folder: Path, **tags: Any) -> Path:
    pixels = tags.pop("pixels")
    return dicom_files.save(
        folder / f"{len(list(folder.rglob('*.dcm'))):03}.dcm", dicom_files.image(pixels, **tags)
    )


@pytest.mark.parametrize(("column", "bags"), [("series", 4), ("study", 3), ("patient", 2)])
def test_headers_of_dicom_name_series_studies_and_patients(
    column: str, bags: int, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    level = 0
    # Two patients; the first has two studies, of which one has two series of two slices.
    for patient, study, series in ((1, 1, 1), (1, 1, 2), (1, 2, 3), (2, 3, 4)):
        for _ in range(2):
            level += 10
            dicom(
                data / "ab"[patient - 1],
                pixels=np.full((4, 4), level, np.uint8),
                PatientID=str(patient),
                StudyInstanceUID=f"1.2.{study}",
                SeriesInstanceUID=f"1.3.{series}",
            )
    node = {"data": "dicom", "data-dir": str(data), "bag-column": column}
    site = loaded(node, PRIVATE)
    assert len(site.train.labels) == bags
    assert len(set(site.train.units or ())) == 2


def test_all_images_of_a_file_are_a_bag_and_only_where_bags_are_pooled(tmp_path: Path) -> None:
    data = tmp_path / "data"
    volume = np.stack([np.full((4, 4), 20 * (at + 1), np.uint8) for at in range(5)])
    for patient in range(4):
        dicom(data / "ab"[patient % 2], pixels=volume + patient, PatientID=str(patient))
    dicom(data / "a", pixels=volume[0] + 7, PatientID="9")
    node = {"data": "dicom", "data-dir": str(data), "dicom-frames": "all"}
    site = loaded(node, PRIVATE)
    found = sorted(features_of(site))
    assert found == pytest.approx([each / 255 for each in (27, 60, 61, 62, 63)], abs=1e-3)
    with pytest.raises(DataError, match=r"hold several images.*features\.bag"):
        loaded(node, PLAIN)


def test_more_images_than_a_volume_has_are_left_out_with_their_file(tmp_path: Path) -> None:
    data, pixels = tmp_path / "data", np.full((4, 4), 9, np.uint8)
    dicom(data / "a", pixels=pixels, PatientID="1")
    dicom(data / "a", pixels=pixels + 1, PatientID="2", NumberOfFrames="2147483647")
    node = {"data": "dicom", "data-dir": str(data), "dicom-frames": "all"}
    assert len(loaded(node, PRIVATE).train.labels) == 1


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
def test_a_folder_inside_that_of_a_class_is_a_bag(kind: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for at, name in enumerate(("a/p1/x/1", "a/p1/x/2", "a/p2/1", "a/3", "a/4", "b/p1/1", "b/p1/2")):
        pixels = np.full((4, 4), 10 * (at + 1), np.uint8)
        file = data / f"{name}.{'dcm' if kind == 'dicom' else 'png'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if kind == "dicom":
            dicom_files.save(file, dicom_files.image(pixels, PatientID=name[:4]))
        else:
            Image.fromarray(pixels).save(file)
    node = {"data": kind, "data-dir": str(data), "bag-column": "folder", "unit": "bag"}
    site = loaded(node, PRIVATE)
    found = sorted(round(each * 255) for each in features_of(site))
    assert found == [15, 30, 40, 50, 65]


@pytest.mark.parametrize(
    "more", [{"is_train": torch.tensor([True, False, True])}, {"origin": ("n", "m", "n")}], ids=list
)
def test_a_bag_in_both_parts_of_a_split_or_at_two_sites_is_refused_or_left_out(
    more: dict[str, Any],
) -> None:
    own = Records(list("aab"), "key", bags=("x", "x", "y"), **more)
    with pytest.raises(DataError, match=r"^1 of 2 bags .* bag 'x'"):
        pooled(own, LeftOut(), False)
    assert pooled(own, LeftOut(one_by_one=True), False).labels == ["b"]


def test_a_key_of_bags_is_that_of_their_images() -> None:
    keys = {
        pooled(Records(list("aaa"), of, bags=names), LeftOut(), False).key
        for of in ("one", "two")
        for names in (None, tuple("xxy"), tuple("xyy"), tuple("xxx"))
    }
    assert len(keys) == 8


def test_a_whole_bag_counts_once_under_another_name(tmp_path: Path) -> None:
    images = [Picture(10, "1", "1", "a"), Picture(20, "1", "1", "a"), Picture(30, "2", "1", "b")]
    copy = [Picture(20, "3", "1", "a"), Picture(10, "3", "1", "a")]
    for number, (more, bags) in enumerate((([], 2), (copy, 2), (copy[:1], 3))):
        node = write(tmp_path / str(number) / "data", "safetensors", images + more)
        assert len(loaded(node, PRIVATE).train.labels) == bags


class Watched:
    """Features that note how many rows are read at a time."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape, self.most = x, x.shape, 0

    def __getitem__(self, rows: Tensor) -> Tensor:
        self.most = max(self.most, len(rows))
        return self.x[rows]


def test_a_slide_is_pooled_in_chunks_whatever_its_size() -> None:
    dimension = 1024
    # One row of which all are views: a slide of 50,000 patches takes no memory here.
    x: Any = Watched(torch.ones(1, dimension).expand(50_000, dimension))
    every = torch.ones(50_000, dtype=torch.bool)
    assert means_of(x, [torch.arange(50_000)], every, 1.0).eq(1).all()
    assert 0 < x.most <= PIECE // dimension


def test_one_large_file_of_slides_is_not_copied_to_memory(tmp_path: Path) -> None:
    """64 MiB stay mapped: what the process holds for itself grows by less than a third of it."""
    patches, dimension = 2**14, 1024
    data = tmp_path / "data"
    data.mkdir()
    content = {
        "x": torch.ones(patches, dimension),
        "y": torch.arange(patches) // (patches // 4) % 2,
        "slide": torch.arange(patches) // (patches // 4),
    }
    save_file(content, data / "f.safetensors", {"classes": "a,b"})
    del content
    node = {"data": "safetensors", "data-dir": str(data), "bag-column": "slide"}
    before = held()
    site = loaded(node, POOLED)
    assert held() - before < patches * dimension * 4 / 3
    assert len(site.train.labels) + len(site.test.labels) == 4
    assert site.train.features.eq(1).all()


def held() -> int:
    """Bytes of memory that belong to this process alone, and to no file, without what is free."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_pooling_is_part_of_a_runs_digest_and_where_it_is_off_digests_are_as_before() -> None:
    assert parse_run(POOLED).digest != parse_run(PLAIN).digest
    assert parse_run(PLAIN | {"features.bag": "none"}).digest == parse_run(PLAIN).digest
    assert parse_run(PLAIN | {"bag-column": "study"}).digest == parse_run(PLAIN).digest


@pytest.mark.parametrize("method", ["fedavg", "fedlap"])
def test_a_network_that_reads_images_refuses_bags(method: str) -> None:
    with pytest.raises(ConfigError, match=r"features\.bag = 'mean' pools features"):
        parse_run({"method": method, f"{method}.model": "convnet", "features.bag": "mean"})
