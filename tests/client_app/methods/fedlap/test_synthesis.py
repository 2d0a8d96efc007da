"""The synthesis, its batches and its search against plain loops over generated settings."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.dp.record_gradients import PrivateGradient
from fedsurrogate.client_app.methods.fedlap import approximation
from fedsurrogate.client_app.methods.fedlap.approximation import (
    CLASS_GRADIENTS,
    MOMENTUM,
    Batches,
    Matching,
    Statistic,
    class_mean_slope,
    class_means,
    dsc,
    feddm,
    matching_slope,
    perturbed,
    psg,
    real_class_gradients,
    real_class_means,
    synthesise,
)
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, gradient, loss, mismatch
from fedsurrogate.common.models.networks import convnet, linear, mlp, parameters_of, split_input
from fedsurrogate.common.models.training_parts import Change, draw
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.common.wire.model_proto import unpack_synthetic
from fedsurrogate.strategies.base.training import Training


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
                        speed = MOMENTUM * speed + by
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

    def slope(body: Any, here: Any, now: Any, change: Any, real: Any, compare: Any) -> (
        tuple[float, Tensor]
    ):  # fmt: skip
        nonlocal slopes
        slopes += 1
        pair = [torch.ones(2, 3)], [torch.full((2, 3), 0.25)]
        assert compare(*pair) == mismatch(*pair, 0.5, Looks.noise)
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
        body,
        parameters,
        records,
        same,
        [each.detach() for each in real],
        partial(mismatch, mse_weight=0.0),
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


LABELS = torch.arange(12) % 3
NETWORKS = {"convnet": convnet(256, 4, 16), "mlp": mlp(256, 4, 16), "linear": linear(256, 4)}


def records(body: nn.Module, seed: int, dtype: torch.dtype = torch.float64) -> LandscapeRecords:
    shape = (
        (12, 1, 16, 16)
        if isinstance(body[0] if isinstance(body, nn.Sequential) else body, nn.Conv2d)
        else (12, 256)
    )
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return LandscapeRecords.evenly(values.to(dtype), LABELS)


def exact(
    body: nn.Module, model: dict[str, Tensor], mine: LandscapeRecords, target: Any, change: Change
) -> tuple[Any, Any]:
    at = {name: tensor.detach().requires_grad_() for name, tensor in model.items()}
    values = mine.values.clone().requires_grad_()
    found = loss(body, at, LandscapeRecords(change(values), mine.labels, mine.weights))
    wrong = mismatch(torch.autograd.grad(found, list(at.values()), create_graph=True), target, 0.1)
    return float(wrong.detach()), torch.autograd.grad(wrong, [values])[0]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("augment", ["", "colour", "rotate"])
def test_the_slope_in_32_bits_is_the_exact_derivative(kind: str, augment: str) -> None:
    if augment and kind != "convnet":
        pytest.skip("only images are changed")
    module = NETWORKS[kind]
    body, _ = split_input(module, torch.zeros(1, 256))
    change = draw((augment,) if augment else (), torch.Generator().manual_seed(2))
    model = {name: tensor.double() for name, tensor in parameters_of(module).items()}
    body = body.double()
    target = list(gradient(body, model, records(body, 1), change).values())
    wanted, slope = exact(body, model, records(body, 2), target, change)
    single = {name: tensor.float() for name, tensor in model.items()}
    goal = [tensor.float() for tensor in target]
    mine = records(body, 2, torch.float32)
    found, ours = matching_slope(
        body.float(), single, [mine], change, lambda a: mismatch(a, goal, 0.1)
    )
    assert found == pytest.approx(wanted, rel=1e-4)
    assert float((ours - slope).norm() / slope.norm()) < 1e-2
    assert not any(layer._forward_hooks for layer in body.modules()), "the network is as before"


def test_slopes_by_class_come_in_the_order_of_the_records() -> None:
    module = NETWORKS["mlp"]
    body, _ = split_input(module.float(), torch.zeros(1, 256))
    model = parameters_of(module)
    change = draw((), torch.Generator())
    real = list(real_class_gradients(body, model, records(body, 1, torch.float32), change).values())
    mine = records(body, 2, torch.float32)
    order = LABELS.argsort(stable=True)
    compare = partial(mismatch, mse_weight=0.1)
    found, slope = CLASS_GRADIENTS.slope(body, model, mine, change, real, compare)
    assert not mine.values.requires_grad, "the records stay as they are"
    assert not any(tensor.requires_grad for tensor in model.values())
    same, by_class = CLASS_GRADIENTS.slope(body, model, mine.take(order), change, real, compare)
    assert found == pytest.approx(same, rel=1e-5)
    assert torch.allclose(slope[order], by_class, atol=1e-5 * float(slope.abs().max()))


CLASSES = ("a", "b", "c", "d")
# The site has two of the run's four classes.
LABELS_RECIPES = torch.arange(90) % 2
IMAGES = 3


def run(method: str, **settings: Any) -> Run:
    small: dict[str, Any] = {
        "fedlap.model": "linear",
        "fedlap.images-per-class": IMAGES,
        "fedlap.rounds": 2,
    }
    return parse_run({"method": method} | small | settings)


def features() -> Tensor:
    values = torch.randn(len(LABELS_RECIPES), 64, generator=torch.Generator().manual_seed(5))
    values[:, :32] += 2 * LABELS_RECIPES[:, None]
    return values


def job(folder: Path, config: Run) -> Job:
    records = LabelledFeatures(features(), LABELS_RECIPES, None)
    found = SiteFeatures(records, records, CLASSES, "f", 0.0, simulated=False)
    question = Training.begin(config, CLASSES, "f", 64).payload()
    info = {"round": 1, "lineage": "abc", "confirmed": 0}
    return Job(config, NodeConfig(state_dir=str(folder)), "s", found, payload=question, info=info)


def sent(made: MethodOutput) -> Synthetic:
    return unpack_synthetic(made.payload)


def begun(config: Run, classes: int = 2) -> Tensor:
    """The noise that a site begins from."""
    noise = torch.randn(
        classes * IMAGES, 64, generator=stream(config.settings.seed, "fedlap", "s", "begin")
    )
    return noise / 8


def real_means() -> Tensor:
    """Means of the real records of each class, at norm one."""
    unit = torch.nn.functional.normalize(features(), dim=1)
    return torch.stack([unit[label == LABELS_RECIPES].mean(0) for label in (0, 1)])


def test_one_step_of_dsc_is_the_closed_form_of_gradient_matching_on_a_linear_model(
    tmp_path: Path,
) -> None:
    """At zero weights the gradient of class c is (1/C - [j = c]) m_c in row j, for the mean m_c of
    its records. So every row's cosine is that of two means, and its derivative is known.
    """
    rate = 40.0
    config = run(
        "dsc",
        **{"fedlap.image-steps": 1, "fedlap.mse-weight": 0.0, "fedlap.image-learning-rate": rate},
    )
    made = sent(dsc(job(tmp_path, config)))
    assert made.header.classes == CLASSES[:2]
    wanted = []
    for start, real in zip(begun(config).reshape(2, IMAGES, 64), real_means(), strict=True):
        mean = start.mean(0)
        cosine = torch.cosine_similarity(mean, real, dim=0)
        slope = -(real / real.norm() - cosine * mean / mean.norm()) / mean.norm() / IMAGES
        # Weight and bias of two classes are four tensors; the bias's gradient does not depend on
        # the records.
        wanted.append(start - rate * slope / 4)
    assert torch.allclose(made.values, torch.cat(wanted), atol=2e-3)
    assert made.radius == pytest.approx(config.settings.fedlap.trust_radius), (
        "DSC has no radius of its own"
    )


def test_feddm_without_perturbation_matches_the_means_of_the_classes(tmp_path: Path) -> None:
    config = run("feddm", **{"fedlap.trust-radius": 1e-6, "fedlap.image-steps": 200})
    made = sent(feddm(job(tmp_path, config)))
    assert torch.allclose(made.values.reshape(2, IMAGES, 64).mean(1), real_means(), atol=2e-3)


def test_feddm_draws_models_inside_its_radius_and_none_without_one() -> None:
    model = parameters_of(convnet(64, 4, 4, 0))
    generator = torch.Generator().manual_seed(0)
    far = []
    for _ in range(50):
        drawn = perturbed(model, 3.0, generator)
        far.append(
            torch.cat([(drawn[name] - model[name]).flatten() for name in model]).norm().item()
        )
    assert max(far) <= 3.0 * (1 + 1e-5)
    assert max(far) > 2 > 1 > min(far), "distances spread over the ball"
    same = perturbed(model, 0.0, generator)
    assert all(torch.equal(same[name], model[name]) for name in model)


@pytest.mark.slow
def test_the_epsilon_of_psg_is_the_accountants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    whole = PrivateGradient.__call__

    def spy(self: PrivateGradient, *arguments: Any) -> dict[str, Tensor]:
        looks.append(1)
        return whole(self, *arguments)

    monkeypatch.setattr(PrivateGradient, "__call__", spy)
    budget: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "classes": ",".join(CLASSES)}
    several: dict[str, Any] = {
        "fedlap.trajectories": 5,
        "fedlap.batches": 2,
        "fedlap.sample-rate": 0.5,
    }
    config = run("psg", **budget | several | {"fedlap.image-steps": 2})
    made = psg(job(tmp_path, config))
    (event,) = entry(config, "1", made).events
    assert (event.count, event.sample_rate) == (len(looks), 0.5) == (10, 0.5)
    accountant = PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.5, gaussian),
        event.count * config.settings.fedlap.rounds,
    )
    assert accountant.get_epsilon(1e-5) == pytest.approx(4.0, rel=0.01)
    assert sent(made).header.classes == CLASSES, "the labels do not show which classes a site has"
    assert sent(made).records == 0


def test_psg_begins_every_trajectory_at_another_random_model(tmp_path: Path) -> None:
    settings = {
        "epsilon": 4.0,
        "delta": 1e-5,
        "classes": ",".join(CLASSES),
        "fedlap.model": "mlp",
        "fedlap.width": 8,
    }
    asked = job(tmp_path, run("psg", **settings))
    received = asked.received_model().tensors
    one, other = (
        approximation._fresh(asked, received, torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    assert one.keys() == other.keys() == received.keys()
    assert not torch.equal(one["hidden.weight"], other["hidden.weight"])
    assert not torch.equal(one["hidden.weight"], received["hidden.weight"])


@pytest.mark.parametrize("method", ["dsc", "feddm"])
def test_methods_that_match_class_by_class_refuse_privacy(
    method: str,
) -> None:
    with pytest.raises(ConfigError, match=r"does not support it; use .*'psg'"):
        run(method, epsilon=4.0, delta=1e-5)
