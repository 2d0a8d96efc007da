"""A site's update in a round, compared with plain training, with micro-batches, and between
methods.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.methods.fedavg import update as scaffold
from fedsurrogate.client_app.methods.fedavg.update import update, weighted_update
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.local_training import network, step_length, train
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.networks import linear
from fedsurrogate.common.models.parameters import CONTROL, split_control
from fedsurrogate.common.privacy.exact_sums import ExactSum
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import absorb, with_memory

CLASSES = ("a", "b", "c")


def data(count: int = 120, dimension: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    return torch.rand(count, dimension, generator=generator) + torch.eye(3, dimension)[
        labels
    ], labels


def job(folder: Path, run: Run, training: Training) -> Job:
    features, labels = data()
    records = LabelledFeatures(features, labels)
    node = NodeConfig(state_dir=str(folder))
    found = SiteFeatures(records, records, CLASSES, "f", 0.0, simulated=False)
    reported = {
        "round": training.round + 1,
        "lineage": training.lineage,
        "confirmed": training.round,
    }
    return Job(run, node, "s", found, payload=training.payload(), info=reported)


def run(method: str, **settings: Any) -> Run:
    return parse_run(
        {"method": method, "fedavg.local-epochs": 2, "fedavg.batch-size": 32} | settings
    )


def moved(folder: Path, config: Run) -> dict[str, Tensor]:
    training = with_memory(Training.begin(config, CLASSES, "f", 16))
    asked = job(folder, config, training)
    return dict(unpack_parameters(site_function(config.plan.combination)(asked).payload).tensors)


# Steps of a deep network amplify the rounding of earlier rounds.
@pytest.mark.parametrize(("kind", "rounds"), [("linear", 3), ("convnet", 1)])
def test_over_the_wire_one_site_stays_within_half_precision_of_plain_training(
    tmp_path: Path, kind: Any, rounds: int
) -> None:
    config = run("fedavg", **{"fedavg.model": kind, "fedavg.width": 4})
    training = with_memory(Training.begin(config, CLASSES, "f", 16))
    plain = network(kind, 16, 3, training.model)
    rate = step_length(kind, config.settings.fedavg, data()[0])
    for _ in range(rounds):
        asked = job(tmp_path, config, training)
        train(
            plain,
            *data(),
            config.settings.fedavg,
            rate,
            stream(config.settings.seed, asked.site, asked.round),
        )
        absorb(
            training, [unpack_parameters(site_function(config.plan.combination)(asked).payload)], 1
        )
    for name, parameter in plain.named_parameters():
        assert torch.allclose(
            training.model[name], parameter, atol=5e-3 * float(parameter.abs().max())
        )


def test_fedprox_without_mu_is_fedavg_and_with_it_stays_closer(tmp_path: Path) -> None:
    rate = {"fedavg.learning-rate": 1.0}
    plain = moved(tmp_path, run("fedavg", **rate))
    none, some = (moved(tmp_path, run("fedprox", **{"fedavg.mu": mu}, **rate)) for mu in (0.0, 0.5))
    for name, tensor in plain.items():
        assert torch.equal(none[name], tensor)
    assert float(some["weight"].norm()) < float(plain["weight"].norm())


def test_scaffold_with_zero_control_variates_is_fedavg(tmp_path: Path) -> None:
    plain, with_control = moved(tmp_path, run("fedavg")), moved(tmp_path, run("scaffold"))
    own, control = split_control(with_control)
    assert own.keys() == plain.keys() == control.keys()
    for name, tensor in plain.items():
        assert torch.equal(own[name], tensor)


def test_scaffolds_control_variate_is_the_mean_gradient_and_lasts_on_the_sites_disk(
    tmp_path: Path,
) -> None:
    config = run("scaffold", **{"fedavg.local-epochs": 1, "fedavg.batch-size": 200})
    training = with_memory(Training.begin(config, CLASSES, "f", 16))
    first = job(tmp_path, config, training)
    answer = unpack_parameters(site_function(config.plan.combination)(first).payload)
    module = linear(16, 3)
    torch.nn.functional.cross_entropy(module(data()[0]), data()[1]).backward()  # type: ignore[no-untyped-call]
    _, control = split_control(answer.tensors)
    assert module.weight.grad is not None
    assert torch.allclose(control["weight"], module.weight.grad, atol=1e-3)
    kept = scaffold.read_control(first.state, 1, training.model)
    assert torch.allclose(kept["weight"], module.weight.grad, atol=1e-5)
    absorb(training, [answer], 1)
    # With one site, c equals c_i: the correction is zero, and the second round equals FedAvg's.
    second = unpack_parameters(
        site_function(config.plan.combination)(job(tmp_path, config, training)).payload
    )
    own, _ = split_control(second.tensors)
    moving = network("linear", 16, 3, training.model)
    rate = step_length("linear", config.settings.fedavg, data()[0])
    train(moving, *data(), config.settings.fedavg, rate, torch.Generator().manual_seed(0))
    assert torch.allclose(
        own["weight"], moving.weight.detach() - training.model["weight"], atol=5e-3
    )


def test_scaffold_steps_along_the_gradient_plus_the_common_variate_less_its_own(
    tmp_path: Path,
) -> None:
    """Karimireddy et al. 2020, algorithm 1: y - x = -rate (g + c - c_i), and c_i+ = c_i - c + (x -
    y) / rate = g.
    """
    config = run("scaffold", **{"fedavg.local-epochs": 1, "fedavg.batch-size": 200})
    training = with_memory(Training.begin(config, CLASSES, "f", 16))
    absorb(
        training,
        [
            unpack_parameters(
                site_function(config.plan.combination)(job(tmp_path, config, training)).payload
            )
        ],
        1,
    )
    generator, shape = torch.Generator().manual_seed(7), training.model["weight"].shape
    own, common = (
        {
            "weight": torch.randn(shape, generator=generator),
            "bias": torch.randn(3, generator=generator),
        }
        for _ in range(2)
    )
    asked = job(tmp_path, config, training)
    scaffold.write_control(asked.state, 1, own)
    model = unpack_parameters(training.payload())
    tensors = {**training.model, **{CONTROL + name: tensor for name, tensor in common.items()}}
    answer = site_function(config.plan.combination)(
        replace(asked, payload=pack_parameters(replace(model, tensors=tensors)))
    )
    moved, control = split_control(unpack_parameters(answer.payload).tensors)
    module = network("linear", 16, 3, training.model)
    torch.nn.functional.cross_entropy(module(data()[0]), data()[1]).backward()  # type: ignore[no-untyped-call]
    rate = step_length("linear", config.settings.fedavg, data()[0])
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(
            moved[name], -rate * (parameter.grad + common[name] - own[name]), atol=0.02 * rate
        )
        assert torch.allclose(control[name], parameter.grad - own[name], atol=0.02)


def test_fedsgd_takes_one_step_and_dsfl_sends_the_largest_half(tmp_path: Path) -> None:
    assert float(moved(tmp_path, run("fedsgd"))["weight"].norm()) < float(
        moved(tmp_path, run("fedavg"))["weight"].norm()
    )
    sparse = moved(tmp_path, run("dsfl", **{"fedavg.keep": 0.25}))
    assert sum(int((tensor != 0).sum()) for tensor in sparse.values()) == round(0.25 * (16 * 3 + 3))


DISTRIBUTED: dict[str, Any] = {
    "secure-aggregation": True,
    "classes": "a,b,c",
    "epsilon": 2.0,
    "delta": 1e-5,
    "fedavg.clip": 0.5,
}


def summed(folder: Path, kind: str, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What a site adds to a round with distributed noise, before the noise; at a model that is not zero."""
    config = run("dp-fedavg", **DISTRIBUTED, **{"fedavg.model": kind, "fedavg.width": 4})
    training = Training.begin(config, CLASSES, "f", 16)
    generator = torch.Generator().manual_seed(1)
    training.model = {
        name: torch.randn(t.shape, generator=generator) for name, t in training.model.items()
    }
    records = LabelledFeatures(features, labels)
    asked = job(folder, config, training)
    made = weighted_update(replace(asked, found=replace(asked.found, train=records)))
    found, claim = made.values, made.claim
    assert claim == config.mechanism
    # As received, in half precision.
    module = network(
        config.settings.fedavg.kind, 16, 3, unpack_parameters(training.payload()).tensors
    )
    if kind == "linear":
        features = torch.nn.functional.normalize(features)
    sums = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for row in range(len(labels)):
        loss = torch.nn.functional.cross_entropy(
            module(features[row : row + 1]), labels[row : row + 1]
        )
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        for name, gradient in zip(sums, gradients, strict=True):
            sums[name] += gradient * min(1.0, 0.5 / norm) / 0.5
    found["expected"] = torch.cat([sums[name].flatten() for name in sorted(sums)])
    return found


