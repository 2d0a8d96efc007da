"""The synthesis, its batches and its search against plain loops over generated settings."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsurrogate.client_app.methods.fedlap.image_synthesis import Matching, synthesise
from fedsurrogate.client_app.methods.fedlap.statistics import (
    CLASS_GRADIENTS,
    Batches,
    Statistic,
    class_mean_slope,
    class_means,
    real_class_means,
)
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.networks import linear, mlp, parameters_of
from fedsurrogate.common.settings import FedLAPSettings


def same(values: Tensor) -> Tensor:
    return values


def drawn(count: int, seed: int, d: int = 3) -> LandscapeRecords:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, d, generator=generator)
    return LandscapeRecords.evenly(values, torch.arange(count) % 2)


class Looks:
    """A statistic of the model's position, each time another one; with noise."""

    noise = 0.25

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def __call__(self, parameters: Any, change: Any) -> dict[str, Tensor]:
        self.seen.append({name: tensor.clone() for name, tensor in parameters.items()})
        return {"m": torch.full((3,), float(len(self.seen)))}


def plain(
    own: FedLAPSettings,
    begin: LandscapeRecords,
    start: dict[str, Tensor],
    rate: float,
    broken: int,
) -> tuple[Tensor, list[dict[str, Tensor]], int]:
    """The values after all steps, the models at which the real statistic was taken, and the number
    of steps; the slope of step `broken` is not finite.
    """
    values, speed, seen, steps, count = begin.values.clone(), torch.zeros(4, 3), [], 0, 0
    for _ in range(own.trajectories):
        here = {name: tensor.clone() for name, tensor in start.items()}
        for loop in range(own.loops):
            far = math.sqrt(sum(float((here[n] - start[n]).square().sum()) for n in here))
            if far >= own.trust_radius:
                break
            for _ in range(own.batches):
                count += 1
                seen.append(here)
                for _ in range(own.image_steps):
                    steps += 1
                    if steps != broken:
                        by = values - count + here["bias"].sum()
                        speed = own.image_momentum * speed + by
                        values = values - own.image_learning_rate * speed
            if loop < own.loops - 1:
                for _ in range(own.model_steps):
                    at = {n: t.clone().requires_grad_() for n, t in here.items()}
                    lost = nn.functional.cross_entropy(
                        values @ at["weight"].T + at["bias"], begin.labels
                    )
                    lost.backward()  # type: ignore[no-untyped-call]
                    here = {n: (t - rate * t.grad).detach() for n, t in at.items()}  # type: ignore[operator]
    return values, seen, steps


@settings(max_examples=10)
@given(
    st.builds(
        FedLAPSettings,
        trajectories=st.integers(1, 2),
        loops=st.integers(1, 3),
        batches=st.integers(1, 2),
        image_steps=st.integers(1, 3),
        model_steps=st.integers(1, 2),
        image_learning_rate=st.sampled_from([0.1, 1.0]),
        image_momentum=st.sampled_from([0.0, 0.5, 0.9]),
        trust_radius=st.sampled_from([0.05, 1e3]),
    ),
    st.integers(0, 99),
    st.integers(0, 5),
)
def test_records_and_model_follow_plain_loops(own: FedLAPSettings, seed: int, broken: int) -> None:
    """SGD with momentum on the values by the statistic's slope, where it is finite; plain descent on
    the model between loops; each trajectory begins anew, and ends outside of the trust radius.
    """
    body, begin = linear(3, 2), drawn(4, seed)
    model = parameters_of(body)
    slopes = 0

    def slope(body: Any, here: Any, now: Any, change: Any, real: Any, mse: float, noise: float) -> (
        tuple[float, Tensor]
    ):  # fmt: skip
        nonlocal slopes
        slopes += 1
        assert (mse, noise) == (0.5, Looks.noise)
        made = now.values.detach() - real[0] + here["bias"].sum()
        return float(slopes), made * (math.nan if slopes == broken else 1.0)

    rate, looks = 0.3, Looks()
    start = {name: tensor + 1 for name, tensor in model.items()}
    matching = Matching(own, rate, 0.5, Statistic(lambda *_: {}, slope), lambda _: start)
    made, story = synthesise(body, model, begin, looks, matching, itertools.repeat(same))

    values, seen, steps = plain(own, begin, start, rate, broken)
    count = len(seen)
    torch.testing.assert_close(made.values, values, rtol=1e-4, atol=1e-4)
    assert torch.equal(made.labels, begin.labels)
    assert (story.first, story.last, story.looks) == (1.0, float(steps), count)
    assert len(looks.seen) == count
    for one, two in zip(looks.seen, seen, strict=True):
        assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in two)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 99), st.booleans())
