"""What a run gets of a site's records: which are used and with whose patients, what is refused, and
what the report says of the others.
"""

from __future__ import annotations

import hashlib
import math
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.datasets.left_out import NoRecordsError, SourceError
from fedsurrogate.client_app.datasets.partition import SiteShare
from fedsurrogate.client_app.features import site_features
from fedsurrogate.client_app.features.extraction import Features
from fedsurrogate.client_app.features.site_features import (
    check_addressee,
    examples_of,
    in_simulation,
    load_site,
    no_features,
    site_backbone,
    site_name,
    usable,
    with_broken,
    with_lost_images,
)
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.backbones.networks import BackboneOptions
from fedsurrogate.common.data_report import DataReport, Loss
from fedsurrogate.common.errors import BackboneError, ConfigError, DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import to_record

D = 3


def dataset(labels: list[int], **more: Any) -> Dataset:
    return Dataset("wards", torch.tensor(labels, dtype=torch.int64), ("a", "b"),
                   torch.ones(len(labels), dtype=torch.bool), "key", **more)  # fmt: skip


def features(count: int, broken: set[int], odd: set[int], seed: int = 0) -> Features:
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(seed))
    for row in odd:
        x[row, 1] = math.inf
    ok = torch.tensor([row not in broken for row in range(count)], dtype=torch.bool)
    return Features(x, ok, "print", 1.5, cached=False)


def loaded(
    patch: pytest.MonkeyPatch, part: SiteShare, found: Features, run: Any, node: NodeConfig
) -> Any:
    patch.setattr(site_features, "share", lambda *given: part)
    patch.setattr(site_features, "dataset_features", lambda *given: found)
    return load_site(run, node, 9.0)


ROWS = st.lists(st.integers(0, 9), unique=True, max_size=10).map(sorted)


@settings(max_examples=25, deadline=None)
@given(
    train=ROWS,
    test=ROWS,
    broken=st.sets(st.integers(0, 9), max_size=4),
    odd=st.sets(st.integers(0, 9), max_size=2),
    some=st.booleans(),
    bags=st.booleans(),
    power=st.sampled_from([1.0, 0.5]),
)
def test_usable_records_keep_their_order_and_the_others_are_counted(
    train: list[int],
    test: list[int],
    broken: set[int],
    odd: set[int],
    some: bool,
    bags: bool,
    power: float,
) -> None:
    run = parse_run({"features.power-transform": power})
    found = features(10, broken, odd)
    more: dict[str, Any] = {"patients": tuple("pqrstuvwxy"), "left_out": (Loss("2 lost", 2),)}
    more["values"] = torch.arange(20.0).reshape(10, 2).double()
    if some:
        more["rows"] = torch.arange(10).flip(0) + 100
    if bags:
        more["members"] = tuple(torch.tensor([row]) for row in range(10))
    own = dataset([0, 1] * 5, **more)
    part = SiteShare(
        own, torch.tensor(train, dtype=torch.int64), torch.tensor(test, dtype=torch.int64), True
    )
    good = [[row for row in rows if row not in broken | odd] for rows in (train, test)]
    with pytest.MonkeyPatch.context() as patch:
        reports: list[DataReport] = []
        patch.setattr(site_features, "log_once", lambda report, node: reports.append(report))
        if not good[0]:
            words = f"no usable training record among {len(train)} in 'wards'"
            with pytest.raises(DataError, match=words):
                loaded(patch, part, found, run, NodeConfig())
            return
        site = loaded(patch, part, found, run, NodeConfig())
    for got, rows in zip((site.train, site.test), good, strict=True):
        plain = found.x[rows]
        wanted = plain.sign() * plain.abs() ** power
        torch.testing.assert_close(got.features, wanted)
        assert got.labels.tolist() == [row % 2 for row in rows]
        assert got.units == tuple("pqrstuvwxy"[row] for row in rows)
        assert got.rows.tolist() == rows
        assert got.values.tolist() == [[2 * row, 2 * row + 1] for row in rows]
        assert got.folder is None
    assert (site.classes, site.seconds, site.simulated, site.key) == (("a", "b"), 1.5, True, "key")
    places = [109 - row if some else row for row in good[0]]
    selected = torch.tensor(places, dtype=torch.int64).numpy().tobytes()
    assert site.selected == hashlib.sha256(selected).hexdigest()
    unread = sorted(set(train) - set(good[0]))
    left = [Loss("2 lost", 2)]
    if unread:
        what = "bags" if bags else "images"
        left.append(
            Loss(
                f"{len(unread)} of {len(train)} training {what} cannot be read, or have no finite "
                f"features, such as record {unread[0] + 1}",
                len(unread),
            )
        )
    assert [*site.report.left_out] == left
    assert site.report.used == 10 - len(unread)
    assert reports == [site.report]


