"""FedLAP's coordinator: radius rules by hand, one site equals training on its synthetic set,
hostile sets.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, distance
from fedsurrogate.common.models.networks import convnet, parameters_of, split_input
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.common.surrogates.surrogates import Header, Synthetic, check_synthetic
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedlap import (
    gradient_of,
    learn,
)

CLASSES = ("a", "b", "c")
SETTINGS = FedLAPSettings(
    width=4, images_per_class=2, server_steps=10, trust_radius=5.0, rule="min", memory=0.5
)
NOTHING: Tensors = {}


def model() -> dict[str, torch.Tensor]:
    return parameters_of(convnet(64, 3, 4))


def synthetic(
    site: str = "s",
    *,
    classes: tuple[str, ...] = ("a", "c"),
    radius: float = 5.0,
    records: int = 10,
) -> Synthetic:
    values = torch.randn(
        2 * len(classes), 64, generator=torch.Generator().manual_seed(sum(map(ord, site)))
    )
    labels = torch.arange(len(classes)).repeat_interleave(2)
    return Synthetic(Header("fedlap", "r", site, "f", classes), 1, values, labels, radius, records)


def walked(*sets: Synthetic, memory: Tensors = NOTHING, **changes: Any) -> SimpleNamespace:
    """A round's descent, and the model and memory after it."""
    run = parse_run({"method": "fedlap"})
    config = replace(
        run,
        settings=run.settings.model_copy(update={"fedlap": SETTINGS.model_copy(update=changes)}),
    )
    training = Training(config, CLASSES, "f", 64, model(), memory)
    found = learn(training, sets)
    return SimpleNamespace(**found, model=training.model, memory=training.memory)


def test_one_site_equals_training_on_its_synthetic_set() -> None:
    ours = walked(synthetic())
    module = convnet(64, 3, 4)
    body, _ = split_input(module, torch.zeros(1, 64))
    optimiser = torch.optim.SGD(module.parameters(), lr=SETTINGS.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 10)
    truth = torch.tensor([0, 0, 2, 2])  # class indices of the run, not of the site
    for _ in range(10):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(
            body(synthetic().values.reshape(-1, 1, 8, 8)), truth
        ).backward()
        optimiser.step()
        schedule.step()
    for name, parameter in module.named_parameters():
        assert torch.allclose(ours.model[name], parameter, atol=1e-6)
    assert (ours.steps, ours.at_edge) == (10, 0)
    assert ours.moved == pytest.approx(distance(ours.model, model()))


def test_a_site_weighs_as_many_records_as_it_has() -> None:
    one, other = synthetic("a"), synthetic("b")
    twice = walked(one, replace(other, records=20))
    assert all(
        torch.allclose(twice.model[n], t, atol=1e-5)
        for n, t in walked(one, other, replace(other)).model.items()
    )
    assert any(
        not torch.allclose(twice.model[n], t, atol=1e-4)
        for n, t in walked(one, other).model.items()
    )


def test_the_model_ends_inside_the_radius_the_rule_gives() -> None:
    free = walked(synthetic("a"), synthetic("b")).moved
    held = walked(synthetic("a", radius=free / 4), synthetic("b", radius=free / 2))
    assert held.moved == pytest.approx(free / 4, rel=1e-4)
    assert held.at_edge > 0
    assert (
        walked(synthetic("a", radius=free / 4), synthetic("b", radius=free / 2), rule="max").moved
        > free / 4
    )


def test_images_of_the_round_before_count_as_much_as_those_of_this_round() -> None:
    before = walked(synthetic("a")).memory
    together = walked(synthetic("b"), synthetic("a"))
    assert all(
        torch.allclose(walked(synthetic("b"), memory=before).model[n], t, atol=1e-6)
        for n, t in together.model.items()
    )
    alone = walked(synthetic("b"))
    assert any(not torch.allclose(alone.model[n], t, atol=1e-4) for n, t in together.model.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"radius": 0.0}, "radius of 0"),
        ({"radius": -1.0}, "radius of -1"),
        ({"radius": math.nan}, "radius of nan"),
        ({"radius": math.inf}, "radius of inf"),
        ({"radius": 5.1}, "trust-radius = 5"),
        ({"values": torch.zeros(4, 81)}, "dimension 81"),
        ({"values": torch.full((4, 64), 1e5)}, "not finite, or beyond"),
        ({"values": torch.full((4, 64), math.nan)}, "not finite"),
        (
            {"values": torch.zeros(5, 64), "labels": torch.tensor([0, 0, 1, 1, 1])},
            "3 synthetic records of a class",
        ),
        ({"labels": torch.tensor([0, 0, 0, 1])}, "images-per-class = 2"),
        ({"round": 2}, "round 2, this is round 1"),
        ({"records": 0}, "represent 0"),
        ({"records": 10**12}, "represent"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SurrogateError, match=message):
        check_synthetic(replace(synthetic(), **change), SETTINGS, CLASSES, 64, 1, private=False)


def test_private_sets_must_hide_what_privacy_hides() -> None:
    full = synthetic(classes=CLASSES, records=0)
    check_synthetic(full, SETTINGS, CLASSES, 64, 1, private=True)
    for bad, message in (
        (synthetic(records=0), "other classes"),
        (replace(full, records=7), "represent 7"),
        (replace(full, radius=3.0), "under privacy"),
    ):
        with pytest.raises(SurrogateError, match=message):
            check_synthetic(bad, SETTINGS, CLASSES, 64, 1, private=True)


def test_a_set_without_a_finite_gradient_differs_from_a_good_one() -> None:
    bad = replace(synthetic(), values=torch.full((4, 64), torch.inf))
    for one, finite in ((synthetic(), True), (bad, False)):
        gradient = gradient_of(model(), 64, CLASSES, one, SETTINGS)
        assert all(bool(part.isfinite().all()) for part in gradient.values()) is finite


@pytest.mark.parametrize("kind", ["linear", "mlp", "convnet"])
def test_what_is_learned_is_what_the_sites_get(kind: str) -> None:
    config = parse_run(
        {"method": "fedlap", "fedlap.model": kind, "fedlap.width": 4, "fedlap.images-per-class": 2}
    )
    training = Training.begin(config, CLASSES, "f", 64)
    sets = [synthetic("a"), synthetic("b", classes=CLASSES)]
    learn(training, sets)
    module_input = torch.rand(7, 64)
    from fedsurrogate.common.models.networks import build

    body, values = split_input(build(kind, 64, 3, training.model), module_input)  # type: ignore[arg-type]
    wanted = torch.func.functional_call(body, dict(training.model), (values,))
    assert torch.allclose(training.classifier().scores(module_input), wanted, atol=1e-5)
    assert LandscapeRecords.evenly(values, torch.zeros(7)).weights.sum() == pytest.approx(1)


def test_by_default_images_are_remembered_without_privacy_only() -> None:
    default = FedLAPSettings()
    usual, chosen = default.remembered(private=False), FedLAPSettings(memory=0.2)
    assert (usual, default.remembered(private=True)) == (0.33, 0.0)
    assert chosen.remembered(private=True) == chosen.remembered(private=False) == 0.2
    for epsilon in (0.0, 8.0):
        update = {
            "epsilon": epsilon,
            "fedlap": SETTINGS.model_copy(update={"memory": default.memory}),
        }
        run = parse_run({"method": "fedlap"})
        config = replace(run, settings=run.settings.model_copy(update=update))
        training = Training(config, CLASSES, "f", 64, model(), NOTHING)
        learn(training, [synthetic("a")])
        assert bool(training.memory) == (not epsilon)
