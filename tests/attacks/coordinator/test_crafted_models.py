"""Secure aggregation hides which site adds what, but not a record for which the coordinator has made the
model.

The coordinator sends a network whose hidden units all look in one direction and differ in their
thresholds. A record adds to the gradients of the units whose thresholds it exceeds, so the
difference of two neighbouring units is the sum over records between the two thresholds. Where that
is one record, the gradient of the weights over that of the threshold is the record (Fowl et al.
2022, "Robbing the Fed").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsurrogate.common.models.parameters import by_name
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import numbers_of
from fedsurrogate.strategies.base.training import Training
from tests.attacks.hospitals import (
    CLASSES,
    NAMES,
    PLAIN,
    POLICY,
    PRIVATE,
    Hospitals,
    open_hospitals,
)

WIDTH, DIMENSION = 1000, 6
STEP: dict[str, Any] = PLAIN | {
    "method": "fedsgd",
    "fedavg.model": "mlp",
    "fedavg.width": WIDTH,
    "fedavg.rounds": 150,
    "fedavg.batch-size": 1000,
    "fedavg.learning-rate": 1e3,
}
WORD = "exact-sums-at-models = true\n"


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    made = open_hospitals(tmp_path, NAMES)
    made.settings = dict(STEP)
    return made


def allow(hospitals: Hospitals, allowed: bool) -> None:
    hospitals.policy(POLICY if allowed else POLICY.replace(WORD, ""))


def crafted(settings: dict[str, Any]) -> Training:
    """The first model, made by the coordinator for its purpose."""
    training = Training.begin(parse_run(settings), tuple(CLASSES.split(",")), "f" * 16, DIMENSION)
    training.asked = 1
    direction = torch.randn(DIMENSION, generator=torch.Generator().manual_seed(1))
    small = torch.full((1, WIDTH), 4e-4)
    training.model = {
        "hidden.weight": direction.expand(WIDTH, DIMENSION).clone(),
        "hidden.bias": torch.linspace(-6, 6, WIDTH),
        "linear.weight": torch.cat([small, -small]),
        "linear.bias": torch.zeros(2),
    }
    return training


def stolen(hospitals: Hospitals) -> list[torch.Tensor]:
    """Records that one round shows, without the sites' mean and scale."""
    training, run = crafted(hospitals.settings), parse_run(hospitals.settings)
    total = hospitals.total(NAMES, public=training.payload(), round=1)
    assert total is not None
    count = sum(tensor.numel() for tensor in training.model.values())
    update = numbers_of(run.plan, run.settings, len(NAMES))["update"].decode(total[1 : 1 + count])
    moved = by_name(update, training.shapes())
    weights, biases = moved["hidden.weight"].diff(dim=0), moved["hidden.bias"].diff()
    active = biases.abs() > 0.05
    return list(weights[active] / biases[active, None])


def records(hospitals: Hospitals) -> torch.Tensor:
    found = [load_file(hospitals.folder / name / "f-train.safetensors")["x"] for name in NAMES]
    return torch.nn.functional.layer_norm(torch.cat(found), (DIMENSION,))


def shown(hospitals: Hospitals) -> int:
    """How many records of the sites are among what the coordinator has computed."""
    own = records(hospitals).double()
    return sum(bool((own - each).abs().amax(1).min() < 0.02) for each in stolen(hospitals))


def test_a_model_made_for_it_takes_records_out_of_an_exact_sum(hospitals: Hospitals) -> None:
    """This is what a hospital accepts with exact-sums-at-models."""
    allow(hospitals, True)
    assert shown(hospitals) > 50


def test_the_default_policy_refuses_exact_sums_at_a_model(hospitals: Hospitals) -> None:
    allow(hospitals, False)
    if hospitals.hello("north") == "ok":
        pytest.fail(f"one round shows {shown(hospitals)} records")
    assert "exact-sums-at-models" in hospitals.log("north")


MODEL = {"counting.digest": "0" * 64}
OF_MODELS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox"},
    "fedyogi": {"method": "fedyogi"},
    "dpcvae": {"method": "dpcvae"},
    "dpcgan": {"method": "dpcgan"},
    "evaluation": {"counting.kind": "evaluation", **MODEL},
}
OF_RECORDS: dict[str, dict[str, Any]] = {
    "gram": {},
    "survey": {"counting.kind": "survey"},
    "distributed noise": PRIVATE,
    "distributed noise on gradients": PRIVATE | {"method": "dp-fedavg"},
}


@pytest.mark.parametrize("name", [*OF_MODELS, *OF_RECORDS])
def test_what_is_computed_at_a_model_needs_the_word(hospitals: Hospitals, name: str) -> None:
    hospitals.nodes["north"]["held-out-dir"] = hospitals.nodes["north"]["data-dir"]
    hospitals.settings = PLAIN | (OF_MODELS | OF_RECORDS)[name]
    for allowed in (False, True):
        allow(hospitals, allowed)
        expected = "ok" if allowed or name in OF_RECORDS else "policy"
        assert hospitals.hello("north") == expected, hospitals.log("north")


def test_the_word_for_exact_counts_is_enough_for_counts(hospitals: Hospitals) -> None:
    """It says itself what they show."""
    hospitals.nodes["north"]["held-out-dir"] = hospitals.nodes["north"]["data-dir"]
    hospitals.settings = PLAIN | OF_MODELS["evaluation"]
    for named, expected in (("survey", "policy"), ("evaluation", "ok")):
        hospitals.policy(POLICY.replace(WORD, "") + f'exact-counts = "{named}"\n', "north")
        assert hospitals.hello("north") == expected
