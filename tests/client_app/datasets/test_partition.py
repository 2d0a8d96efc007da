from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import settings as h_settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.dataset import Dataset, load, stratified_split
from fedsurrogate.client_app.datasets.partition import (
    _parts,
    _test_parts,
    _train_parts,
    check_settings,
    partition,
    share,
    split_test,
    whole,
)
from fedsurrogate.client_app.datasets.source import DataSource
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import Settings

LABELS = torch.arange(10).repeat_interleave(40)
ORIGIN = ["north" if i % 3 else "south" for i in range(400)]


def run(**settings: object) -> Run:
    return Run.resolve(Settings(**settings))  # type: ignore[arg-type]


def resolved(**settings: object) -> Settings:
    return run(**settings).settings


def of_kind(kind: str, **settings: object) -> Settings:
    return resolved(partition=kind, site_column="hospital" if kind == "column" else "", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 5])
def test_dirichlet_gives_the_parts_of_flowers_partitioner(alpha: float, seed: int) -> None:
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    datasets = pytest.importorskip("datasets")
    order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
    theirs = partitioner.DirichletPartitioner(5, "key", alpha, 10, self_balancing=False, seed=seed)
    theirs.dataset = datasets.Dataset.from_dict(
        {"key": LABELS[order].tolist(), "index": order.tolist()}
    )
    found = partition(LABELS, None, resolved(partition="dirichlet", alpha=alpha, seed=seed), 5)
    assert [part.tolist() for part in found] == [
        sorted(theirs.load_partition(site)["index"][:]) for site in range(5)
    ]


@pytest.mark.slow
def test_parts_are_the_same_in_every_process() -> None:
    program = (
        "import torch; from fedsurrogate.client_app.datasets.partition import partition; "
        "from fedsurrogate.common.run import parse_run\n"
        "labels, settings = torch.arange(10).repeat_interleave(40), parse_run({'seed': 5}).settings\n"
        "print([p.tolist() for p in partition(labels, None, settings, 3)])"
    )
    folder = Path(__file__).parents[3]
    outcome = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    assert outcome.stdout.strip() == str(
        [p.tolist() for p in partition(LABELS, None, resolved(seed=5), 3)]
    )


def test_a_site_of_a_column_holds_one_value() -> None:
    parts = partition(LABELS, ORIGIN, of_kind("column"), 2)
    assert [{ORIGIN[i] for i in part.tolist()} for part in parts] == [{"north"}, {"south"}]


def test_what_cannot_be_partitioned_says_both_numbers() -> None:
    with pytest.raises(DataError, match="401 sites cannot share 400 training records"):
        partition(LABELS, None, resolved(), 401)
    with pytest.raises(ConfigError, match=r"classes-per-site = 11.*10 classes"):
        partition(LABELS, None, of_kind("classes", classes_per_site=11), 3)
    with pytest.raises(DataError, match=r"has 40 training records for 50 sites"):
        partition(LABELS, None, of_kind("classes", classes_per_site=10), 50)
    for sites in (1, 3):
        with pytest.raises(
            ConfigError, match=rf"'hospital' has 2 values \(north, south\).*{sites} sites"
        ):
            partition(LABELS, ORIGIN, of_kind("column"), sites)
    with pytest.raises(DataError, match="no site column"):
        partition(LABELS, None, of_kind("column"), 2)


def test_test_records_of_a_column_stay_with_their_site() -> None:
    origin = ["n", "s", "n", "s", "other"]
    tests = split_test(
        [torch.tensor([0]), torch.tensor([1])],
        torch.zeros(5, dtype=torch.int64),
        torch.tensor([2, 3, 4]),
        origin,
    )
    assert [test.tolist() for test in tests] == [[2], [3]]


