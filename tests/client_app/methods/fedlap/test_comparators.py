"""DSC, FedDM and PSG: recipes of FedLAP's synthesis, against closed forms and the accountant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.dp.record_gradients import PrivateGradient
from fedsurrogate.client_app.methods.fedlap import approximation
from fedsurrogate.client_app.methods.fedlap.approximation import dsc, feddm, perturbed, psg
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.networks import convnet, parameters_of
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.common.wire.model_proto import unpack_synthetic
from fedsurrogate.strategies.base.training import Training

CLASSES = ("a", "b", "c", "d")
# The site has two of the run's four classes.
LABELS = torch.arange(90) % 2
IMAGES = 3


def run(method: str, **settings: Any) -> Run:
    small: dict[str, Any] = {
        "fedlap.model": "linear",
        "fedlap.images-per-class": IMAGES,
        "fedlap.rounds": 2,
    }
    return parse_run({"method": method} | small | settings)


def features() -> Tensor:
    values = torch.randn(len(LABELS), 64, generator=torch.Generator().manual_seed(5))
    values[:, :32] += 2 * LABELS[:, None]
    return values


def job(folder: Path, config: Run) -> Job:
    records = LabelledFeatures(features(), LABELS, None)
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
    return torch.stack([unit[label == LABELS].mean(0) for label in (0, 1)])


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
def test_methods_that_match_class_by_class_refuse_privacy_and_classes_without_records(
    method: str,
) -> None:
    with pytest.raises(ConfigError, match=r"does not support it; use .*'psg'"):
        run(method, epsilon=4.0, delta=1e-5)
    with pytest.raises(ConfigError, match="matches each class by its own records"):
        run(method, **{"fedlap.labels": "all"})
