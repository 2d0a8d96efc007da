"""Limits of what sites send in rounds of times, just below and just above, and formulas of what is added."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.targets.residual_steps import ResidualSteps
from fedsurrogate.strategies.targets.strategy import column_factors
from tests.coded import coded

TIME: dict[str, Any] = {"task": "survival", "horizon": 3.0, "bins": 4, "time-head": "residuals"}
D = 3
few = settings(max_examples=20, deadline=None)


def reply(**tensors: torch.Tensor) -> Parameters:
    return Parameters(Header("fedpft", "r", "s", "f", ("a",)), 1, tensors, 5)


def residuals(seed: int, n: int = 20) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Exact sums of the second round around the site's mean, and the records."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=draw).double() + 0.5
    code = torch.rand(n, generator=draw).double() - 0.5
    apart = x - x.mean(0)
    tensors = {
        "records": torch.tensor([float(n)]).double(),
        "totals": x.sum(0),
        "code": code.sum()[None],
        "sums": (code @ apart)[None],
        "squares": fold(apart.T @ apart),
    }
    return tensors, x, code


@pytest.mark.parametrize("sigma", [0.0, 2.0])
@pytest.mark.parametrize("count", [9, 40])
def test_a_cell_is_below_zero_by_what_honest_noise_explains(sigma: float, count: int) -> None:
    run = parse_run(TIME | ({"epsilon": 4.0, "delta": 1e-5} if sigma else {}))
    steps = ResidualSteps(run)
    noise = run.mechanism.noise["code"][0] if run.mechanism else 0.0
    # Of so many cells none is beyond it in ten million honest messages; and one part in a hundred.
    least = -noise * math.sqrt(2 * math.log(8 * count / 1e-7)) * 1.01
    for share in (0.999, 1.001):
        counts = torch.full((count,), 3.0)
        counts[1] = share * least if sigma else (0.0 if share < 1 else -1e-3)
        if share < 1:
            steps.check(reply(code=counts))
        else:
            with pytest.raises(SurrogateError, match=f"a cell of {float(counts[1]):g} records"):
                steps.check(reply(code=counts))


@few
@given(st.integers(0, 9999))
def test_residuals_of_a_site_sum_to_at_most_its_records(seed: int) -> None:
    steps = ResidualSteps(parse_run(TIME))
    tensors, _, _ = residuals(seed)
    steps.check(reply(**tensors))
    for share in (1.009, -1.009, 1.011, -1.011):
        sent = reply(**tensors | {"code": share * tensors["records"]})
        if abs(share) < 1.01:
            steps.check(sent)
        else:
            with pytest.raises(SurrogateError, match="residuals with the sum"):
                steps.check(sent)
    assert steps.counts(reply(code=torch.tensor([2.0, -1.0]))) == [2, 0]
    assert steps.counts(reply(**tensors)) == [20]
    assert steps.counts(reply(sums=torch.ones(1))) is None


@few
@given(st.integers(0, 9999), st.lists(st.sampled_from([1.0, 0.5, 0.1]), min_size=1, max_size=4))
def test_sums_of_sites_are_added_around_zero_with_their_shares(
    seed: int, shares: list[float]
) -> None:
    steps = ResidualSteps(parse_run(TIME))
    sites = [residuals(seed + at) for at in range(len(shares))]
    found, sigmas, changed = steps.pooled([reply(**tensors) for tensors, _, _ in sites], shares)
    parts: dict[str, Any] = dict.fromkeys(("records", "totals", "code", "sums", "squares"), 0.0)
    rounding = 0.0
    for (tensors, x, code), share in zip(sites, shares, strict=True):
        own = {
            "records": len(x), "totals": x.sum(0), "code": code.sum(), "sums": code @ x,
            "squares": fold(x.T @ x),
        }  # fmt: skip
        parts = {name: each + share * own[name] for name, each in parts.items()}
        apart = (x - x.mean(0)).numpy()
        longest = np.linalg.norm(apart.T @ apart, axis=1).max()
        rounding += (share * 2 * 2.0**-11 / math.sqrt(3) * longest) ** 2
        assert tensors["records"].tolist() == [20]
    for name, wanted in parts.items():
        tensor = found[name]
        torch.testing.assert_close(tensor, torch.as_tensor(wanted).double().reshape(tensor.shape))
    assert changed == pytest.approx(math.sqrt(rounding))
    assert sigmas == {}
    private = parse_run(TIME | {"epsilon": 4.0, "delta": 1e-5})
    assert private.mechanism is not None
    noisy, sigmas, changed = ResidualSteps(private).pooled(
        [reply(code=torch.ones(9)) for _ in shares], shares
    )
    root = math.sqrt(sum(share**2 for share in shares))
    assert sigmas == {
        name: pytest.approx(sigma * root) for name, (sigma, _) in private.mechanism.noise.items()
    }
    assert (changed, noisy["code"].tolist()) == (
        0.0,
        [pytest.approx(sum(shares))] * 9,
    )


@few
@given(
    st.integers(0, 9999), st.floats(0, 1), st.floats(0, 1), st.integers(5, 40), st.integers(2, 4)
)
def test_what_rounding_has_changed_adds_in_squares(
    seed: int, one: float, other: float, n: int, times: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    parts = []
    for size, rounding in ((n, one), (times * n, other)):
        x = torch.randn(size, D, generator=draw).double()
        made = coded(torch.ones(size, 1).double(), x)
        parts.append(type(made)(made.code, made.sums, made.moment, rounding=rounding))
    both = parts[0] + parts[1]
    wanted = math.hypot(n * one, times * n * other) / (n + times * n)
    assert both.rounding == pytest.approx(wanted)
    factor = torch.tensor([0.5, 3.0, 1.5]).double()
    moved = both.rescaled(factor)
    longest = 3.0 * math.sqrt((0.5**2 + 3**2 + 1.5**2) / 3)
    assert moved.rounding == pytest.approx(wanted * longest)
    # A constant column stays, and the others get a deviation of one.
    x = torch.randn(50, D, generator=draw).double() * torch.tensor([3.0, 0.1, 1e-9]).double()
    factors = column_factors(coded(torch.ones(50, 1).double(), x))
    deviations = x.std(0, correction=0)
    torch.testing.assert_close(factors[:2], 1 / deviations[:2])
    assert float(factors[2]) == 1
