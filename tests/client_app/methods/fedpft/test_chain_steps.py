"""One step of a chain: what a site takes from the relay, what it adds, and what its head is made from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.fedpft import surrogate as chain
from fedsurrogate.client_app.methods.fedpft.surrogate import extend
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import ALL, KEPT, KEPT_OF_FEW
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.heads import FEWEST_MEAN, FEWEST_OWN
from fedsurrogate.common.wire.model_proto import pack_relay, unpack_relay
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate

CHAIN: dict[str, Any] = {
    "fedpft.topology": "chain",
    "fedpft.covariance": "diag",
    "head.epochs": 1,
    "head.min-steps": 1,
}
PRIVATE = CHAIN | {"epsilon": 50.0, "delta": 1e-5, "fedpft.covariance": "spherical"}
NAMES = ("a", "b", "c")
COUNTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


def job(
    run: Run, counts: list[int], site: str = "north", d: int = 4, payload: bytes | None = None
) -> Job:
    """A request to a site with so many records of each class, near to the class's own place."""
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    noise = torch.randn(len(labels), d, generator=torch.Generator().manual_seed(sum(counts)))
    own = LabelledFeatures(0.1 * noise + 5 * torch.eye(3, d)[labels] + 1, labels)
    found = SiteFeatures(own, own, NAMES, "f", 0.0, simulated=True)
    limits = SiteLimits(smallest_class=0)
    return Job(run, NodeConfig(), site, found, limits, payload=payload)


def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, int]]:
    """What heads are trained on from now on: features, labels, and how many classes."""
    seen: list[tuple[Tensor, Tensor, int]] = []
    real = chain.train_on_features

    def watched(features: Tensor, labels: Tensor, count: int, *more: Any) -> Any:
        seen.append((features, labels, count))
        return real(features, labels, count, *more)

    monkeypatch.setattr(chain, "train_on_features", watched)
    return seen