def test_a_batch_is_drawn_without_replacement_from_all_records_or_from_each_class(
    count: int, size: int, seed: int, by_class: bool
) -> None:
    records = LandscapeRecords.evenly(
        torch.arange(count).float()[:, None], torch.arange(count) % 3 % 2
    )
    taken: list[LandscapeRecords] = []

    def real(body: Any, parameters: Any, batch: LandscapeRecords, change: Any) -> dict[str, Tensor]:
        taken.append(batch)
        return {"n": torch.tensor(float(len(batch.labels)))}

    statistic = Statistic(real, CLASS_GRADIENTS.slope, by_class=by_class)
    looks = Batches(nn.Identity(), records, size, torch.Generator().manual_seed(seed), statistic)
    for _ in range(20):
        looks({}, same)
    for batch in taken:
        rows = batch.values[:, 0].long()
        assert len(set(rows.tolist())) == len(rows)
        assert torch.equal(records.labels[rows], batch.labels)
        assert float(batch.weights.sum()) == pytest.approx(1, abs=1e-5)
        assert batch.weights.unique().numel() == 1 or float(batch.weights.std()) < 1e-6
        kinds, every = Counter(batch.labels.tolist()), Counter(records.labels.tolist())
        if not size:
            assert kinds == every
        elif by_class:
            assert kinds == {label: min(size, n) for label, n in every.items()}
        else:
            assert sum(kinds.values()) == min(size, count)
    assert set(torch.cat([each.values[:, 0] for each in taken]).tolist()) == set(range(count)) or (
        size * 20 < 10 * count
    ), "each record is drawn in time"


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(2, 9), st.sampled_from(["linear", "mlp"]))
def test_class_means_are_those_of_the_heads_inputs_and_outputs_and_their_slope_is_exact(
    seed: int, count: int, kind: str
) -> None:
    torch.manual_seed(seed)
    body = linear(5, 3) if kind == "linear" else mlp(5, 3, 6)
    records, parameters = drawn(count, seed, 5), parameters_of(body)
    other = drawn(6, seed + 1, 5)

    def means(values: Tensor, labels: Tensor) -> list[Tensor]:
        layers = [body] if kind == "linear" else list(body)  # type: ignore[arg-type]
        inputs = values
        for layer in layers[:-1]:
            inputs = layer(inputs)
        logits = layers[-1](inputs)
        return [
            table[labels == label].sum(0) / int((labels == label).sum())
            for label in (0, 1)
            for table in (inputs, logits)
        ]

    wanted = means(records.values, records.labels)
    found = class_means(body, parameters, records)
    named = real_class_means(body, parameters, records, same)
    assert list(named) == ["0 inputs", "0 logits", "1 inputs", "1 logits"]
    for one, two, three in zip(found, wanted, named.values(), strict=True):
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(three, two.detach())
    real = means(other.values, other.labels)
    wrong, slope = class_mean_slope(
        body, parameters, records, same, [each.detach() for each in real], 0.0, 0.0
    )
    # The mismatch is in proportion to these squares, and the slope is its derivative.
    values = records.values.clone().requires_grad_()
    squares = sum(
        (a - b.detach()).square().sum()
        for a, b in zip(means(values, records.labels), real, strict=True)
    )
    (exact,) = torch.autograd.grad(squares, [values])  # type: ignore[arg-type]
    scale = wrong / float(squares)
    assert scale > 0
    torch.testing.assert_close(slope, scale * exact, rtol=1e-3, atol=1e-6)
