"""AFL: the sums of all sites give the head that least squares finds on all their records."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies.closed_form.strategy import pooled_sums
from fedsurrogate.strategies.heads.analytic import Analytic, afl_model
from tests.examples import CLASSES, Hospital, records, three_hospitals


def head_of(sent: list[Parameters], ridge: float, capped: dict[str, float] | None = None) -> Head:
    head, facts = afl_model(pooled_sums(sent, capped or {}, CLASSES), sent[0].header, ridge)
    assert isinstance(head, Head)
    assert not facts
    return head


def test_sites_of_one_class_each_give_the_head_of_all_records_together() -> None:
    whole, ridge = records(), 0.05
    head = head_of([each.sums() for each in three_hospitals(whole)], ridge)
    features, labels = whole.features, whole.labels
    covariance = (features - features.mean(0)).square().mean()
    known = Ridge(alpha=float(ridge * covariance * len(labels))).fit(
        features.numpy(), torch.eye(3)[labels].numpy()
    )
    torch.testing.assert_close(head.weight, torch.tensor(known.coef_).float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        head.bias, torch.tensor(known.intercept_).float(), rtol=1e-4, atol=1e-6
    )


def test_a_site_that_keeps_half_of_its_weight_counts_half() -> None:
    everything = records()
    whole = everything.sums()
    half = Hospital("half", everything.features[::2], everything.labels[::2]).sums()
    twice = head_of([half, whole], 0.01)
    doubled = replace(
        whole, tensors={name: 2 * t for name, t in whole.tensors.items()}, records=2 * whole.records
    )
    torch.testing.assert_close(head_of([half, doubled], 0.01, {"s": 0.5}).weight, twice.weight)


def spoiled(name: str, value: Tensor, records_of_it: int = 200) -> bytes:
    sent = records().sums()
    return pack_parameters(
        replace(sent, tensors=dict(sent.tensors) | {name: value}, records=records_of_it)
    )


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (lambda: spoiled("counts", torch.tensor([-1.0, 100, 101])), "counts: -1.* is outside 0"),
        (lambda: spoiled("counts", torch.tensor([1.0, 1, 1])), "3 records together, but 200"),
        (lambda: spoiled("squares", fold(-torch.eye(6).double())), "no records have"),
        (lambda: spoiled("squares", fold(torch.eye(6).double() - 0.9)), "no records have"),
        (lambda: spoiled("squares", torch.ones(20)), "shape"),
    ],
)
def test_sums_that_no_records_have_are_refused(payload: object, why: str) -> None:
    assert callable(payload)
    with pytest.raises(SurrogateError, match=why):
        Analytic({"method": "afl", "sites": 1}).unpack(payload())


def test_honest_sums_pass_at_half_precision() -> None:
    sent = Analytic({"method": "afl", "sites": 1}).unpack(pack_parameters(records(3, 40).sums()))
    assert sent.records == 3


def test_a_ridge_below_zero_is_refused() -> None:
    with pytest.raises(Exception, match=r"afl\.ridge"):
        parse_run({"method": "afl", "afl.ridge": -1.0})


def without_an_inverse() -> Parameters:
    """Sums of records that are alike within their class: three points in six dimensions."""
    labels = records().labels
    return Hospital("s", torch.eye(3).double().repeat(1, 2)[labels], labels).sums()


def test_a_covariance_without_an_inverse_is_refused_for_a_ridge_of_zero_with_what_to_set() -> None:
    strategy = Analytic({"method": "afl", "afl.ridge": 0.0})
    with pytest.raises(RunError, match=r"afl\.ridge = 0: .* no inverse; set afl\.ridge above 0"):
        strategy.learn([without_an_inverse()], CLASSES)
    assert not strategy.learn([records().sums()], CLASSES).facts


def test_a_ridge_that_is_too_small_is_replaced_by_a_larger_one_which_is_stated() -> None:
    for ridge, added in ((1e-18, True), (0.1, False)):
        learned = Analytic({"method": "afl", "afl.ridge": ridge}).learn(
            [without_an_inverse()], CLASSES
        )
        assert isinstance(learned.model, Head)
        assert learned.model.weight.isfinite().all()
        assert ("added-ridge" in learned.facts) == added