# By what the site protects and whether the run is private: whose patients its records have.
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("named", [True, False])
def test_patients_are_the_units_unless_the_site_or_its_unit_is_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, private: bool, unit: str, named: bool
) -> None:
    run = parse_run({"epsilon": 3.0, "delta": 1e-5, "classes": "a,b"} if private else {})
    column = {"patient-column": "patient"} if named else {}
    node = NodeConfig(data="dicom", data_dir=str(tmp_path), unit=unit, state_dir=str(tmp_path),
                      patient_column=column.get("patient-column", ""))  # type: ignore[arg-type]  # fmt: skip
    own = dataset([0, 1, 0], patients=("p", "p", "q") if named else None)
    part = SiteShare(own, torch.arange(2), torch.tensor([2]), False)
    if private and unit != "record" and node.protects == "patient" and not named:
        with pytest.raises(
            SourceError, match="has no patient IDs, but this site protects patients"
        ):
            loaded(monkeypatch, part, features(3, set(), set()), run, node)
        return
    site = loaded(monkeypatch, part, features(3, set(), set()), run, node)
    record = unit == "record" or (private and node.protects == "record")
    assert site.train.units == (None if record or not named else ("p", "p"))
    assert site.test.units == (("q",) if named else None)


COUNTS = {"counting.kind": "survey", "classes": "a,b", "sites": 9}


@pytest.mark.parametrize("kind", ["plain", "private", "summed"])
@pytest.mark.parametrize("data", ["", "safetensors"])
def test_a_site_without_a_record_is_refused_unless_zeros_hide_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, data: str
) -> None:
    flat: dict[str, Any] = {
        "plain": {"classes": "a,b"},
        "private": {"classes": "a,b", "epsilon": 3.0, "delta": 1e-5},
        "summed": {"classes": "a,b", "secure-aggregation": True, "fedpft.covariance": "gram"},
    }[kind]
    node = NodeConfig(data=data, data_dir=data and str(tmp_path), state_dir=str(tmp_path))
    none = SiteShare(dataset([]), torch.arange(0), torch.arange(0), False)
    if data and kind == "summed":
        found = loaded(monkeypatch, none, features(0, set(), set()), parse_run(flat), node)
        assert found.train.features.shape == (0, D)
        return
    with pytest.raises(NoRecordsError, match="no record of the classes a, b in 'wards'"):
        loaded(monkeypatch, none, features(0, set(), set()), parse_run(flat), node)


