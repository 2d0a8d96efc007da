"""A round of coded sums without a network: which sums are refused, how many records they are of, and with
which weights and noise they are added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.methods.sums import exact_sums
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.outcome import Defended
from fedsurrogate.strategies.pooling.site_weights import Total, shares_kept
from fedsurrogate.strategies.targets import strategy as module
from fedsurrogate.strategies.targets.strategy import FromCodedSums, learn_from_sum
from fedsurrogate.strategies.targets.sums import around_zero, of_site
from tests.strategies.base.test_courses_of_a_run import Kept

NUMBER: dict[str, Any] = {"task": "regression", "target-range": "0,400"}
PRIVATE = {"epsilon": 8.0, "delta": 1e-5}
D = 3
few = settings(max_examples=15, deadline=None)


def site(run: Run, at: int, n: int) -> Parameters:
    draw = torch.Generator().manual_seed(at)
    x = torch.randn(n, D, generator=draw).double()
    y = 400 * torch.rand(n, 1, generator=draw).double()
    assert run.target is not None
    x = x / x.norm(dim=1, keepdim=True)
    centre = None if run.private else x.mean(0)
    sums = exact_sums(x, run.target.code(y), centre)
    tensors = {name: each.float() for name, each in sums.items()}
    header = Header("fedpft", run.digest, f"s{at}", "f", run.target.rows)
    return Parameters(header, 1, tensors, 0, run.mechanism)


class Learned:
    """In place of what learns: keeps the sums that it gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        monkeypatch.setattr(module, "learned", self)

    def __call__(self, sums: Any, header: Header, target: Any) -> Any:
        self.seen.append((sums, header, target))
        return Head(header, torch.ones(1, D), torch.ones(1)), {"fact": 1.0}


@few
@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.sampled_from([0.0, 1.0]), st.booleans())  # fmt: skip
def test_sites_are_added_with_the_weight_that_the_cap_leaves_them(
    sizes: list[int], most: float, private: bool
) -> None:
    run = parse_run(NUMBER | {"max-share": most, "defence": "none"} | (PRIVATE if private else {}))
    sent = [site(run, at, n) for at, n in enumerate(sizes)]
    strategy = FromCodedSums(run, Kept())
    assert [strategy.records(each) for each in sent] == sizes
    shares = shares_kept([[float(n)] for n in sizes], most, 2.0 if private else 1.0)
    capped = {f"s{at}": share for at, share in enumerate(shares) if share < 1}
    with pytest.MonkeyPatch.context() as patch:
        learned = Learned(patch)
        found = strategy.learn(sent, ())
    assert found.defended == Defended(sent, capped)
    assert strategy.defend(sent, ()).capped == capped
    assert found.facts == {"fact": 1.0}
    ((sums, header, target),) = learned.seen
    assert (header, target) == (replace(sent[0].header, site="coordinator"), run.target)
    if not private:
        wanted = of_site(sent[0].tensors, target).scaled(shares[0])
        for each, share in zip(sent[1:], shares[1:], strict=True):
            wanted = wanted + of_site(each.tensors, target).scaled(share)
        assert found.model.clip is None  # type: ignore[union-attr]
    else:
        assert run.mechanism is not None
        total = {
            name: sum(
                share * each.tensors[name].double()
                for each, share in zip(sent, shares, strict=True)
            )
            for name in sent[0].tensors
        }
        root = sum(share**2 for share in shares) ** 0.5
        sigmas = {name: sigma * root for name, (sigma, _) in run.mechanism.noise.items()}
        wanted = around_zero(total, sigmas, target, run.mechanism.clip == 0)  # type: ignore[arg-type]
        assert sums.noise.squares == pytest.approx(wanted.noise.squares)  # type: ignore[union-attr]
        torch.testing.assert_close(sums.noise.sums, wanted.noise.sums)  # type: ignore[union-attr]
        assert found.model.clip == run.mechanism.clip  # type: ignore[union-attr]
    for name in ("code", "sums", "mean", "covariance"):
        torch.testing.assert_close(getattr(sums, name), getattr(wanted, name))


