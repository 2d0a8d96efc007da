"""The screen of updates over generated federations: every clear liar of a minority is found, and
never half of the sites.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.robustness.defence import FEWEST, screen_updates

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
