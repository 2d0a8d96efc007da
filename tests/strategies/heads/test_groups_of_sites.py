"""What a site of FedCOF may weigh: the caps by records and by the spread of its means, by plain
loops over generated sites; and the head of any sites, in the order of the classes.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.strategy import check_counts
from fedsurrogate.strategies.heads.class_means import ClassMeans
from fedsurrogate.strategies.pooling.site_weights import shares_kept

CLASSES, D = ("a", "b", "c"), 4


@st.composite
def hospitals(draw: st.DrawFn) -> list[Parameters]:
    """Means of two groups of each class; sites have some classes, in any order, of any spread."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    middle, found = 2 * torch.randn(3, D, generator=random), []
    for number in range(draw(st.integers(1, 6))):
        names = draw(st.permutations(CLASSES).flatmap(lambda p: st.sampled_from([p, p[:2], p[:1]])))
        many = draw(st.sampled_from([1, 20]))
        counts = torch.randint(1, 9, (len(names), 2), generator=random).float() * many
        counts[:, 1] *= torch.randint(0, 2, (len(names),), generator=random)
        wide = draw(st.sampled_from([0.0, 1.0, 1.0, 30.0]))
        rows = torch.tensor([CLASSES.index(name) for name in names])
        means = middle[rows][:, None] + wide * torch.randn(len(names), 2, D, generator=random)
        means = means * (counts > 0)[..., None]
        header = Header("fedcof", "r", f"s{number}", "f", tuple(names))
        records = int(counts.sum())
        found.append(Parameters(header, 1, {"counts": counts, "means": means}, records))
    return found


def median_low(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def centre_of(sent: list[Parameters], name: str) -> NDArray[np.float64]:
    """The median over sites of their means of a class."""
    means = []
    for each in sent:
        if name in each.header.classes:
            at = each.header.classes.index(name)
            weights = each.tensors["counts"][at].double().numpy()
            means.append(np.average(each.tensors["means"][at].double(), axis=0, weights=weights))
    return np.array([median_low(list(column)) for column in np.stack(means).T])


def groups_of(sent: Parameters) -> list[tuple[str, float, NDArray[np.float64]]]:
    """Class, records and mean of each group that has records."""
    rows = zip(
        sent.header.classes, *(sent.tensors[key] for key in ("counts", "means")), strict=True
    )
    return [
        (name, n, mean.double().numpy())
        for name, counts, means in rows
        for n, mean in zip(counts.tolist(), means, strict=True)
        if n > 0
    ]


@settings(max_examples=60, deadline=None)
@given(hospitals(), st.sampled_from([0.0, 1.0, 3.0]))
def test_weights_are_capped_by_records_and_by_the_spread_of_means(
    sent: list[Parameters], most: float
) -> None:
    known = [name for name in CLASSES if any(name in each.header.classes for each in sent)]
    centres = {name: centre_of(sent, name) for name in known}
    spreads = []
    for each in sent:
        own = [n * float(((mean - centres[name]) ** 2).sum()) for name, n, mean in groups_of(each)]
        spreads.append(sum(own) / len(own))
    wide = [spread for spread in spreads if spread > 0]
    by_records = shares_kept([each.tensors["counts"].sum(1).tolist() for each in sent], most)
    defended = ClassMeans({"method": "fedcof", "max-share": most}).defend(sent, tuple(known))
    assert defended.kept == sent
    assert not defended.suspects
    wanted = {}
    for each, share, spread in zip(sent, by_records, spreads, strict=True):
        if most and len(wide) >= 3 and spread > 0:
            share = min(share, most * median_low(wide) / spread)
        if share < 1:
            wanted[each.header.site] = pytest.approx(share, rel=1e-6)
    assert defended.capped == wanted


@settings(max_examples=60, deadline=None)
@given(hospitals(), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 0.3, 5.0]))
def test_the_head_is_that_of_the_groups_with_the_weight_that_they_keep(
    sent: list[Parameters], most: float, shrinkage: float
) -> None:
    strategy = ClassMeans(
        {"method": "fedcof", "max-share": most, "fedcof.shrinkage": max(shrinkage, 1e-3)}
    )
    learned = strategy.learn(sent, ())
    assert isinstance(learned.model, Head)
    names = learned.model.header.classes
    assert sorted(names) == sorted({name for each in sent for name in each.header.classes})
    assert learned.model.header.site == "coordinator"
    groups: dict[str, list[tuple[float, NDArray[np.float64]]]] = {name: [] for name in names}
    for each in sent:
        share = learned.defended.capped.get(each.header.site, 1.0)
        for name, n, mean in groups_of(each):
            groups[name].append((share * n, mean))
    gram, sums, counts = np.zeros((D, D)), [], []
    for name in names:
        total = sum(n for n, _ in groups[name])
        whole = np.sum([n * mean for n, mean in groups[name]], axis=0)
        for n, mean in groups[name]:
            apart = mean - whole / total
            gram += max(total - 1, 0) * n * np.outer(apart, apart) / max(len(groups[name]) - 1, 1)
        counts.append(total)
        sums.append(whole)
    ridge = max(shrinkage, 1e-3) * gram.trace() / D
    gram += (ridge or sum(counts)) * np.eye(D)
    gram += np.outer(np.sum(sums, axis=0), np.sum(sums, axis=0)) / sum(counts)
    weight = np.linalg.solve(gram, np.stack(sums).T).T
    weight /= np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(learned.model.weight, weight, rtol=1e-3, atol=1e-4)
    assert learned.model.bias.tolist() == [0.0] * len(names)


MOST_D = 8192


@pytest.mark.parametrize(
    ("records", "claimed", "d", "refused"),
    [
        (1000, 1000, MOST_D, ""),
        (1000, 1000, MOST_D + 1, "dimension 8193"),
        (1000, 1010, 2, ""),
        (1000, 1012, 2, "1000 records together, but 1012"),
        (1000, 990, 2, "1000 records together, but 990"),
        (1000, 991, 2, ""),
    ],
)
def test_counts_and_dimensions_are_refused_just_beyond_their_limits(
    records: int, claimed: int, d: int, refused: str
) -> None:
    sent = Parameters(
        Header("fedcof", "r", "s", "f", ("a",)),
        1,
        {"counts": torch.tensor([[float(records)]])},
        claimed,
    )
    caught = pytest.raises(SurrogateError, match=refused) if refused else nullcontext()
    with caught as error:
        check_counts(sent, d, "groups")
    assert (error is not None) == bool(refused)
