"""The screen of updates over generated federations: every clear liar of a minority is found, and
never half of the sites.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.robustness.update_screening import FEWEST, screen_updates

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
