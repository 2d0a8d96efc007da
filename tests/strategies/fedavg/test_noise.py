"""The noise that the bound assumes is the noise that DP-SGD adds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.fedavg.update import update
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.parameters import flat
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies import fedavg
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import noise_of_update
from tests.strategies.base.test_courses_of_a_run import Kept

CLASSES = tuple("abcdefghij")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedprox"])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_an_update_of_one_record_is_noise_of_the_stated_size(method: str, rate: float) -> None:
    budget = {"epsilon": 0.5, "delta": 1e-5, "classes": ",".join(CLASSES)}
    own = {"fedavg.rounds": 2, "fedavg.learning-rate": rate, "fedavg.mu": 0.01}
    mu = 0.01 if method == "dp-fedprox" else 0.0
    run = parse_run({"method": method} | budget | own)
    records = LabelledFeatures(torch.ones(1, 64), torch.zeros(1, dtype=torch.int64))
    site = SiteFeatures(records, records, CLASSES, "f" * 16, 0.0, True)
    training = Training.begin(run, CLASSES, "f" * 16, 64)
    info = {"round": 1, "lineage": training.lineage, "confirmed": 0}
    job = Job(run, NodeConfig(), "site", site, payload=training.payload(), info=info)
    noise = flat(unpack_parameters(update(job).payload).tensors)
    # 650 numbers: the deviation is known to 3 %.
    expected = noise_of_update(
        run.settings.fedavg, run.mechanism, mu, run.settings.fedavg.rate(private=True)
    )
    assert float(noise.std()) == pytest.approx(expected, rel=0.15)


CLAIM = SimpleNamespace(clip=0.7, noise_multiplier=1.9)


@pytest.mark.parametrize(
    ("own", "mu", "linear"),
    [
        ({"method": "fedavg"}, 0.0, 0.0),
        ({"method": "fedprox", "fedavg.mu": 0.3}, 0.3, 0.0),
        ({"method": "fedavg", "task": "regression", "target-range": "0,1"}, 0.0, 0.3),
    ],
)
@pytest.mark.parametrize("claim", [None, CLAIM])
def test_updates_are_defended_with_the_noise_of_their_steps(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], mu: float, linear: float, claim: Any
) -> None:
    run = parse_run({"max-share": 2.5, "defence": "screen"} | own)
    strategy, asked = fedavg.Updates(run, Kept()), list[Any]()
    names = ("settings", "plan", "objective", "defence")
    config: Any = SimpleNamespace(mechanism=claim, **{name: getattr(run, name) for name in names})
    strategy.config = config

    def defended(*given: Any) -> str:
        asked.append(given)
        return "defended"

    monkeypatch.setattr(fedavg, "defend_updates", defended)
    replies: Any = [object()]
    training: Any = object()
    assert strategy.defend(training, replies) == "defended"
    # The rate of a linear model's private step, or of that target's.
    noise = noise_of_update(run.settings.fedavg, claim, mu, linear or 3.0)
    assert asked == [(replies, "screen", 2.5, pytest.approx(noise))]
    assert (noise > 0) == (claim is not None)


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_every_step_shrinks_the_noise_of_those_before_it(mu: float, rate: float) -> None:
    own, variance = parse_run({"method": "fedavg"}).settings.fedavg, 0.0
    for _ in range(own.private_steps):
        variance *= (1 - rate * mu) ** 2
        variance += (rate * 0.7 * 1.9 / own.batch_size) ** 2
    assert own.private_steps > 1
    claim: Any = CLAIM
    assert noise_of_update(own, claim, mu, rate) == pytest.approx(variance**0.5)
    assert noise_of_update(own, None, mu, rate) == 0
