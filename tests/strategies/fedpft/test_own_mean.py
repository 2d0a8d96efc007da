"""Noise of each site: features leave out the mean over their own columns before they are clipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.methods.fedpft.surrogate import SiteData, make_surrogate
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import clip, less_own_mean
from fedsurrogate.common.privacy.mechanism import OWN_MEAN
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.features import FEWEST_MAPPED
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.wire.records import pack_surrogate
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.fedpft.learn import learn
from fedsurrogate.strategies.fedpft.strategy import FedPFT

CLASSES = ("a", "b")
PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "classes": "a,b"}


def records(count: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features that are never negative, as after a ReLU, of two classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    apart = 0.2 * torch.randn(2, columns, generator=torch.Generator().manual_seed(99))
    features = 5 + apart[labels] + torch.randn(count, columns, generator=generator)
    return features.clamp_min(0), labels


def sent(run: Run, features: Tensor, labels: Tensor, site: str = "1") -> AnySurrogate:
    return make_surrogate(SiteData(features, labels, CLASSES, "f" * 16, site), run).surrogate


def head_of(surrogates: list[AnySurrogate], run: Run) -> Head:
    head = learn(surrogates, run, "cpu", CLASSES).head
    assert isinstance(head, Head)
    return head


@settings(max_examples=40)
@given(seed=st.integers(0, 999), size=st.floats(-30, 30), rows=st.integers(0, 9))
def test_what_all_columns_share_is_gone_and_no_record_changes_another(
    seed: int, size: float, rows: int
) -> None:
    features = torch.randn(rows, 70, generator=torch.Generator().manual_seed(seed)).double()
    found = less_own_mean(features)
    assert torch.allclose(found, less_own_mean(features + size), atol=1e-12)
    assert torch.allclose(found, features - features.mean(1, keepdim=True), atol=1e-14)
    alone = [less_own_mean(each[None])[0] for each in features]
    assert all(torch.equal(one, other) for one, other in zip(alone, found, strict=True))
    lengths = clip(found, 0.0)[0].norm(dim=1)
    assert bool((lengths <= 1).all())


@pytest.mark.parametrize("family", ["spherical", "diag", "full", "lowrank"])
def test_a_head_of_noisy_sums_knows_what_its_features_left_out(family: str) -> None:
    run = parse_run(PRIVATE | {"fedpft.covariance": family})
    features, labels = records(400, FEWEST_MAPPED, 0)
    head = head_of([sent(run, features, labels)], run)
    assert head.without_mean
    moved = features + torch.randn(len(features), 1, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(head.scores(features), head.scores(moved), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "columns"),
    [
        ({}, FEWEST_MAPPED - 1),
        ({"features.projection": ""}, FEWEST_MAPPED),
        ({"fedpft.components": 2}, FEWEST_MAPPED),
        ({"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"}, FEWEST_MAPPED),
    ],
)
def test_few_columns_settings_and_published_mechanisms_keep_it(
    changed: dict[str, Any], columns: int
) -> None:
    run = parse_run(PRIVATE | changed)
    made = sent(run, *records(400, columns, 0))
    assert made.claim is not None
    assert made.claim.centre == ""
    assert not head_of([made], run).without_mean


def test_it_is_in_the_claim_and_in_the_digest_and_a_site_without_it_is_refused() -> None:
    run, other = parse_run(PRIVATE), parse_run(PRIVATE | {"features.projection": ""})
    assert run.digest != other.digest
    made = sent(run, *records(400, FEWEST_MAPPED, 0))
    assert isinstance(made, SumsSurrogate)
    assert made.claim.centre == OWN_MEAN
    strategy = FedPFT(run, Unrecorded(), "cpu")
    assert strategy.unpack(pack_surrogate(made)).claim.centre == OWN_MEAN  # type: ignore[union-attr]
    without = replace(made, claim=replace(made.claim, centre=""))
    with pytest.raises(SurrogateError, match="centre"):
        strategy.unpack(pack_surrogate(without))


@pytest.mark.parametrize("seed", range(3))
def test_the_head_is_better_where_features_are_never_negative(seed: int) -> None:
    test, truth = records(2000, 128, 1000)
    right = {}
    for projection in ("auto", ""):
        run = parse_run(PRIVATE | {"sites": 4, "features.projection": projection})
        made = [sent(run, *records(500, 128, 10 * seed + i), str(i)) for i in range(4)]
        right[projection] = int((head_of(made, run).scores(test).argmax(1) == truth).sum())
    assert right["auto"] > right[""] + 100, right
