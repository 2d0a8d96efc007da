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

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.models.parameters import by_name
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import unmask
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of
from fedsurrogate.common.secure_aggregation.secrets import unpack_words
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.strategies.base.training import Training
from tests.attacks.coordinator.test_secure_aggregation import (
    CLASSES,
    NAMES,
    PLAIN,
    POLICY,
    PRIVATE,
    Hospitals,
    open_hospitals,
)
from tests.grid import confirm

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
    for name in NAMES:
        (hospitals.folder / name / "policy.toml").write_text(
            POLICY.replace(WORD, "") + WORD * allowed
        )
        confirm(hospitals.nodes[name])


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
    training = crafted(hospitals.settings)
    payload, run = training.payload(), parse_run(hospitals.settings)
    members = hospitals.keys()
    listed = surrogate_proto.pack_members(members.values(), surrogate_proto.map_digest(payload))
    dealt, vectors = {}, {}
    for site in NAMES:
        reply, _ = hospitals.ask(site, "query.sum_shares", listed)
        dealt[site] = surrogate_proto.unpack_dealt(reply or b"")
    for site in NAMES:
        delivery = surrogate_proto.pack_delivery(dealt.values(), site, payload)
        reply, _ = hospitals.ask(site, "train", delivery, round=1)
        vectors[site] = unpack_words(pb.MaskedSum.FromString(reply or b"").numbers)
    signatures, revealed = hospitals.signatures(NAMES), {}
    for site in NAMES:
        reply, _ = hospitals.ask(
            site, "query.sum_open", surrogate_proto.pack_list(NAMES, signatures)
        )
        revealed[site] = surrogate_proto.unpack_revealed(reply or b"")
    rules = rules_of(run.settings, len(NAMES))
    total = unmask(vectors, dealt, members, revealed, rules)
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
    hospitals.name = "0" * 32
    if hospitals.status("north", "query.hello") == "ok":
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
    held_out = {"held-out-dir": hospitals.nodes["north"]["data-dir"]}
    hospitals.nodes["north"] = hospitals.nodes["north"] | held_out
    hospitals.settings = PLAIN | (OF_MODELS | OF_RECORDS)[name]
    for allowed in (False, True):
        allow(hospitals, allowed)
        hospitals.name = f"{int(allowed):032x}"
        expected = "ok" if allowed or name in OF_RECORDS else "policy"
        assert hospitals.status("north", "query.hello") == expected, hospitals.log("north")


def test_the_word_for_exact_counts_is_enough_for_counts(hospitals: Hospitals) -> None:
    """It says itself what they show."""
    allow(hospitals, False)
    policy = hospitals.folder / "north" / "policy.toml"
    without = policy.read_text()
    held_out = {"held-out-dir": hospitals.nodes["north"]["data-dir"]}
    hospitals.nodes["north"] = hospitals.nodes["north"] | held_out
    hospitals.settings = PLAIN | OF_MODELS["evaluation"]
    for named, expected in (("survey", "policy"), ("evaluation", "ok")):
        policy.write_text(without + f'exact-counts = "{named}"\n')
        confirm(hospitals.nodes["north"])
        hospitals.name = f"{len(named):032x}"
        assert hospitals.status("north", "query.hello") == expected