def test_a_run_that_counts_labels_computes_no_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = SiteShare(dataset([0, 1]), torch.arange(2), torch.arange(0), True)
    node = NodeConfig(state_dir=str(tmp_path))
    site = loaded(monkeypatch, part, features(2, {0, 1}, set()), parse_run(COUNTS), node)
    assert site.train.features.tolist() == [[0.0], [0.0]]
    assert site.fingerprint.startswith("labels-only")
    none = no_features(4)
    assert (none.x.shape, none.ok.tolist(), none.seconds, none.cached) == (
        (4, 1),
        [True] * 4,
        0.0,
        False,
    )


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 9), most=st.integers(0, 9), folder=st.booleans())
def test_features_beyond_the_limit_of_memory_are_in_a_file(
    count: int, most: int, folder: bool
) -> None:
    """Four bytes a number; what just fits stays in memory."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        own, found = dataset([0] * count), features(count, {0}, set())
        rows, home = torch.arange(count), Path(place) if folder else None
        got = usable(own, found, rows, 1.0, home, 4 * D * most / 2**20)
        assert got.folder == (home if count - 1 > most else None)
        assert torch.equal(got.features, found.x[1:])
    if count > 1:
        with TemporaryDirectory() as place:
            (Path(place) / "file").write_text("")
            with pytest.raises(SourceError, match=r"cache-dir '.*file'.*make room there"):
                usable(own, found, rows, 1.0, Path(place, "file"), 0.0)


def test_the_report_names_a_broken_record_and_reopens_images_only_for_a_person() -> None:
    report = dataset([0] * 40)

    def opener(index: int, shortest: int) -> Any:
        if index == 3:
            return SimpleNamespace()
        kinds = {0: OSError("cut at 17"), 1: DataError("no 'pixels'"), 2: OSError("none")}
        raise kinds[index % 3]

    images = dataset([0] * 40, opener=opener)
    assert with_broken(images, [], "x") == images.report
    plain = with_broken(images, [5, 7], "of 40 images")
    (loss,) = plain.left_out
    assert (plain.used, loss.count) == (38, 2)
    assert loss.why == "2 of 40 images cannot be read, or have no finite features, such as record 6"
    seen = with_broken(images, [5, 7, 8, 10, 3], "of 40 images", reopen=True).left_out[0].why
    assert seen.endswith("record 6 (OSError: none); record 8 (no 'pixels'); record 4")
    assert examples_of(report, [4, 5]).startswith("record 5")
    bags = dataset([0] * 2, opener=opener, members=(torch.tensor([0]), torch.tensor([1])))
    assert examples_of(bags, [1]) == "record 2"
    assert examples_of(dataset([0] * 2, features=torch.zeros(2, D)), [1]) == "record 2"


def test_a_warning_of_odd_columns_is_for_runs_without_frames_and_ranges(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = SiteShare(dataset([0, 1] * 20), torch.arange(40), torch.arange(0), True)
    found = features(40, set(), set())
    found.x[:, 2] += 1e5
    ranges = {"features.ranges": "-9,9; -9,9; 0,200000"}
    for flat, odd in (
        ({}, False),
        ({"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "a,b"}, True),
        (
            {"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "a,b"} | ranges,
            False,
        ),
    ):
        warned: list[str] = []
        monkeypatch.setattr(site_features, "_warn_once", warned.append)
        loaded(monkeypatch, part, found, parse_run(flat), NodeConfig(state_dir=str(tmp_path)))
        assert bool(warned) == odd, flat
        assert all(words.startswith("column 2 of the features") for words in warned)


@given(st.sampled_from(["", "north"]), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**40))
def test_a_site_is_named_by_its_setting_its_part_or_its_number(
    name: str, part: int, parts: int, number: int
) -> None:
    node = NodeConfig(site=name, partition_id=min(part, parts - 1), num_partitions=parts)
    wanted = name or (str(node.partition_id) if parts > 1 else f"node-{number}")
    assert site_name(node, number) == wanted


def test_a_request_for_another_name_is_refused_and_one_without_a_name_is_not() -> None:
    check_addressee(to_record(None, {}), "north")
    check_addressee(to_record(None, {"site": "north"}), "north")
    long = "south" * 20
    with pytest.raises(ConfigError, match=r"'north'.*registered its key as") as error:
        check_addressee(to_record(None, {"site": long}), "north")
    assert f"{long[:64]!r};" in str(error.value)


def test_a_process_simulates_where_ray_or_the_local_engine_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = "fedsurrogate.server_app.deployment.local_engine"
    for ray, local in product([None, False, True], repeat=2):
        for name, does, on in (("ray", "is_initialized", ray), (engine, "running", local)):
            if on is None:
                monkeypatch.delitem(sys.modules, name, raising=False)
            else:
                stand_in: Any = SimpleNamespace(**{does: lambda on=on: on})
                monkeypatch.setitem(sys.modules, name, stand_in)
        assert in_simulation() == bool(ray or local)


def test_weights_on_a_hospitals_disk_are_named_by_the_hospital(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(site_features, "load_backbone", lambda *given: made.append(given))
    monkeypatch.setattr(site_features, "own_backbone", lambda *given: made.append(given))
    run = parse_run(
        {"backbone": "pixels", "image-size": 9, "weights-path": "run.pt", "device": "cpu"}
    )
    for data, own, wanted in (
        ("", "", "run.pt"),
        ("", "own.pt", "own.pt"),
        ("dicom", "", ""),
        ("dicom", "own.pt", "own.pt"),
    ):
        site_backbone(run.settings, NodeConfig(data=data, data_dir=data and "x", weights_path=own))  # type: ignore[arg-type]
        assert made.pop() == ("pixels", wanted, 9, "cpu", BackboneOptions(download=not data))
    site_backbone(run.settings, NodeConfig(), "cuda:7")
    assert made.pop()[3] == "cuda:7"
    own_run = parse_run({"backbone": "own", "image-size": 9, "device": "cpu"})
    site_backbone(own_run.settings, NodeConfig(backbone="python:package.module:function"))
    assert made.pop() == ("python:package.module:function", 9, "cpu")
    with pytest.raises(BackboneError, match="names none; set backbone"):
        site_backbone(own_run.settings, NodeConfig())
    given = {
        "backbone": "timm:local-dir:/m",
        "features.mean": "0.1,0.2,0.3",
        "features.pooling": "cls",
    }
    stated = parse_run({**given, "device": "cpu"})
    hospital = {"data": "dicom", "data_dir": "x", "download_weights": True}
    with pytest.raises(
        BackboneError, match="'/m' is a place on another machine, so set weights-path"
    ):
        site_backbone(stated.settings, NodeConfig(**hospital))
    site_backbone(stated.settings, NodeConfig(**hospital, weights_path="own"))
    options = BackboneOptions((0.1, 0.2, 0.3), (), "cls", download=True)
    assert made.pop() == ("timm:local-dir:/m", "own", 0, "cpu", options)


def test_lost_images_of_bags_are_a_warning() -> None:
    report = DataReport("wards", 3, warnings=("first",))
    found = features(2, set(), set())
    assert with_lost_images(report, found) is report
    for ok, words in (([True] * 3, None), ([False, True, False], "2 images cannot be read")):
        own = Features(found.x, found.ok, "f", 0.0, False, (), torch.tensor(ok))
        made = with_lost_images(report, own)
        assert made.warnings[0] == "first"
        warning = f"{words}, and are left out of their bags"
        assert made.warnings[1:] == ((warning,) if words else ())
