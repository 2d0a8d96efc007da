"""The bound on one site's influence: no lie moves a mean far, honest sites are not touched, and
nothing depends on the order of sites.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.pooling.site_weights import coordinate_median
from fedsurrogate.strategies.robustness.defence import (
    FARTHEST,
    LONGEST,
    TIMES,
    bounded,
    bounded_heads,
    bounded_updates,
)

CLASSES = tuple("abcd")
few = settings(max_examples=40, deadline=None)
SCALES = st.sampled_from([-1e14, -1e4, -10.0, -1.0, 0.0, 0.5, 3.0, 1e4, 1e14])


def update(site: int, vector: Tensor, **more: Tensor) -> Parameters:
    header = Header("fedavg", "r", str(site), "f", CLASSES)
    return Parameters(header, 1, {"weight": vector, **more}, records=10)


def honest(count: int, seed: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(30, generator=generator)
    return common + spread * torch.randn(count, 30, generator=generator)


@few
@given(
    count=st.integers(3, 10),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.1, 1.0]),
    lie=SCALES,
    opposite=st.booleans(),
)
def test_one_lie_moves_the_mean_by_what_honest_sites_differ_by(
    count: int, seed: int, spread: float, lie: float, opposite: bool
) -> None:
    good = honest(count - 1, seed, spread)
    false = lie * (good.mean(0) if opposite else torch.ones(30))
    points = [{"w": each} for each in [*good, false]]
    mean = torch.stack([each["w"] for each in bounded(points)[0]]).mean(0)
    radius = float((good - good.mean(0)).norm(dim=1).max())
    # The centre lies between honest values, coordinate by coordinate.
    assert float((mean - good.mean(0)).norm()) < (3 + TIMES) * radius


@few
@given(count=st.integers(3, 9), seed=st.integers(0, 99), place=st.integers(0, 8))
def test_sites_that_differ_alike_are_not_touched_and_the_order_does_not_matter(
    count: int, seed: int, place: int
) -> None:
    points = [{"w": each} for each in honest(count, seed, 1.0)]
    inside, kept = bounded(points)
    assert kept == [1.0] * count
    assert all(bool((a["w"] == b["w"]).all()) for a, b in zip(points, inside, strict=True))
    points[place % count] = {"w": 100 * torch.ones(30)}
    inside, kept = bounded(points)
    turned, _ = bounded(points[::-1])
    assert kept[place % count] < 1
    for a, b in zip(inside, turned[::-1], strict=True):
        assert torch.allclose(a["w"], b["w"])


@few
@given(lie=SCALES, count=st.integers(3, 8), seed=st.integers(0, 99))
def test_parameters_and_control_variates_are_each_bounded(
    lie: float, count: int, seed: int
) -> None:
    good = honest(count, seed, 0.5)
    for name in ("weight", CONTROL + "weight"):
        sent = [
            update(site, row, **{CONTROL + "weight": 1e-3 * row}) for site, row in enumerate(good)
        ]
        tensors = {**sent[0].tensors, name: lie * sent[0].tensors[name]}
        kept, _ = bounded_updates([replace(sent[0], tensors=tensors), *sent[1:]])
        longest = max(float(each.tensors[name].norm()) for each in sent[1:])
        assert float(kept[0].tensors[name].norm()) < (2 + TIMES) * longest


def head(site: int, rows: Tensor, classes: tuple[str, ...]) -> Parameters:
    header = Header("average", "r", str(site), "f", classes)
    return Parameters(header, 1, {"weight": rows[:, :-1], "bias": rows[:, -1]}, records=10)


@few
@given(
    lie=SCALES,
    owned=st.lists(st.sets(st.sampled_from(CLASSES), min_size=1), min_size=3, max_size=7),
    seed=st.integers(0, 99),
)
def test_no_row_of_a_head_decides_alone_also_of_a_class_that_nobody_else_has(
    lie: float, owned: list[set[str]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = [
        head(site, torch.randn(len(names), 9, generator=generator), tuple(sorted(names)))
        for site, names in enumerate(owned)
    ]
    false = {name: lie * tensor for name, tensor in sent[0].tensors.items()}
    kept, shares = bounded_heads([replace(sent[0], tensors=false), *sent[1:]])
    lengths = [math.hypot(*(float(t.norm()) for t in each.tensors.values())) for each in kept]
    assert max(lengths) <= LONGEST * max(lengths[1:]) * (1 + 1e-5)
    assert all(0 < share < 1 for share in shares.values())
    # A head of one vote in each class stays itself.
    assert [each.header for each in kept] == [each.header for each in sent]


@few
@given(
    lie=SCALES,
    count=st.integers(3, 8),
    seed=st.integers(0, 99),
    sizes=st.lists(st.sampled_from([1e-4, 1e-2, 1.0, 1e3]), min_size=8, max_size=8),
)
def test_no_feature_of_a_head_is_moved_by_more_than_honest_sites_differ_there(
    lie: float, count: int, seed: int, sizes: list[float]
) -> None:
    """Weights of features with little variance are long. A false head of usual length must not put
    all of it on the features that decide.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor(sizes)
    honest = scale * torch.randn(count - 1, len(CLASSES), 8, generator=generator)
    false = lie * honest.flatten(1).norm(dim=1).median() * torch.ones(len(CLASSES), 8)
    sent = [head(site, rows, CLASSES) for site, rows in enumerate([*honest, false])]
    kept, _ = bounded_heads(sent)
    rows = torch.cat([kept[-1].tensors["weight"], kept[-1].tensors["bias"][:, None]], 1)
    # The centre lies between honest values; what is beyond it, within some honest distances.
    units = rows.square().sum(0).sqrt() / honest.square().sum(1).sqrt().amax(0)
    assert float(units.amax()) <= (1 + 2 * FARTHEST) * (1 + 1e-4)
    assert float(units.square().mean().sqrt()) <= (1 + 2 * TIMES) * (1 + 1e-4)
    assert float(units[-1]) <= (1 + 2 * TIMES) * (1 + 1e-4)


@few
@given(count=st.integers(3, 6), seed=st.integers(0, 99), mean=st.sampled_from([0.0, 5.0, 1e3]))
def test_an_honest_head_in_the_bound_predicts_between_the_centre_and_itself(
    count: int, seed: int, mean: float
) -> None:
    """Features need not have mean zero: weights and bias of a head only count together. Shortened
    one by one, they score records of mean 1000 far away from what any site's head does.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(count, len(CLASSES), 8, generator=generator) ** 3
    rows = torch.cat([weights, -mean * weights.sum(2, keepdim=True)], 2).double()
    kept, _ = bounded_heads([head(site, own, CLASSES) for site, own in enumerate(rows)])
    drawn = torch.stack(
        [torch.cat([each.tensors["weight"], each.tensors["bias"][:, None]], 1) for each in kept]
    )
    records = torch.cat([mean + torch.randn(20, 8, generator=generator), torch.ones(20, 1)], 1)
    centre = coordinate_median(rows, torch.ones(count)).expand_as(rows)
    # A head that is longer than most is also shortened, bias included: towards zero.
    ends = torch.stack([rows, centre, torch.zeros_like(rows)]) @ records.T.double()
    scores = drawn @ records.T.double()
    slack = 1e-9 * (1 + rows.abs().amax() * records.abs().amax())
    assert bool((scores >= ends.amin(0) - slack).all())
    assert bool((scores <= ends.amax(0) + slack).all())
