"""Survival runs in rounds without messages: sites and the coordinator's steps, called directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.targets.residual_steps import ResidualSteps

Site = tuple[Any, Any]


def hospitals(sizes: Sequence[int], seed: int = 0, effect: float = 1.0) -> list[Site]:
    """Features (n, 4) and times with events (n, 2) of each site."""
    draw = np.random.default_rng(seed)
    sites = []
    for size in sizes:
        x = draw.normal(size=(size, 4)) * [1, 2, 0.5, 1] + [1, 0, 3, -2]
        signal = effect * (x[:, 0] - 0.5 * x[:, 1] - 1)
        time, seen = draw.exponential(2 * np.exp(-signal)), draw.uniform(0.5, 4, size)
        sites.append((x, np.stack([np.minimum(time, seen), time <= seen], 1)))
    return sites


def job_of(
    run: Run, site: Site, model: Tensors, number: int, least: int = 1, name: str = "north"
) -> Job:
    """A request to a site.

    Args:
        run: of the request.
        site: features and values.
        model: that the coordinator sends.
        number: of the round.
        least: records that the site's policy asks for.
        name: of the site.
    """
    assert run.target is not None
    x, y = (torch.as_tensor(np.asarray(part, dtype=float)) for part in site)
    labels = torch.zeros(len(x), dtype=torch.int64)
    train = LabelledFeatures(x.float(), labels, values=y)
    empty = LabelledFeatures(x[:0].float(), labels[:0])
    features = SiteFeatures(train, empty, run.target.rows, "f" * 16, 0.0, simulated=False)
    header = Header("fedpft", run.digest, "coordinator", "f" * 16, run.target.rows)
    payload = pack_parameters(Parameters(header, number, model))
    limits = SiteLimits(smallest_class=least, smallest_cell=least)
    return Job(
        run, NodeConfig(site=name), name, features, limits, payload=payload, info={"round": number}
    )


def released(job: Job) -> Parameters:
    """A site's message."""
    made: MethodOutput = load(job.run.plan.combination.site)(job)
    return unpack_parameters(made.payload)


def begun(run: Run, dimension: int) -> Training:
    """The coordinator's state before the first round."""
    assert run.target is not None
    return Training.begin(run, run.target.rows, "f" * 16, dimension)


def done(run: Run, rounds: Sequence[Sequence[Site]], least: int = 1) -> Training:
    """A run over the sites that reply in each round, by the code of both sides."""
    training = begun(run, np.asarray(rounds[0][0][0]).shape[1])
    steps = ResidualSteps(run)
    for number, sites in enumerate(rounds, 1):
        replies = [released(job_of(run, site, training.model, number, least)) for site in sites]
        for reply in replies:
            steps.check(reply)
        steps.absorb(training, *steps.pooled(replies, [1.0] * len(replies)))
        training.finish_round(())
    return training


def whole(sites: Sequence[Site]) -> tuple[Tensor, Tensor]:
    """The records of all sites together."""
    x, y = (np.concatenate([np.asarray(site[part]) for site in sites]) for part in (0, 1))
    return torch.from_numpy(x).double(), torch.from_numpy(y).double()
