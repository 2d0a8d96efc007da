"""Least squares in closed form: second moments that are false, too large, or beyond what 16 bits
can hold.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.sums import released_sums
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies.closed_form import strategy as closed_form
from fedsurrogate.strategies.heads.analytic import Analytic

CLASSES, D, SITES = ("a", "b", "c"), 6, 9
RUN = {"method": "afl", "sites": SITES + 1}


def records(offset: float = 0.0) -> tuple[Tensor, Tensor]:
    labels = torch.arange(1800) % 3
    noise = torch.randn(len(labels), D, generator=torch.Generator().manual_seed(1))
    return noise + 3 * torch.eye(3, D)[labels] + offset, labels


def payload(features: Tensor, labels: Tensor, site: str) -> bytes:
    """What a site's own code sends."""
    data = LabelledFeatures(features, labels)
    found = SiteFeatures(data, data, CLASSES, "f", 0.0, simulated=False)
    return released_sums(Task(parse_run(RUN), NodeConfig(), site, found)).payload


def honest(
    offset: float = 0.0, run: dict[str, object] | None = None
) -> tuple[Analytic, list[Parameters]]:
    coordinator, (features, labels) = Analytic(run or RUN), records(offset)
    parts = [
        payload(features[site::SITES], labels[site::SITES], f"s{site}") for site in range(SITES)
    ]
    return coordinator, coordinator.in_one_frame([coordinator.unpack(part) for part in parts])


def forged(like: Parameters, counts: Tensor, sums: Tensor, squares: Tensor) -> bytes:
    tensors = {"counts": counts, "sums": sums, "squares": fold(squares)}
    header = replace(like.header, site="hostile")
    return pack_parameters(
        replace(like, header=header, tensors=tensors, records=max(1, round(float(counts.sum()))))
    )


def accuracy(model: object, offset: float = 0.0, kept: int = 3) -> float:
    assert isinstance(model, Head)
    features, labels = records(offset)
    features, labels = features[labels < kept], labels[labels < kept]
    return float((model.predict(features) == labels).double().mean())


@pytest.mark.parametrize("offset", [30.0, 100.0, 300.0])
def test_a_large_mean_of_all_features_does_not_spoil_the_model(offset: float) -> None:
    best = accuracy(Analytic.learn(*honest(), CLASSES).model)
    assert best > 0.9
    assert accuracy(Analytic.learn(*honest(offset), CLASSES).model, offset) > best - 0.03


def far_apart() -> tuple[Tensor, Tensor]:
    sums = torch.zeros(3, D)
    sums[0, 1], sums[1, 0], sums[2, 0] = 1e6, 1e6, -1e6
    return sums, torch.eye(D)


def widespread() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, D), 1e14 * torch.eye(D)


@pytest.mark.parametrize("lie", [far_apart, widespread])
@pytest.mark.parametrize("records_of_a_class", [1, 200])
def test_one_site_of_ten_with_huge_moments_costs_at_most_three_points(
    lie: object, records_of_a_class: int
) -> None:
    coordinator, sent = honest()
    best = accuracy(coordinator.learn(sent, CLASSES).model)
    assert callable(lie)
    false = coordinator.unpack(forged(sent[0], torch.full((3,), float(records_of_a_class)), *lie()))
    assert accuracy(coordinator.learn([*sent, false], CLASSES).model) > best - 0.03


def test_a_sum_of_a_class_without_records_is_refused() -> None:
    coordinator, sent = honest()
    with pytest.raises(SurrogateError, match="without records"):
        coordinator.unpack(
            forged(sent[0], torch.tensor([5.0, 5, 0]), torch.ones(3, D), torch.eye(D))
        )


def test_a_dimension_that_would_fill_the_memory_is_refused_before_any_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, sent = honest()
    monkeypatch.setattr(closed_form, "MOST_DIMENSIONS", D - 1)
    monkeypatch.setattr(closed_form, "unfold", lambda *_: pytest.fail("a matrix was made"))
    with pytest.raises(SurrogateError, match=r"dimension 6; .* at most 5"):
        coordinator.unpack(pack_parameters(sent[0]))


def test_a_matrix_without_an_inverse_is_an_error_with_a_reason() -> None:
    coordinator = Analytic(RUN | {"afl.ridge": 0.0})
    # Two points, all of whose features are equal: the covariance has rank one.
    labels = torch.arange(32) % 2
    sent = coordinator.unpack(payload((2.0 * labels - 1)[:, None].expand(32, D), labels, "s0"))
    with pytest.raises(RunError, match=r"afl\.ridge"):
        coordinator.learn([sent], CLASSES)


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_a_model_for_fewer_classes_is_as_good_as_one_learned_from_these_alone(
    offset: float,
) -> None:
    coordinator, sent = honest(offset)
    fewer = [
        each
        for each in (coordinator.restricted(one, ("a", "b")) for one in sent)
        if each is not None
    ]
    assert [each.records for each in fewer] == [
        sum(each.tensors["counts"].round().int().tolist()) for each in fewer
    ]
    features, labels = records(offset)
    alone = payload(features[labels < 2], labels[labels < 2], "s")
    known = coordinator.restricted(coordinator.unpack(alone), ("a", "b"))
    assert known is not None
    best = accuracy(coordinator.learn([known], CLASSES[:2]).model, offset, 2)
    assert accuracy(coordinator.learn(fewer, CLASSES[:2]).model, offset, 2) > best - 0.01


def test_images_with_a_black_border_are_accepted() -> None:
    features, labels = torch.zeros(60, 200), torch.arange(60) % 3
    features[:, :100] = torch.randn(60, 100, generator=torch.Generator().manual_seed(1))
    assert Analytic(RUN).unpack(payload(features, labels, "s0")).records == 60