def test_records_are_those_that_are_stated_or_that_the_sums_count() -> None:
    run = parse_run(NUMBER)
    strategy, sent = FromCodedSums(run, Kept()), site(run, 0, 9)
    assert strategy.records(replace(sent, records=5)) == 5
    for records, wanted in (([4.0, 2.6], 7), ([-3.0], 0)):
        own = replace(sent, tensors={**sent.tensors, "records": torch.tensor(records)})
        assert strategy.records(own) == wanted
    time = parse_run({"task": "survival", "horizon": 3.0, "bins": 2, "time-head": "cells"})
    counts = FromCodedSums(time, Kept())
    for sign in (1, -1):
        code = {"code": sign * torch.tensor([3.0, 1.0, 0.0, 2.0, 5.4])}
        assert counts.records(replace(sent, tensors=code)) == (11 if sign > 0 else 0)
    assert strategy.restricted(sent, ()) is sent
    assert strategy.shared_classes(sent) == sent.header.classes
    assert strategy.dimension(sent) == D


@pytest.mark.parametrize("private", [False, True])
def test_sums_are_checked_by_their_rows_their_claim_and_what_records_can_have(
    private: bool,
) -> None:
    run = parse_run(NUMBER | (PRIVATE if private else {}))
    strategy, sent = FromCodedSums(run, Kept()), replace(site(run, 0, 40), records=40)
    sent = replace(sent, records=0) if private else sent
    strategy.check(sent)
    rows = replace(sent, header=replace(sent.header, classes=("other",)))
    with pytest.raises(SurrogateError, match="sums of other rows than the target's"):
        strategy.check(rows)
    long = {**sent.tensors, "sums": 1e6 * torch.ones_like(sent.tensors["sums"])}
    with pytest.raises(SurrogateError):
        strategy.check(replace(sent, tensors=long))
    if not private:
        return
    with pytest.raises(SurrogateError, match="sums without a privacy claim"):
        strategy.check(replace(sent, claim=None))
    assert isinstance(sent.claim, Mechanism)
    other = {name: each for name, each in sent.claim.noise.items() if name != "products"}
    with pytest.raises(SurrogateError, match=r"noise for .*, but sums "):
        strategy.check(replace(sent, claim=replace(sent.claim, noise=other)))


@pytest.mark.parametrize("noisy", [False, True])
def test_secure_aggregation_is_learned_from_with_its_noise_or_its_rounding(
    monkeypatch: pytest.MonkeyPatch, noisy: bool
) -> None:
    more = {"secure-aggregation": True} | (PRIVATE if noisy else {})
    run = parse_run(NUMBER | more)
    sent = site(run if noisy else parse_run(NUMBER | PRIVATE), 0, 90)
    sigmas = dict.fromkeys(sent.tensors, 0.5) if noisy else {}
    claim = sent.claim if noisy else None
    total = Total(sent.header, sent.tensors, sigmas, claim, usual_rounding={"squares": 0.25})
    learned = Learned(monkeypatch)
    found = learn_from_sum(total, run)
    ((sums, header, target),) = learned.seen
    assert (header, target) == (sent.header, run.target)
    assert run.mechanism is None or run.mechanism.clip == 0
    wanted = around_zero(sent.tensors, sigmas, target, noisy, 0.0 if noisy else 0.25)
    assert sums.rounding == wanted.rounding
    assert (sums.rounding == 0) == noisy
    torch.testing.assert_close(sums.covariance, wanted.covariance)
    assert found.model.clip == (0.0 if noisy else None)  # type: ignore[union-attr]
    assert (found.defended, found.facts) == (Defended([]), {"fact": 1.0})
    false = {**sent.tensors, "sums": 1e7 * torch.ones_like(sent.tensors["sums"])}
    with pytest.raises(
        RunError, match=r"the secure aggregation has .* so some site has added false numbers"
    ):
        learn_from_sum(replace(total, tensors=false), run)
    if not noisy:
        empty = {name: torch.zeros_like(each) for name, each in sent.tensors.items()}
        with pytest.raises(RunError, match=r"nothing to learn from: coded sums without records$"):
            learn_from_sum(replace(total, tensors=empty), run)
