"""A site of secure aggregation changes its claim in digits that the coordinator does not check: the
others must not pay for it.

The numbers that a seed gives depend on every digit of the noise, so a seed must be used with the
claim of its own site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import spare_of, spare_variances
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.strategies.fedpft import strategy
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.grid import Fault, InProcessGrid, run_federation, sites

CLASSES = ",".join(map(str, range(10)))
PRIVATE: dict[str, Any] = {
    **{
        "fedpft.covariance": "gram",
        "classes": CLASSES,
        "head.max-samples": 20_000,
        "secure-aggregation": True,
        # All columns, with their mean: the number below is of these.
        "features.projection": "",
    },
    **{"colluding": 0.0, "dropouts": 0.2, "epsilon": 8.0, "delta": 1e-5},
    # With this number, the changed claim moves the root of the variance of the class sums past a
    # whole number.
    "secure-aggregation-records": 20181,
}
DIGIT = 1 + 9e-7
COLUMNS = 64


def other_digits(payload: bytes) -> bytes:
    """A masked vector whose claim names slightly more noise."""
    message = pb.MaskedSum.FromString(payload)
    for entry in message.claim.noise:
        entry.sigma *= DIGIT
    return message.SerializeToString(deterministic=True)


def noise_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[int, Fault]) -> float:
    """The variance that is left of the noise for lost sites in the class sums, as a multiple of one
    site's.
    """
    totals: list[Total] = []
    added: list[np.ndarray] = []
    exact: list[np.ndarray] = []

    def spare_only(*given: Any) -> Any:
        found = spare_of(*given)
        added.append(np.concatenate([found[name] for name in ("counts", "sums", "squares")]))
        return found

    def seen(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        exact.append(values - added[-1])
        return mask(state, delivered, rules, values)

    mask, learn = masked.protocol.mask, strategy.fedpft_head_from_sum
    monkeypatch.setattr(masked.protocol, "mask", seen)
    monkeypatch.setattr(masked.protocol, "noise_of_site", spare_only)
    monkeypatch.setattr(
        strategy,
        "fedpft_head_from_sum",
        lambda total, config: (totals.append(total), learn(total, config))[1],
    )
    run_federation(tmp_path, InProcessGrid(sites(5), faults), report=False, **PRIVATE)
    (total,) = totals
    config = parse_run(PRIVATE)
    numbers, shapes = (
        numbers_of(config.plan, config.settings, 5),
        shapes_of(config.plan, len(CLASSES.split(",")), COLUMNS),
    )
    assert total.claim is not None
    (variance,) = [
        spare_variances(total.claim, numbers, shapes, rules_of(config.settings, 5))["sums"]
    ]
    left = (
        total.tensors["sums"].flatten().numpy() / numbers["sums"].step
        - sum(exact)[10 : 10 + 10 * COLUMNS]
    )
    return float((left**2).mean()) / variance


def test_a_changed_claim_leaves_only_the_noise_of_its_own_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = noise_left(tmp_path, monkeypatch, {0: Fault(payload=other_digits)})
    assert 1.5 < left < 2.5, "its own noise, and what was taken out for it"