def test_shares_of_the_digits_make_up_the_digits() -> None:
    settings = run(alpha=0.3)
    shares = [share(settings, NodeConfig(partition_id=k, num_partitions=4)) for k in range(4)]
    assert all(each.simulated for each in shares)
    records = torch.cat([torch.cat([each.train, each.test]) for each in shares])
    assert torch.equal(records.sort().values, torch.arange(1797))
    [(dataset, parts)] = whole(settings.settings, None, 4)
    assert torch.equal(dataset.labels, shares[0].dataset.labels)
    assert all(torch.equal(part, each.train) for part, each in zip(parts, shares, strict=True))


@st.composite
def hospitals(draw: st.DrawFn) -> tuple[Dataset, int]:
    """Records of patients, split by files or here; and a number of sites that can share them."""
    patients = draw(st.lists(st.sampled_from("ABCDEFGH"), min_size=4, max_size=24))
    several = st.lists(st.integers(0, 2), min_size=len(patients), max_size=len(patients))
    labels = torch.tensor(draw(several))
    drawn = draw(st.booleans())
    if drawn:
        share_, number = draw(st.floats(0.0, 0.9)), draw(st.integers(0, 9))
        is_train = stratified_split(labels, share_, number, patients)
    else:
        is_train = torch.tensor(draw(several)) > 0
        is_train[0] = True
    training = {who for who, train in zip(patients, is_train.tolist(), strict=True) if train}
    sites = draw(st.integers(1, len(training)))
    names = ("0", "1", "2")
    return Dataset("d", labels, names, is_train, "k", patients=tuple(patients), drawn=drawn), sites


