"""The screen of updates over generated federations: every clear liar of a minority is found, and
never half of the sites.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.robustness.defence import FEWEST, screen_updates

# How far from the others a site may be: its update (docs/privacy/hostile-hospitals.md) and its control
# variate in distances of the median site, the moments of its features in deviations.
LIMITS = {"weight": 5.0, "control.weight": 25.0, "mean": 3.0, "deviation": 3.0}
WIDTH = 400

few = settings(max_examples=60, deadline=None)


def updates(count: int, liars: set[int], seed: int, sign: int) -> list[Parameters]:
    """Honest updates that agree, and liars whose lengths are far apart from each other's."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(40, generator=generator)
    sent = []
    for site in range(count):
        vector = common + 0.3 * torch.randn(40, generator=generator)
        if site in liars:
            vector = sign * 10.0 ** (3 + site) * torch.randn(40, generator=generator)
        header = Header("fedavg", "r", str(site), "f", ("a", "b"))
        sent.append(Parameters(header, 1, {"weight": vector}))
    return sent


@few
@given(
    count=st.integers(2, 11),
    share=st.floats(0, 1),
    seed=st.integers(0, 999),
    sign=st.sampled_from([-1, 1]),
)
def test_all_liars_of_a_minority_are_found_and_never_half_of_the_sites(
    count: int, share: float, seed: int, sign: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    number = round(share * count)
    liars = set(torch.randperm(count, generator=generator)[:number].tolist())
    found = {int(suspect.site) for suspect in screen_updates(updates(count, liars, seed, sign))}
    most = (count - 1) // 2
    assert len(found) <= most
    if count < FEWEST:
        assert found == set()
    # As many as a minority may have: the limit is that of all sites, not of those that are left.
    elif number <= most:
        assert found == liars


@few
@given(
    where=st.sampled_from(sorted(LIMITS)),
    count=st.integers(FEWEST, 9),
    share=st.sampled_from([0.1, 0.5, 0.7, 1.6, 3.0, 10.0]),
    seed=st.integers(0, 999),
)
def test_a_site_is_far_from_the_limit_of_each_number_on_and_not_before(
    where: str, count: int, share: float, seed: int
) -> None:
    """Honest sites differ by vectors of length one, or have equal moments; one is `share` of the
    limit away.
    """
    generator = torch.Generator().manual_seed(seed)

    def unit() -> torch.Tensor:
        vector = torch.randn(WIDTH, generator=generator)
        return vector / vector.norm()

    liar, common = seed % count, {name: 30 * unit() for name in ("weight", "control.weight")}
    deviation = 1 + torch.rand(WIDTH, generator=generator)
    sent = []
    for site in range(count):
        tensors = {name: vector + unit() for name, vector in common.items()}
        tensors |= {"mean": torch.zeros(WIDTH), "deviation": deviation.clone()}
        if site == liar:
            before = common.get(where, tensors[where])
            unit_of = deviation.norm() if where in ("mean", "deviation") else 1.0
            tensors[where] = before + share * LIMITS[where] * unit_of * unit()
        sent.append(Parameters(Header("fedavg", "r", str(site), "f", ("a", "b")), 1, tensors))
    found = [suspect.site for suspect in screen_updates(sent) if suspect.kind == "far"]
    assert found == ([str(liar)] if share > 1 else [])


def of_cosines(count: int, honest: float, liar: float) -> list[Parameters]:
    """Updates of length one: the last has this cosine with all others, which have another one."""
    gram = torch.full((count, count), honest, dtype=torch.float64)
    gram[-1] = gram[:, -1] = liar
    gram.fill_diagonal_(1.0)
    header = Header("fedavg", "r", "0", "f", ("a", "b"))
    return [
        Parameters(replace(header, site=str(site)), 1, {"weight": row})
        for site, row in enumerate(torch.linalg.cholesky(gram))
    ]


@pytest.mark.parametrize("count", [4, 5, 10])
@pytest.mark.parametrize("off", [-1e-3, 1e-3])
def test_a_direction_is_opposed_below_a_limit_of_the_number_of_sites_and_of_their_agreement(
    count: int, off: float
) -> None:
    # Without agreement: -0.15 - 0.8 / (S - 1), of vectors in a space that has room for it.
    least = -0.15 - 0.8 / (count - 1)
    honest = 0.25
    cases = [(honest, least)]
    # The median site agrees just enough, or just not: then 0.1 is the limit, or that above.
    for more, limit in ((1e-3, 0.1), (-1e-3, least)):
        near = (0.5 + more) * (count - 1) - limit
        cases.append((near / (count - 2), limit))
    cases.append((0.75, 0.1))
    for own, limit in cases:
        if own > 0.8:
            # The others are then so near to each other that the last is far from them.
            continue
        found = screen_updates(of_cosines(count, own, limit + off))
        if off > 0:
            assert found == [], (own, limit)
            continue
        assert [(each.site, each.kind) for each in found] == [(str(count - 1), "opposed")]
        assert found[0].score == pytest.approx(1 - off, abs=1e-6)
        assert found[0].reason.startswith("the direction of its update disagrees")


def test_heads_are_compared_class_by_class() -> None:
    """A site without a class has zeros there, and the same rows count for the same classes."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 300, generator=draw)
    names = ("a", "b", "c")
    sent = []
    for site, classes in enumerate([names, ("c", "a", "b"), ("b", "c"), names, ("c", "b", "a")]):
        rows = torch.stack([whole[names.index(each)] for each in classes])
        rows = rows + 0.5 * torch.randn(rows.shape, generator=draw)
        header = Header("fedavg", "r", str(site), "f", classes)
        sent.append(Parameters(header, 1, {"weight": rows, "bias": rows[:, 0]}))
    assert screen_updates(sent) == []
    swapped = replace(sent[1], header=replace(sent[1].header, classes=names))
    assert [each.site for each in screen_updates([sent[0], swapped, *sent[2:]])] == ["1"]