@pytest.mark.parametrize("kind", ["linear", "mlp", "convnet"])
def test_gradients_for_distributed_noise_are_those_of_records_one_by_one(
    tmp_path: Path, kind: str
) -> None:
    found = summed(tmp_path, kind, *data(40))
    assert torch.allclose(found["gradients"].float(), found["expected"], atol=1e-4)
    assert found["records"].tolist() == [40]


@pytest.mark.parametrize("kind", ["linear", "mlp", "convnet"])
@pytest.mark.parametrize("forgotten", ["", "by the method", "by the mechanism too"])
def test_one_record_moves_the_sums_for_distributed_noise_by_at_most_one(
    tmp_path: Path, kind: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a record far from all others. The mechanism shortens what the method has not; without
    either clip it moves the gradients by more.
    """
    if "mechanism" in forgotten:
        monkeypatch.setattr(ExactSum, "_factors", lambda *arguments: None)
    if forgotten:
        monkeypatch.setattr(
            "fedsurrogate.client_app.methods.dp.record_gradients.clip_factors",
            lambda norms, clip: torch.ones_like(norms),
        )
    features, labels = data(40)
    features[-1] = 1000 * features[-1].flip(0)
    more, fewer = (
        summed(tmp_path, kind, features, labels),
        summed(tmp_path, kind, features[:-1], labels[:-1]),
    )
    moved = {name: float((more[name] - fewer[name]).norm()) for name in ("gradients", "records")}
    assert moved["records"] == 1
    assert (moved["gradients"] <= 1) == ("mechanism" not in forgotten)


def test_with_distributed_noise_a_site_that_protects_patients_adds_patients(tmp_path: Path) -> None:
    config = run("dp-fedavg", **DISTRIBUTED)
    asked = job(tmp_path, config, Training.begin(config, CLASSES, "f", 16))
    patients = replace(asked.found.train, units=("p",) * 100 + ("q",) * 20)
    made = weighted_update(replace(asked, found=replace(asked.found, train=patients)))
    found, claim = made.values, made.claim
    assert claim is not None
    assert claim.unit == "patient"
    assert found["records"].tolist() == [2]
    assert float(found["gradients"].norm()) <= 2


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedprox"])
@pytest.mark.parametrize("unit", ["record", "patient"])
def test_a_private_update_in_a_sum_has_a_public_weight_whatever_the_site_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, unit: str
) -> None:
    """With noise at the site: the weight is a setting, for any number of records, and the update is
    the one that the site would send alone.
    """
    monkeypatch.setattr(
        "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian",
        lambda variance, count: np.full(count, math.isqrt(variance)),
    )
    noise = {"fedavg.noise": "site"} if method == "dp-fedavg" else {}
    config = run(
        method,
        **DISTRIBUTED,
        **noise,
        **{"fedavg.sample-rate": 1.0, "secure-aggregation-records": 700},
    )
    asked = job(tmp_path, config, Training.begin(config, CLASSES, "f", 16))
    for count in (1, 7, 120):
        features, labels = data(count)
        units = None if unit == "record" else ("p",) * count
        part = replace(asked.found.train, features=features, labels=labels, units=units)
        own = replace(asked, found=replace(asked.found, train=part))
        made = weighted_update(own)
        found, claim = made.values, made.claim
        alone = unpack_parameters(update(own).payload)
        planned = config.mechanism_for(unit)
        assert planned is not None
        assert claim == planned
        # A reply does not say the releases of a run.
        assert alone.claim == replace(planned, releases=None)
        assert found["records"].tolist() == [700]
        expected = torch.cat([alone.tensors[name].flatten() for name in sorted(alone.tensors)])
        # A reply has half precision.
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            found["update"].float() / 700, expected, rtol=2e-3, atol=2e-3 * scale
        )
