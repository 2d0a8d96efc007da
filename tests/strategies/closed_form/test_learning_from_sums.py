"""What a method of class statistics is given to learn from, by its classes, weights and claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Ensemble, Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies import heads as module
from fedsurrogate.strategies.base.outcome import Defended
from fedsurrogate.strategies.closed_form.statistics import of_total
from fedsurrogate.strategies.heads import FromStatistics, learn_from_sum, pooled_sums
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.examples import class_sums_run
from tests.strategies.closed_form.test_limits_of_sums import CLASSES, RUN, D, sums_of

few = settings(max_examples=10, deadline=None)


def head(header: Header, dimension: int = D) -> Head:
    return Head(
        header, torch.ones(len(header.classes), dimension), torch.zeros(len(header.classes))
    )


class Learned:
    """In place of what learns: keeps the statistics that it gets."""

    def __init__(self, patch: pytest.MonkeyPatch, ensemble: bool = False) -> None:
        self.seen: list[Any] = []
        self.ensemble = ensemble
        patch.setattr(module, "learned_by", lambda plan: self)

    def __call__(self, statistics: Any, header: Header) -> Any:
        self.seen.append((statistics, header))
        made = head(header, statistics.means.shape[1])
        return (Ensemble((made, made)) if self.ensemble else made), {"fact": 1.0}


def claimed(sent: Any, claim: Any) -> Any:
    return replace(sent, claim=claim, records=0)


@few
@given(st.lists(st.integers(6, 60), min_size=1, max_size=4), st.sampled_from([(), ("c", "a", "b", "d")]))  # fmt: skip
def test_the_statistics_are_of_all_sites_with_the_weights_that_they_keep(
    sizes: list[int], classes: tuple[str, ...]
) -> None:
    sent = [sums_of(at, n=n) for at, n in enumerate(sizes)]
    capped = {f"s{len(sizes) - 1}": 0.25}
    with pytest.MonkeyPatch.context() as patch:
        learned = Learned(patch)
        strategy = FromStatistics(RUN)
        patch.setattr(strategy, "defend", lambda given_, known: Defended(list(given_), capped))
        found = strategy.learn(sent, classes)
    ((statistics, header),) = learned.seen
    known = classes or CLASSES
    assert header == replace(sent[0].header, site="coordinator", classes=known)
    wanted = pooled_sums(sent, capped, known)
    torch.testing.assert_close(statistics.counts, wanted.counts)
    torch.testing.assert_close(statistics.means, wanted.means)
    shares = [0.25 if at == len(sizes) - 1 else 1.0 for at in range(len(sizes))]
    total = sum(share * n for share, n in zip(shares, sizes, strict=True))
    assert float(statistics.counts.sum()) == pytest.approx(total, rel=1e-5)
    assert found.facts == {"fact": 1.0}
    assert found.defended == Defended(sent, capped)
    assert isinstance(found.model, Head)
    assert found.model.clip is None
    assert [strategy.records(each) for each in sent] == sizes
    assert strategy.records(replace(sent[0], records=0)) == sizes[0]
    assert strategy.shared_classes(sent[0]) == ()
    below = replace(sent[0], records=0, tensors={"counts": torch.tensor([-3.0])})
    assert strategy.records(below) == 0


def test_noisy_sums_have_the_classes_of_the_sites_and_a_head_of_clipped_features() -> None:
    claim = parse_run({"epsilon": 4.0, "delta": 1e-5, "fedpft.covariance": "full"}).mechanism
    assert claim is not None
    sent = [claimed(sums_of(at), claim) for at in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(RUN), "mechanism", property(lambda own: claim))
        for ensemble in (False, True):
            learned = Learned(patch, ensemble)
            strategy = FromStatistics(RUN)
            patch.setattr(strategy, "defend", lambda given_, known: Defended(list(given_), {}))
            if ensemble:
                with pytest.raises(RunError, match="noisy sums must be a linear head"):
                    strategy.learn(sent, ("x",))
                continue
            found = strategy.learn(sent, ("x",))
            ((_, header),) = learned.seen
            assert header.classes == CLASSES
            assert found.model.clip == claim.clip == 0  # type: ignore[union-attr]
            assert strategy.shared_classes(sent[0]) == CLASSES


@pytest.mark.parametrize("ensemble", [False, True])
def test_secure_aggregation_gives_a_head_with_the_map_of_the_sites(
    monkeypatch: pytest.MonkeyPatch, ensemble: bool
) -> None:
    run = class_sums_run(**{"secure-aggregation": True, "classes": "a,b,c"})
    sent = sums_of(1)
    public = PublicMap(torch.ones(D, 9), torch.ones(9))
    tensors = {name: each.double() for name, each in sent.tensors.items()}
    header = replace(sent.header, site="coordinator")
    total = Total(header, tensors, public=public)
    learned = Learned(monkeypatch, ensemble)
    if ensemble:
        with pytest.raises(RunError, match="no linear head cannot be used after the public map"):
            learn_from_sum(total, run)
        return
    found = learn_from_sum(total, run)
    ((statistics, given_),) = learned.seen
    wanted, known = of_total(total)
    assert given_ == known
    torch.testing.assert_close(statistics.means, wanted.means)
    assert isinstance(found.model, Head)
    assert found.model.projection is public.projection
    assert found.model.header.frame == run.public_frame(9)
    assert (found.defended, found.facts) == (Defended([]), {"fact": 1.0})
    assert found.model.clip is None