@h_settings(max_examples=60, deadline=None)
@given(hospitals(), st.data())
def test_parts_that_were_asked_for_before_are_those_of_the_data_as_they_are_now(
    data: tuple[Dataset, int], drawn: st.DataObject
) -> None:
    dataset, sites = data
    assert dataset.patients is not None
    order = drawn.draw(st.permutations(range(len(dataset))))
    others = {
        "labels": dataset.labels[order],
        "is_train": dataset.is_train[order],
        "patients": tuple(dataset.patients[row] for row in order),
    }
    changes = drawn.draw(st.lists(st.sampled_from(["", *others]), min_size=2, max_size=6))
    for what in changes:
        now = replace(dataset, **{what: others[what]}) if what else dataset
        chosen = settings_of(partition="iid", seed=drawn.draw(st.integers(0, 1)))

        def parts(
            now: Dataset = now, chosen: Any = chosen
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            trains = _train_parts(now, chosen, sites)
            return trains, _test_parts(now, trains, by_column=False)

        try:
            wanted = parts()
        except DataError as error:
            with pytest.raises(DataError, match=re.escape(str(error))):
                _parts(now, chosen, sites)
            continue
        for found, own in zip(_parts(now, chosen, sites), wanted, strict=True):
            assert [each.tolist() for each in found] == [each.tolist() for each in own]


@h_settings(max_examples=120, deadline=None)
@given(hospitals(), st.sampled_from(["iid", "dirichlet"]), st.integers(0, 5))
def test_a_patient_is_at_one_site_with_all_records_and_a_split_made_here_divides_none(
    data: tuple[Dataset, int], kind: str, seed: int
) -> None:
    dataset, sites = data
    assert dataset.patients is not None
    places: dict[str, set[int]] = {}
    sides: dict[str, set[str]] = {}
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsurrogate.client_app.datasets.partition.load_all", lambda *_: [dataset])
        for place in range(sites):
            node = NodeConfig(partition_id=place, num_partitions=sites)
            part = share(run(partition=kind, seed=seed), node)
            for side, rows in (("train", part.train.tolist()), ("test", part.test.tolist())):
                seen += rows
                for row in rows:
                    assert bool(dataset.is_train[row]) == (side == "train")
                    places.setdefault(dataset.patients[row], set()).add(place)
                    sides.setdefault(dataset.patients[row], set()).add(side)
    assert len(seen) == len(set(seen)), "a record is at one site"
    assert set(dataset.is_train.nonzero().flatten().tolist()) <= set(seen)
    assert all(len(each) == 1 for each in places.values()), places
    if dataset.drawn:
        assert all(len(each) == 1 for each in sides.values()), sides


def features(folder: Path, *names: str) -> Path:
    for name in names:
        content = {"x": torch.randn(20, 3), "y": torch.arange(20) % 2}
        save_file(content, folder / f"{name}.safetensors")
    return folder


def test_a_run_cannot_point_a_site_at_a_folder(tmp_path: Path) -> None:
    settings = run(data="safetensors", data_dir=str(features(tmp_path, "x")))
    with pytest.raises(DataError, match="set data and data-dir in the node-config"):
        share(settings, NodeConfig())
    assert share(settings, NodeConfig(), in_simulation=True).simulated


def test_a_site_uses_its_own_data_whatever_the_run_says(tmp_path: Path) -> None:
    folder = features(tmp_path, "own")
    settings = run(data="safetensors", data_dir="/nowhere", dataset="theirs", label_column="other")
    node = NodeConfig(data="safetensors", data_dir=str(folder))
    own = share(settings, node, in_simulation=True)
    assert not own.simulated
    assert (own.dataset.name, len(own.train), len(own.test)) == ("safetensors", 16, 4)
    half = share(settings, node.model_copy(update={"num_partitions": 2}))
    assert 0 < len(half.train) < 16


@given(st.lists(st.sampled_from(["same", "labels", "longer"]), min_size=1, max_size=5))
@h_settings(max_examples=25, deadline=None)
def test_sites_of_a_simulation_read_features_once_and_see_every_change(changes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, source = Path(folder) / "all.safetensors", DataSource("safetensors", folder)
        labels = torch.arange(20) % 2
        save_file({"x": torch.rand(20, 3), "y": labels}, file)
        for at, change in enumerate(changes):
            before = load(source, 0)
            if change != "same":
                labels = (torch.arange(20 + (change == "longer")) + at) % 2
                save_file({"x": torch.rand(len(labels), 3), "y": labels}, file)
                os.utime(file, (at, at))
            again = load(source, 0)
            assert (again is before) == (change == "same")
            assert again.labels.tolist() == labels.tolist()
        file.unlink()
        with pytest.raises(DataError, match="lacks"):
            load(source, 0)


def test_each_of_several_datasets_is_a_site(tmp_path: Path) -> None:
    settings = run(data="safetensors", data_dir=str(features(tmp_path, "a", "b")), dataset="b, a")
    second = share(settings, NodeConfig(partition_id=1, num_partitions=2), in_simulation=True)
    assert second.dataset.name == "a"
    assert len(second.train) + len(second.test) == 20
    assert [dataset.name for dataset, _ in whole(settings.settings, None, 2)] == ["b", "a"]
    with pytest.raises(DataError, match=r"names 2 data sets \(b, a\).*3 sites"):
        share(settings, NodeConfig(num_partitions=3), in_simulation=True)


@h_settings(max_examples=20)
@given(st.lists(st.sampled_from("ab"), min_size=4, max_size=30), st.booleans())
def test_in_a_private_run_no_record_decides_which_others_train(
    tmp_path_factory: pytest.TempPathFactory, labels: list[str], drawn: bool
) -> None:
    """A split that is drawn here depends on all records, so all train; one in the files stays."""
    folder = tmp_path_factory.mktemp("site")
    split = [] if drawn else ["test" if at % 3 == 0 else "train" for at in range(len(labels))]
    rows = [f"{at}.png,{label}" + "".join(f",{part}" for part in split[at : at + 1])
            for at, label in enumerate(labels)]  # fmt: skip
    header = "path,label" if drawn else "path,label,split"
    (folder / "table.csv").write_text("\n".join([header, *rows]) + "\n")
    for at in range(len(labels)):
        Image.new("L", (2, 2), at).save(folder / f"{at}.png")
    private = run(epsilon=1.0, delta=1e-5, classes="a,b")
    found = share(private, NodeConfig(data="imagefolder", data_dir=str(folder)))
    wanted = [at for at in range(len(labels)) if drawn or split[at] == "train"]
    assert found.train.tolist() == wanted
    assert len(found.test) == len(labels) - len(wanted)


@given(st.integers(1, 4), st.sampled_from([0.0, 1.0]), st.sampled_from(["", "a,b"]), st.booleans())
def test_a_private_run_has_classes_and_a_folder_of_its_own(
    parts: int, epsilon: float, classes: str, own: bool
) -> None:
    """Which classes a site has, and how a folder is divided among sites, depends on all records."""
    budget = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {}
    settings = resolved(classes=classes, **budget)
    data = {"data": "imagefolder", "data_dir": "/nowhere"} if own else {}
    node = NodeConfig(num_partitions=parts, **data)  # type: ignore[arg-type]
    wrong = ""
    if own and epsilon:
        wrong = f"num-partitions = {parts}" if parts > 1 else ""
        wrong = wrong if classes else "classes is empty"
    if not wrong:
        check_settings(settings, node)
        return
    with pytest.raises(ConfigError, match=wrong):
        check_settings(settings, node)


few = settings(max_examples=40, deadline=None)
LABELS_LOOPS = st.lists(st.integers(0, 3), min_size=6, max_size=60)


def settings_of(**flat: Any) -> Any:
    return parse_run({key.replace("_", "-"): value for key, value in flat.items()}).settings


def order_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator).tolist()


def shares(members: list[list[int]], drawn: Any, alphas: list[float]) -> list[list[int]]:
    """The records of each class, cut in shares that are drawn for it."""
    parts: list[list[int]] = [[] for _ in alphas]
    for rows in members:
        ends = [0, *(int(end) for end in np.cumsum(drawn.dirichlet(alphas)) * len(rows))]
        ends[-1] = len(rows)
        for site, part in enumerate(parts):
            part += rows[ends[site] : ends[site + 1]]
    return parts


@few
@given(LABELS_LOOPS, st.integers(1, 5), st.integers(0, 99), st.sampled_from([0.05, 0.5, 5.0]))
def test_shares_are_drawn_again_until_each_site_has_ten_then_three_then_one_record(
    labels: list[int], sites: int, seed: int, alpha: float
) -> None:
    order = order_of(len(labels), seed)
    members = [[row for row in order if labels[row] == label] for label in sorted(set(labels))]
    parts: list[list[int]] = []
    for minimum in (10, 3, 1, 0):
        drawn = np.random.default_rng(seed)
        for _ in range(11):
            parts = shares(members, drawn, [alpha] * sites)
            if min(map(len, parts)) >= minimum:
                break
        if min(map(len, parts)) >= minimum:
            break
    if not all(parts):
        # An empty site gets a random record of the largest one.
        for part in parts:
            drawn.shuffle(part)
        for site in range(sites):
            if not parts[site]:
                longest = max(range(sites), key=lambda each: len(parts[each]))
                parts[site] = [parts[longest].pop(0)]
    chosen = settings_of(partition="dirichlet", alpha=alpha, seed=seed)
    found = partition(torch.tensor(labels), None, chosen, sites)
    assert [part.tolist() for part in found] == [sorted(part) for part in parts]


@few
@given(LABELS_LOOPS, st.integers(1, 5), st.integers(0, 99), st.integers(1, 3))
def test_classes_are_dealt_in_turn_and_divided_evenly(
    labels: list[int], sites: int, seed: int, each: int
) -> None:
    classes, order = sorted(set(labels)), order_of(len(labels), seed)
    if each > len(classes) or sites > len(labels):
        return
    generator = torch.Generator().manual_seed(seed)
    dealt = [classes[k] for k in torch.randperm(len(classes), generator=generator).tolist()]
    holders: dict[int, list[int]] = {label: [] for label in dealt}
    for place in range(sites * each):
        holders[dealt[place % len(classes)]].append(place // each)
    if any(len(own) > labels.count(label) for label, own in holders.items()):
        return
    parts: list[list[int]] = [[] for _ in range(sites)]
    for label, own in holders.items():
        rows = [row for row in order if labels[row] == label]
        for at, site in enumerate(own):
            # The first ones get one more where the number does not divide.
            size, more = divmod(len(rows), len(own))
            start = at * size + min(at, more)
            parts[site] += rows[start : start + size + (at < more)]
    chosen = settings_of(partition="classes", classes_per_site=each, seed=seed)
    found = partition(torch.tensor(labels), None, chosen, sites)
    assert [part.tolist() for part in found] == [sorted(part) for part in parts]


@few
@given(LABELS_LOOPS, st.integers(1, 4), st.integers(0, 99))
def test_test_records_of_a_class_follow_its_training_records_by_largest_remainders(
    labels: list[int], sites: int, seed: int
) -> None:
    places = np.random.default_rng(seed).integers(-1, sites, len(labels)).tolist()
    # Minus one: a test record.
    train = [[row for row, place in enumerate(places) if place == site] for site in range(sites)]
    test = [row for row, place in enumerate(places) if place == -1]
    wanted: list[list[int]] = [[] for _ in range(sites)]
    for label in set(labels):
        rows = [row for row in test if labels[row] == label]
        counts = [sum(labels[row] == label for row in part) for part in train]
        total = sum(counts)
        if not total:
            continue
        sizes = [count * len(rows) // total for count in counts]
        rest = [count * len(rows) % total for count in counts]
        for site in sorted(range(sites), key=lambda each: -rest[each])[: len(rows) - sum(sizes)]:
            sizes[site] += 1
        for site, size in enumerate(sizes):
            wanted[site] += rows[sum(sizes[:site]) : sum(sizes[:site]) + size]
    parts = [torch.tensor(part, dtype=torch.int64) for part in train]
    found = split_test(parts, torch.tensor(labels), torch.tensor(test, dtype=torch.int64))
    assert [part.tolist() for part in found] == [sorted(part) for part in wanted]


@few
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), max_size=40),
    st.integers(2, 4),
    st.sampled_from(["iid", "dirichlet"]),
)
def test_a_patient_is_dealt_by_the_class_of_the_first_training_record(
    records: list[tuple[int, int, bool]], sites: int, kind: str
) -> None:
    firsts: dict[int, int] = {}
    for patient, label, trains in records:
        if trains:
            firsts.setdefault(patient, label)
    if len(firsts) < sites:
        return
    chosen = settings_of(partition=kind, seed=3, alpha=0.3)
    whose = list(firsts)
    dealt = partition(torch.tensor(list(firsts.values())), None, chosen, sites)
    wanted = []
    for part in dealt:
        own = {whose[at] for at in part.tolist()}
        wanted.append(
            [row for row, (who, _, trains) in enumerate(records) if trains and who in own]
        )
    dataset = Dataset(
        "d",
        torch.tensor([label for _, label, _ in records]),
        ("a", "b", "c"),
        torch.tensor([trains for *_, trains in records]),
        "k",
        patients=tuple(str(who) for who, *_ in records),
    )
    assert [part.tolist() for part in _train_parts(dataset, chosen, sites)] == wanted


@pytest.mark.parametrize("sites", [1, 3, 6])
def test_equal_shares_are_cut_from_one_shuffled_order(sites: int) -> None:
    order = order_of(6, 4)
    found = partition(
        torch.zeros(6, dtype=torch.int64), None, settings_of(partition="iid", seed=4), sites
    )
    size = 6 // sites
    assert [part.tolist() for part in found] == [
        sorted(order[at : at + size]) for at in range(0, 6, size)
    ]
