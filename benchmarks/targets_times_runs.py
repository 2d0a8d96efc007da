"""Survival runs with the code of sites and coordinator: one round and two rounds, beside a pooled Cox
model.

Claims: at 5 and at 50 sites all heads rank held-out patients as well as scikit-survival's Cox model of
all records, within .01, and two rounds lose nothing against one; and flchain under privacy.

Messages are packed, checked and unpacked as in a run; requests, masks and the ledger are left out. Cells
are those of secure aggregation, at its steps, since a site with a cell of one record does not send them alone.
Sites are of unequal sizes; 30 % of the records are held out. "Slope" is that of a Cox model of the
held-out scores: one if they are calibrated. Under privacy one site has all records, so the noise is that
of one distributed noise. Cells and noisy sums have `features.ranges` that are taken from the data, where real
ones must be public.
"""

import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._target_data import Timed, timed
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.targets_heads import concordance, pooled_cox
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import numbers_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.surrogate_proto import pack_map
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling.site_weights import Total
from fedsurrogate.strategies.targets.residual_steps import TargetRounds

NAME = "targets-times-runs"
SETS, SITES, SPLITS = ("veterans", "rossi", "whas500", "gbsg2", "aids"), (5, 50), 5
EPSILONS, DELTA, FINGERPRINT = (1.0, 2.0, 4.0, 8.0), 1e-5, "f" * 16
HEADS: dict[str, dict[str, Scalar]] = {
    "cells, 1 round": {
        "time-head": "cells",
        "secure-aggregation": True,
        "secure-aggregation-records": 4000,
    },
    "residuals, 2 rounds": {"time-head": "residuals"},
}
PRIVATE: dict[str, dict[str, Scalar]] = {
    "cells, 1 round, 10 bins that widen": {"time-head": "cells"},
    "cells, 1 round, 5 bins": {"time-head": "cells", "bins": 5},
    "cells, 1 round, 20 bins": {"time-head": "cells", "bins": 20},
    "residuals, 2 rounds, 10 bins that widen": {"time-head": "residuals"},
    "residuals, 2 rounds, 5 bins": {"time-head": "residuals", "bins": 5},
    "residuals, 2 rounds, 20 bins": {"time-head": "residuals", "bins": 20},
}
# Of a trial on few seeds, before these runs were possible: flchain at epsilon 1, 2, 4, 8.
TRIAL = {
    "cells, 1 round, 5 bins": ".783 .789 .792 .794",
    "residuals, 2 rounds, 20 bins": ".785 .791 .794 .795",
}


def jobs_of(run: Run, data: Timed, parts: Sequence[Tensor]) -> list[Job]:
    """A task for each site, with its rows of the data."""
    assert run.target is not None
    values = torch.stack([data.times, data.events], 1)
    tasks = []
    for number, rows in enumerate(parts):
        labels = torch.zeros(len(rows), dtype=torch.int64)
        train = LabelledFeatures(data.features[rows].float(), labels, values=values[rows])
        empty = LabelledFeatures(train.features[:0], labels[:0])
        found = SiteFeatures(train, empty, run.target.rows, FINGERPRINT, 0.0, simulated=True)
        tasks.append(Job(run, NodeConfig(), str(number), found))
    return tasks


def learned(run: Run, data: Timed, parts: Sequence[Tensor]) -> Head:
    """The model of a run."""
    assert run.target is not None
    tasks, combination = jobs_of(run, data, parts), run.plan.combination
    site, dimension = load(combination.site), data.features.shape[1]
    if run.settings.secure_aggregation:
        return summed(run, tasks)
    if run.plan.kind == "one-shot":
        strategy = stored_strategy(run)(run)
        made = strategy.learn([strategy.unpack(site(job).payload) for job in tasks], ())
        assert isinstance(made.model, Head)
        return made.model
    rounds = TargetRounds(run)
    frame = run.public_frame(dimension)
    training = Training.begin(run, run.target.rows, FINGERPRINT, dimension, frame)
    for number in range(1, run.rounds + 1):
        info, payload = {"round": number}, training.payload()
        asked = [replace(job, payload=payload, info=info) for job in tasks]
        replies = [rounds.read(site(job).payload, training) for job in asked]
        rounds.absorb(training, rounds.defend(training, replies).kept)
    head = rounds.classifier(training)
    assert isinstance(head, Head)
    return head


def summed(run: Run, tasks: Sequence[Job]) -> Head:
    """The model from secure aggregation, without its masks."""
    assert run.target is not None
    combination, public = run.plan.combination, PublicMap()
    numbers = numbers_of(run.plan, run.settings, len(tasks))
    made = [
        load(combination.site_sums)(replace(job, payload=pack_map(public))).values for job in tasks
    ]
    header = Header("fedpft", run.digest, "coordinator", FINGERPRINT, run.target.rows)
    tensors = {
        name: numbers[name]
        .decode(words(np.sum([numbers[name].encode(each[name]) for each in made], 0)))
        .reshape(made[0][name].shape)
        for name in made[0]
    }
    rounding = {name: len(tasks) * numbers[name].step / 2 for name in tensors}
    head = load(combination.from_sums)(Total(header, tensors, rounding=rounding), run).model
    assert isinstance(head, Head)
    return head


