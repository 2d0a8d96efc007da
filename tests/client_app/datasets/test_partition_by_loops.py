"""Who gets which record, record by record with plain loops: shares of a Dirichlet distribution that are
drawn again until each site has enough, classes in turn, and test records by largest remainders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.datasets.partition import _partition, _train_parts, split_test
from fedsurrogate.common.run import parse_run

few = settings(max_examples=40, deadline=None)
LABELS = st.lists(st.integers(0, 3), min_size=6, max_size=60)


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
@given(LABELS, st.integers(1, 5), st.integers(0, 99), st.sampled_from([0.05, 0.5, 5.0]))
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
    found = _partition(torch.tensor(labels), None, chosen, sites)
    assert [part.tolist() for part in found] == [sorted(part) for part in parts]


@few
@given(LABELS, st.integers(1, 5), st.integers(0, 99), st.integers(1, 3))
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
    found = _partition(torch.tensor(labels), None, chosen, sites)
    assert [part.tolist() for part in found] == [sorted(part) for part in parts]


@few
@given(LABELS, st.integers(1, 4), st.integers(0, 99))
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


@pytest.mark.parametrize("sites", [1, 3, 6])
def test_equal_shares_are_cut_from_one_shuffled_order(sites: int) -> None:
    order = order_of(6, 4)
    found = _partition(
        torch.zeros(6, dtype=torch.int64), None, settings_of(partition="iid", seed=4), sites
    )
    size = 6 // sites
    assert [part.tolist() for part in found] == [
        sorted(order[at : at + size]) for at in range(0, 6, size)
    ]


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
    dealt = _partition(torch.tensor(list(firsts.values())), None, chosen, sites)
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
