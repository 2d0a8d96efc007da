"""Sums that the coordinator receives are those of the records, around their mean or around zero, with
what rounding and noise may have changed in them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.targets.target import Target
from fedsurrogate.strategies.targets.sums import CodedSums, around_zero, of_site
from tests.coded import moment_of

D = 3
few = settings(max_examples=40, deadline=None)
TARGETS: dict[str, dict[str, Any]] = {
    "numbers": {"task": "regression", "target-range": "0,100"},
    "times": {"task": "survival", "horizon": 3.0, "bins": 2},
}


def target_of(kind: str) -> Target:
    target = parse_run(TARGETS[kind]).target
    assert target is not None
    return target


def records_of(kind: str, seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Features (n, D), and the code that each record sends."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=draw, dtype=torch.float64) + 0.7
    if kind == "numbers":
        return x, torch.rand(n, 1, generator=draw, dtype=torch.float64) * 2 - 1
    cells = torch.randint(0, 5, (n,), generator=draw)
    return x, torch.nn.functional.one_hot(cells, 5).double()


def check(found: CodedSums, kind: str, x: Tensor, code: Tensor, rounding: float) -> None:
    whole = torch.cat([torch.ones(len(x), 1).double(), code], 1) if kind == "numbers" else code
    torch.testing.assert_close(found.code, whole.sum(0))
    torch.testing.assert_close(found.sums, whole.T @ x)
    wanted = moment_of(x)
    for name in ("counts", "means", "covariance"):
        torch.testing.assert_close(
            getattr(found.moment, name), getattr(wanted, name), rtol=1e-5, atol=1e-6
        )
    if kind == "numbers":
        assert found.products is not None
        torch.testing.assert_close(found.products, code.T @ code)
    else:
        assert found.products is None
    assert found.rounding == pytest.approx(rounding)


@few
@given(st.sampled_from(["numbers", "times"]), st.integers(0, 9999), st.integers(1, 60))
def test_a_message_is_around_the_mean_of_its_site(kind: str, seed: int, n: int) -> None:
    x, code = records_of(kind, seed, n)
    mean, apart = x.mean(0), x - x.mean(0)
    tensors = {
        "records": torch.tensor([float(n)]),
        "totals": x.sum(0),
        "code": code.sum(0),
        "sums": code.T @ apart,
        "squares": fold(apart.T @ apart),
    }
    assert torch.allclose(tensors["sums"] + torch.outer(code.sum(0), mean), code.T @ x)
    if kind == "numbers":
        around = code - code.mean(0)
        tensors["products"] = fold(around.T @ around)
    longest = max(float(row.norm()) for row in apart.T @ apart / n)
    # Numbers at 16 bits are wrong by a 2048th at most, evenly; eigenvalues by twice the longest row.
    check(of_site(tensors, target_of(kind)), kind, x, code, 2 * longest / 2048 / math.sqrt(3))


@few
@given(
    st.sampled_from(["numbers", "times"]),
    st.integers(0, 9999),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.02]),
    st.booleans(),
)
def test_a_sum_of_all_sites_is_around_zero(
    kind: str, seed: int, n: int, changed: float, private: bool
) -> None:
    x, code = records_of(kind, seed, n)
    tensors = {"code": code.sum(0), "sums": code.T @ x, "squares": fold(x.T @ x)}
    sigmas: dict[str, float] = {}
    if kind == "numbers":
        tensors |= {
            "records": torch.tensor([float(n)]).double(),
            "totals": x.sum(0),
            "products": fold(code.T @ code),
        }
    if private:
        sigmas = {name: 0.1 * (1 + at) for at, name in enumerate(sorted(tensors))}
    found = around_zero(tensors, sigmas, target_of(kind), False, changed)
    check(found, kind, x, code, 2 * changed * math.sqrt(D) / n)
    if not private:
        assert found.noise is None
        return
    assert found.noise is not None
    first = kind == "numbers"
    for ours, one, others in (
        (found.noise.code, "records", "code"),
        (found.noise.sums, "totals", "sums"),
    ):
        wanted = ([sigmas[one]] if first else []) + [sigmas[others]] * code.shape[1]
        assert ours.tolist() == pytest.approx(wanted)
    assert found.noise.squares == sigmas["squares"]
    assert found.noise.products == sigmas.get("products", 0.0)


def test_under_noise_there_is_at_least_one_record() -> None:
    x, code = records_of("numbers", 0, 9)
    tensors = {
        "code": code.sum(0),
        "sums": code.T @ x,
        "squares": fold(x.T @ x),
        "records": torch.tensor([-4.0]).double(),
        "totals": x.sum(0),
        "products": fold(code.T @ code),
    }
    sigmas = dict.fromkeys(tensors, 1.0)
    assert around_zero(tensors, sigmas, target_of("numbers"), False).records == 1.0