def dealt(rows: Tensor, sites: int, seed: int) -> list[Tensor]:
    """Rows of each site, of unequal sizes, none empty."""
    draw = np.random.default_rng(seed)
    shares = 0.5 * draw.dirichlet(np.full(sites, 0.3)) + 0.5 / sites
    of = torch.from_numpy(draw.choice(sites, len(rows), p=shares))
    of[:sites] = torch.arange(sites)
    return [rows[of == site] for site in range(sites)]


def ranges_of(features: Tensor) -> str:
    """Ranges of columns, widened by 5 %, for `features.ranges`."""
    low, high = features.min(0).values, features.max(0).values
    middle, half = (low + high) / 2, 1.05 * (high - low) / 2
    ends = zip((middle - half).tolist(), (middle + half).tolist(), strict=True)
    return "; ".join(f"{a:.6g},{b:.6g}" for a, b in ends)


def slope(data: Timed, rows: Tensor, scores: Tensor) -> float:
    """The slope of a Cox model of scores."""
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    pairs = list(zip(data.events[rows].bool().tolist(), data.times[rows].tolist(), strict=True))
    y = np.array(pairs, dtype=[("event", bool), ("time", float)])
    return float(CoxPHSurvivalAnalysis().fit(scores[:, None].numpy(), y).coef_[0])


def split(data: Timed, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that train, and those that are held out."""
    order = torch.randperm(len(data.times), generator=torch.Generator().manual_seed(seed))
    return order[: len(order) * 7 // 10], order[len(order) * 7 // 10 :]


def settings_of(data: Timed, head: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Of a run in which no site is too large, so that all records count."""
    secure = bool(head.get("secure-aggregation"))
    whole: dict[str, Scalar] = {} if secure else {"max-share": 0.0}
    if head["time-head"] == "cells" or "epsilon" in head:
        whole["features.ranges"] = ranges_of(data.features)
    return {"task": "survival", "horizon": float(data.times.max()) * 1.0001, **whole, **head}


def exact_rows(names: Sequence[str], splits: int) -> Iterator[tuple[Any, ...]]:
    """Runs without noise."""
    for name in names:
        data = timed(name)
        pooled = [pooled_cox(data, *split(data, seed)) for seed in range(splits)]
        yield (name, "", "pooled Cox", "", round(statistics.mean(pooled), 4), None, "", splits)
        for sites in SITES:
            for label, head in HEADS.items():
                found = []
                for seed in range(splits):
                    train, rest = split(data, seed)
                    model = learned(
                        parse_run(settings_of(data, head)), data, dealt(train, sites, seed)
                    )
                    scores = model.scores(data.features[rest].float())[:, 0].double()
                    found.append((concordance(data, rest, scores), slope(data, rest, scores)))
                yield _row(name, sites, label, "", found)


def private_rows(splits: int) -> Iterator[tuple[Any, ...]]:
    """flchain with one distributed noise."""
    data = timed("flchain")
    for label, head in PRIVATE.items():
        for epsilon in EPSILONS:
            found = []
            for seed in range(splits):
                train, rest = split(data, seed)
                budget: dict[str, Scalar] = {"epsilon": epsilon, "delta": DELTA}
                run = parse_run(settings_of(data, head | budget))
                scores = learned(run, data, [train]).scores(data.features[rest].float())[:, 0]
                found.append((concordance(data, rest, scores), slope(data, rest, scores.double())))
            yield _row("flchain", 1, label, epsilon, found)


def _row(
    name: str, sites: int, label: str, epsilon: float | str, found: Sequence[tuple[float, float]]
) -> tuple[Any, ...]:
    ranks, slopes = zip(*found, strict=True)
    spread = round(statistics.pstdev(ranks), 4)
    mean = round(statistics.mean(ranks), 4)
    return (
        name,
        sites,
        label,
        epsilon,
        mean,
        round(statistics.median(slopes), 2),
        spread,
        len(found),
    )


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--only", choices=[*SETS, "flchain", "private"], default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = ("set", "sites", "head", "epsilon", "C", "slope", "sd", "splits")
    if options.only == "private":
        rows = list(private_rows(options.splits))
    elif options.only:
        rows = list(exact_rows([options.only], options.splits))
    else:
        rows = [*exact_rows((*SETS, "flchain"), options.splits), *private_rows(options.splits)]
    fresh = {(each[0], bool(each[3])) for each in rows}
    kept = kept_rows(NAME, lambda old: (old[0], bool(old[3])) in fresh)
    report(NAME, "survival runs", columns, [*kept, *rows], trial=TRIAL)


if __name__ == "__main__":
    main()