@settings(max_examples=25, deadline=None)
@given(first=COUNTS, second=COUNTS, enough=st.sampled_from([1, 20, 45, 20_000]))
def test_a_site_adds_its_records_to_those_of_the_relay(
    first: list[int], second: list[int], enough: int
) -> None:
    """Every count is the number of records, however often each is drawn."""
    run = parse_run(CHAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "ENOUGH_SAMPLES", enough)
        seen = trained(patch)
        before, head = extend(job(run, first))
        own = unpack_surrogate(unpack_relay(before.payload)[0])
        # Classes without records leave with no component.
        here = [name for name, size in zip(NAMES, first, strict=True) if size]
        assert dict(zip(own.header.classes, own.counts, strict=True)) == {
            name: size for name, size in zip(NAMES, first, strict=True) if size
        }
        assert (own.header.site, list(own.header.classes), before.claim) == ("north", here, None)
        assert head.header.classes == NAMES
        made, head = extend(job(run, second, "south", payload=before.payload))
    (relayed,) = map(unpack_surrogate, unpack_relay(made.payload))
    both = [a + b for a, b in zip(first, second, strict=True)]
    assert dict(zip(relayed.header.classes, relayed.counts, strict=True)) == {
        name: size for name, size in zip(NAMES, both, strict=True) if size
    }
    assert relayed.header.site == "south"
    assert (head.clip, head.mean_over_columns, head.header.site) == (None, ALL, "south")
    for (features, labels, count), sizes in zip(seen, (first, both), strict=True):
        draws = max(1, min(10, enough // sum(sizes)))
        assert (count, len(features)) == (3, len(labels))
        assert torch.bincount(labels, minlength=3).tolist() == [draws * size for size in sizes]
        for label in labels.unique().tolist():
            # Samples of a class are near to its own place.
            place = 5 * torch.eye(3, 4)[label] + 1
            assert (features[labels == label].mean(0) - place).abs().max() < 0.6
    # The site's own records as they are, as often as the others are drawn.
    draws = max(1, min(10, enough // sum(both)))
    features, labels, _ = seen[1]
    own_records = job(run, second).found.train
    assert torch.equal(features[: draws * sum(second)], own_records.features.repeat(draws, 1))
    assert torch.equal(labels[: draws * sum(second)], own_records.labels.repeat(draws))


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    d=st.sampled_from([4, FEWEST_MEAN, FEWEST_OWN - 1, FEWEST_OWN, 65]),
    sites=st.integers(1, 3),
)
def test_a_private_site_passes_on_what_it_received_and_adds_its_own_noisy_sums(
    counts: list[int], d: int, sites: int
) -> None:
    run, relay = parse_run(PRIVATE), None
    kept = KEPT if d >= FEWEST_OWN else KEPT_OF_FEW if d >= FEWEST_MEAN else ALL
    with pytest.MonkeyPatch.context() as patch:
        seen = trained(patch)
        for site in range(sites):
            made, head = extend(job(run, counts, f"s{site}", d, relay))
            parts = unpack_relay(made.payload)
            assert parts[:-1] == ([] if relay is None else unpack_relay(relay))
            last = unpack_surrogate(parts[-1])
            assert (last.header.site, last.header.classes) == (f"s{site}", NAMES)
            assert made.claim == run.mechanism_for("record", run.plan.subtracted(d))
            assert made.claim is not None
            assert last.claim == replace(made.claim, releases=None)
            assert (head.clip, head.mean_over_columns) == (made.claim.clip, kept)
            assert made.facts
            relay = made.payload
    own = job(run, counts, d=d).found.train.features
    changed = weigh_mean_over_columns(own, kept)
    changed = clip(changed, run.settings.fedpft.clip)[0].float()
    for features, _, count in seen:
        assert count == 3
        assert torch.equal(features[: len(own)], changed)


def test_a_relay_has_one_surrogate_or_in_a_private_run_at_most_a_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain, "LARGEST_CHAIN", 3)
    for content, most in ((CHAIN, 1), (PRIVATE, 3)):
        run = parse_run(content)
        (one,) = unpack_relay(extend(job(run, [9, 9, 9]))[0].payload)
        for length in range(5):
            asked = job(run, [9, 9, 9], "south", payload=pack_relay([one] * length))
            if 1 <= length <= most:
                assert len(unpack_relay(extend(asked)[0].payload)) == (
                    1 if content is CHAIN else length + 1
                )
                continue
            with pytest.raises(SurrogateError, match=f"^a chain message of {length} surrogates$"):
                extend(asked)


@settings(max_examples=20, deadline=None)
@given(counts=COUNTS, least=st.sampled_from([-1, 0, 1]))
def test_a_relay_for_more_records_than_a_run_may_draw_is_refused(
    counts: list[int], least: int
) -> None:
    most = sum(counts) + least
    run = parse_run(CHAIN | {"head.max-samples": max(1, most)})
    relay = extend(job(run, counts))[0].payload
    asked = job(run, [1, 1, 1], "south", payload=relay)
    if sum(counts) > max(1, most):
        with pytest.raises(
            SurrogateError, match=f"a chain message for {sum(counts)} records, .* = {most}"
        ):
            extend(asked)
    else:
        assert extend(asked)[0].payload


@pytest.mark.parametrize("wrong", ["backbone", "dimension", "run", "claim"])
def test_a_relay_of_something_else_is_refused(wrong: str) -> None:
    run = parse_run(PRIVATE)
    other = parse_run(PRIVATE | {"seed": 5}) if wrong == "run" else run
    content = job(other, [20, 20, 20], d=5 if wrong == "dimension" else 4)
    if wrong == "backbone":
        content = replace(content, found=replace(content.found, fingerprint="g"))
    payload = extend(content)[0].payload
    if wrong == "claim":
        weaker = parse_run(PRIVATE | {"epsilon": 60.0})
        stated = extend(job(weaker, [20, 20, 20]))[0].payload
        surrogate = unpack_surrogate(unpack_relay(stated)[0])
        header = replace(surrogate.header, run=run.digest)
        payload = pack_relay([pack_surrogate(replace(surrogate, header=header))])
    with pytest.raises(SurrogateError):
        extend(job(run, [20, 20, 20], "south", payload=payload))


def test_classes_of_other_sites_follow_the_own_ones() -> None:
    run = parse_run(CHAIN)
    first = job(run, [3, 4, 5])
    other = replace(first, found=replace(first.found, classes=("x", "b", "y")))
    made, head = extend(replace(job(run, [2, 2, 2], "south"), payload=extend(other)[0].payload))
    assert head.header.classes == ("a", "b", "c", "x", "y")
    (relayed,) = map(unpack_surrogate, unpack_relay(made.payload))
    assert dict(zip(relayed.header.classes, relayed.counts, strict=True)) == {
        "a": 2, "b": 2 + 4, "c": 2, "x": 3, "y": 5,
    }  # fmt: skip
