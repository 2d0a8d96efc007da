"""A capped site keeps its means and its relative noise, whatever share of its weight it keeps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate
from fedsurrogate.strategies.pooling.class_means import by_site
from fedsurrogate.strategies.pooling.site_weights import scaled
from fedsurrogate.strategies.robustness.harm import of_surrogates
from tests.hostile_sites import digits_of, surrogate_of

CLASSES = tuple(map(str, range(10)))


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.999), st.sampled_from(["spherical", "diag"]), st.integers(0, 2))
def test_capping_changes_neither_the_means_nor_their_noise(
    share: float, family: str, site: int
) -> None:
    run = parse_run({"epsilon": 8.0, "delta": 1e-5, "fedpft.covariance": family})
    sent = surrogate_of(digits_of(3, 0)[0][site], CLASSES, "f" * 16, "a", run)
    assert isinstance(sent, SumsSurrogate)
    capped = scaled(sent, share)
    assert isinstance(capped, SumsSurrogate)
    ours, theirs = by_site([capped]), by_site([sent])
    assert ours.classes == theirs.classes
    torch.testing.assert_close(ours.means, theirs.means, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.noise, theirs.noise, rtol=1e-4, atol=1e-9)
    for name, sigma in sent.sums.sigmas.items():
        assert abs(capped.sums.sigmas[name] - share * sigma) < 1e-6 * sigma
    judged = of_surrogates([capped], CLASSES).counts > 0
    assert judged.equal(of_surrogates([sent], CLASSES).counts > 0)
