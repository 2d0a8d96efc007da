"""DP-FedAvg with distributed noise: sums of clipped gradients plus noise of the right size, the
coordinator's step, and runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import site_variances
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import BIAS, MOMENTUM, absorb_total
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.totals import unpack_total

CLASSES = ",".join(map(str, range(10)))
DISTRIBUTED: dict[str, Any] = {
    **{
        "method": "dp-fedavg",
        "classes": CLASSES,
        "secure-aggregation": True,
        "colluding": 0.0,
        "dropouts": 0.2,
    },
    **{"epsilon": 4.0, "delta": 1e-5, "fedavg.rounds": 3},
}


def test_the_sum_is_the_plain_sum_and_noise_of_the_right_variance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact: list[np.ndarray] = []
    noise: list[np.ndarray] = []
    encode, noise_of_site = masked.sum_rules.numbers_of, masked.protocol.noise_of_site

    def keep(*given: Any) -> Any:
        found = noise_of_site(*given)
        noise.append(np.concatenate([found["records"], found["gradients"]]))
        return found

    def kept_mask(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        exact.append(values - noise[-1])
        return mask(state, delivered, rules, values)

    mask = masked.protocol.mask
    monkeypatch.setattr(masked.protocol, "noise_of_site", keep)
    monkeypatch.setattr(masked.protocol, "mask", kept_mask)
    settings = DISTRIBUTED | {"colluding": 0.34, "fedavg.rounds": 2}
    folder = run_federation(tmp_path, sites(5), **settings)
    _, names, numbers, claim = unpack_total((folder / "sum.pb").read_bytes())
    assert len(names) == 5
    assert len(exact) == 10
    assert (numbers == words(sum(exact[5:]) + sum(noise[5:]))).all()
    config = parse_run(settings)
    fixed = encode(config.plan, config.settings, 5)
    records = fixed["records"].decode(words(sum(exact[5:])))[0]
    assert float(records) == pytest.approx(1438, abs=1), "all training records of the digits"
    assert claim is not None
    shapes, rules = (
        shapes_of(config.plan, len(CLASSES.split(",")), 64),
        rules_of(config.settings, 5),
    )
    assert rules.honest == 3
    variances = site_variances(claim, fixed, shapes, rules)
    # Two rounds of five sites; the honest three alone have the noise that the claim names.
    drawn = np.stack(noise)[:, 1:].astype(float)
    statistic = float((drawn**2).sum()) / variances["gradients"]
    assert 1e-6 < stats.chi2.cdf(statistic, drawn.size) < 1 - 1e-6
    sigma, bound = claim.noise["gradients"]
    assert (
        rules.honest * variances["gradients"] * fixed["gradients"].step ** 2 >= (sigma / bound) ** 2
    )


def test_the_coordinator_takes_steps_with_momentum_along_the_mean_clipped_gradient() -> None:
    config = parse_run(
        DISTRIBUTED | {"classes": "a,b,c", "fedavg.clip": 0.7, "fedavg.learning-rate": 2.0}
    )
    claim = config.mechanism
    training = Training.begin(config, ("a", "b", "c"), "f", 4)
    header = Header("dp-fedavg", "r", "coordinator", "f", ("a", "b", "c"))
    generator, expected, velocity = (
        torch.Generator().manual_seed(0),
        dict(training.model),
        {"weight": 0.0, "bias": 0.0},
    )
    counted = []
    for number in range(3):
        bias, weight = (
            torch.randn(3, generator=generator).double(),
            torch.randn(3, 4, generator=generator).double(),
        )
        counted.append(50.0 + 10 * number)
        tensors = {
            "records": torch.tensor([counted[-1]]),
            "gradients": torch.cat([bias, weight.flatten()]),
        }
        absorb_total(
            Total(header, tensors, {"records": 1.0, "gradients": 1.0}, claim), training, ["1", "2"]
        )
        mean = sum(counted) / len(counted)
        for name, gradient, slower in (("weight", weight, 1.0), ("bias", bias, BIAS)):
            velocity[name] = MOMENTUM * velocity[name] + 0.7 * gradient / mean
            expected[name] = expected[name] - 2.0 * slower * velocity[name]
    for name in ("weight", "bias"):
        assert torch.allclose(training.model[name], expected[name].float(), atol=1e-6)
    assert training.round == 3


def test_a_number_of_records_below_its_noise_is_not_divided_by() -> None:
    config = parse_run(DISTRIBUTED | {"classes": "a,b"})
    training = Training.begin(config, ("a", "b"), "f", 4)
    tensors = {"records": torch.tensor([-30.0]), "gradients": torch.ones(10).double()}
    total = Total(training.header(), tensors, {"records": 40.0, "gradients": 1.0}, config.mechanism)
    absorb_total(total, training, ["1", "2"])
    assert torch.allclose(
        training.model["weight"],
        torch.full((2, 4), -config.settings.fedavg.distributed_rate(2) / 40),
    )


def test_a_site_lost_in_one_round_takes_part_in_the_next(tmp_path: Path) -> None:
    """Sums with distributed noise may be over any sites: each is charged."""
    calls: list[int] = []

    def second_broken(payload: bytes) -> bytes:
        calls.append(len(payload))
        return b"\x0a\x03abc" if len(calls) == 2 else payload

    grid = InProcessGrid(sites(5), {4: Fault(kind="query.sum_shares", payload=second_broken)})
    folder = run_federation(tmp_path, grid, **DISTRIBUTED)
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [5, 4, 5]
    assert [e["site"] for e in events_of(folder) if e["event"] == "rejected"] == ["4"]


def test_a_modulus_without_room_for_the_noise_is_refused_before_any_vector(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(4))
    tiny = {"epsilon": 0.001, "secure-aggregation-records": 1, "fedavg.rounds": 50}
    with pytest.raises(
        RunError,
        match="secure-aggregation-records: the noise on records does not fit into the modulus",
    ):
        run_federation(tmp_path, grid, **DISTRIBUTED | tiny)
    assert not grid.asked("query.sum_shares")
    config = parse_run(DISTRIBUTED | tiny)
    claim = config.mechanism
    assert claim is not None
    shapes = shapes_of(config.plan, len(CLASSES.split(",")), 64)
    with pytest.raises(ConfigError, match="does not fit into the modulus"):
        site_variances(
            claim, numbers_of(config.plan, config.settings, 4), shapes, rules_of(config.settings, 4)
        )


def test_only_dp_fedavg_in_a_secure_aggregation_has_distributed_noise() -> None:
    distributed = parse_run(DISTRIBUTED)
    assert distributed.plan.mechanism_name == "secure-aggregation"
    assert [each.name for each in distributed.plan.messages.sends] == ["records", "gradients"]
    for settings in (
        {"fedavg.noise": "site"},
        {"secure-aggregation": False},
        {"method": "dp-fedprox"},
    ):
        assert parse_run(DISTRIBUTED | settings).plan.mechanism_name == "dp-sgd"


def test_rounds_follow_the_noise_where_the_settings_name_none() -> None:
    usual = {"fedavg.rounds": 0}
    found = [
        parse_run(DISTRIBUTED | usual | {"epsilon": epsilon}).settings.fedavg.rounds
        for epsilon in (1.0, 2.0)
    ]
    assert found == [20, 30]
    assert parse_run(DISTRIBUTED | usual | {"fedavg.noise": "site"}).settings.fedavg.rounds == 10
    assert parse_run({"method": "fedavg"}).settings.fedavg.rounds == 10


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("common", [0.0, 3.0, 30.0])
def test_the_usual_rate_does_not_diverge_however_alike_features_are(
    classes: int, common: float
) -> None:
    """The larger the part that all features share, the larger the curvature along it."""
    names = tuple(map(str, range(classes)))
    config = parse_run(DISTRIBUTED | {"classes": ",".join(names), "fedavg.rounds": 30})
    training, generator = Training.begin(config, names, "f", 20), torch.Generator().manual_seed(0)
    labels = torch.arange(400) % classes
    apart = torch.eye(classes, 20)[labels] + 0.3 * torch.randn(400, 20, generator=generator)
    features = torch.nn.functional.normalize(apart + common)
    losses = []
    for _ in range(30):
        given = {name: tensor.clone().requires_grad_() for name, tensor in training.model.items()}
        loss = torch.nn.functional.cross_entropy(
            features @ given["weight"].T + given["bias"], labels, reduction="sum"
        )
        bias, weight = torch.autograd.grad(loss, [given["bias"], given["weight"]])
        tensors = {
            "records": torch.tensor([400.0]),
            "gradients": torch.cat([bias, weight.flatten()]).double(),
        }
        # These gradients are not shortened to the clip; the noise leaves room for longer ones.
        sigmas = {"records": 1.0, "gradients": 1000.0}
        absorb_total(
            Total(training.header(), tensors, sigmas, config.mechanism), training, ["1", "2"]
        )
        losses.append(float(loss) / 400)
    assert losses[-1] < losses[0]
    assert max(losses) < 1.5 * losses[0]
