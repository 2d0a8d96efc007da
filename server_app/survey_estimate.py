"""An estimate of the accuracy that a private run could reach, from a survey's noisy numbers of
records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_own_mean, with_noise
from fedsurrogate.common.privacy.mechanism import SUMS, NoisySums
from fedsurrogate.common.privacy.own_mean import ALL, KEPT, OwnParts, stated
from fedsurrogate.common.privacy.shares import budget_shares
from fedsurrogate.common.settings.features import FEWEST_MAPPED
from fedsurrogate.common.signed_models.run_folders import settings_of_run
from fedsurrogate.common.surrogates.class_sums import Sums, statistics
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.server_app.runs.reader import read_payloads
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums

EPSILONS, DELTA = (1.0, 2.0, 4.0), 1e-5
# Draws of the noise; records in the pool of features, and at most at one site.
DRAWS, POOL, MOST_RECORDS = 3, 4000, 20_000
FAMILY, RANK = "lowrank", 16


@dataclass(frozen=True, eq=False)
class LabelledSource:
    """Features of all classes to draw records from.

    Attributes:
        x: features, (n, d).
        y: labels, (n,).
        classes: their number.
        how: where they come from, in words.
    """

    x: Tensor
    y: Tensor
    classes: int
    how: str


def features_with(classes: int, dimension: int, expected: float, seed: int = 0) -> LabelledSource:
    """Gaussian classes around random directions.

    Args:
        classes: their number.
        dimension: of the features.
        expected: the share that the true centres classify rightly; it decides the distance of the
            classes.
        seed: of the directions and the features.

    Returns:
        The features.

    Example:
        >>> source = features_with(classes=2, dimension=3, expected=0.9)
        >>> tuple(source.x.shape), source.y[:4].tolist()
        ((4000, 3), [0, 1, 0, 1])
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(
        torch.randn(classes, dimension, generator=generator), dim=1
    )
    y = torch.arange(POOL) % classes
    noise = torch.randn(POOL, dimension, generator=generator)

    def reached(distance: float) -> float:
        points, means = distance * centres[y] + noise, distance * centres
        scores = points @ means.T - means.square().sum(1) / 2
        return float((scores.argmax(1) == y).double().mean())

    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < expected else (low, middle)
    how = (
        f"random Gaussian classes in {dimension} dimensions, at a distance at which {expected:.0%} "
        "is reached without noise (--expected, --dimension; better: --like RUN)"
    )
    return LabelledSource(high * centres[y] + noise, y, classes, how)


def features_like(run: Path, classes: Sequence[str]) -> LabelledSource:
    """Synthetic features drawn from the surrogates of an earlier run.

    Args:
        run: its run folder.
        classes: names of the classes, in the order of the labels.

    Returns:
        The features.

    Raises:
        RunError: the surrogates lack one of the classes, or there are none to draw features from.
    """
    config = settings_of_run(run)
    strategy = stored_strategy(config)(config, Unrecorded(), pick_device("cpu"))
    stored = [strategy.unpack(payload) for payload in read_payloads(run)]
    learned = strategy.learn(strategy.in_one_frame(stored), config.settings.classes)
    known = learned.model.header.classes
    if learned.source is None or (missing := sorted(set(classes) - set(known))):
        lacking = (
            "it stored no surrogates to draw features from"
            if learned.source is None
            else f"it lacks {missing[0]!r}"
        )
        raise RunError(f"--like {run}: {lacking}; name another run, or leave it out")
    x, y = learned.source.sample(0, POOL)
    index = torch.tensor([list(classes).index(name) if name in classes else -1 for name in known])[
        y
    ]
    kept = index >= 0
    return LabelledSource(
        x[kept].float(),
        index[kept],
        len(classes),
        f"features drawn from the surrogates of {run.name}",
    )


def estimate_of(survey: Mapping[str, Any], source: LabelledSource) -> dict[str, Any]:
    """As `estimate`, from the result of a survey. A secure sum shows no site's records: there, all
    sites have as many.

    Args:
        survey: the result.
        source: features to draw records from.

    Returns:
        As from `estimate`.
    """
    if "per_site" in survey:
        return estimate(list(survey["per_site"].values()), source)
    sites = survey["sites"]
    each = [round(row["value"] / sites) for row in survey["classes"].values()]
    result = estimate([each] * sites, source)
    return result | {
        "how": f"{result['how']}; the records are divided evenly, because a secure sum shows no "
        "site's"
    }


def estimate(
    counts: Sequence[Sequence[int]], source: LabelledSource, seed: int = 0
) -> dict[str, Any]:
    """Accuracy at each epsilon: the sites of a survey are simulated with as many records of each
    class as it counted.

    Each simulated site releases noisy class sums as `fedpft` does, the coordinator learns from
    them, and the head is tested on features that no site has. No site's data are used beyond the
    counts.

    Args:
        counts: records of each site and class, noisy, (S, C).
        source: features to draw records from.
        seed: of the order of the features and of the draws of records.

    Returns:
        "accuracy": by epsilon, the mean over a few draws of the noise, in [0, 1]. "how": how it was
        estimated, in words.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(source.y), generator=generator)
    x, y = source.x[order].double(), source.y[order]
    x = clip(weigh_own_mean(x, _weight(x)), 0.0)[0]
    test = torch.arange(len(y)) < len(y) // 4
    pools = [(~test & (y == label)).nonzero().flatten() for label in range(source.classes)]
    sites = []
    for each in counts:
        scale = min(1.0, MOST_RECORDS / max(1, sum(max(0, n) for n in each)))
        drawn = [
            pool[torch.randint(len(pool), (round(max(0, n) * scale),), generator=generator)]
            for n, pool in zip(each, pools, strict=True)
            if len(pool)
        ]
        rows = torch.cat(drawn)
        sites.append((x[rows], y[rows]))
    accuracies = {}
    for epsilon in EPSILONS:
        shares = [
            _accuracy(sites, epsilon, source.classes, (x[test], y[test])) for _ in range(DRAWS)
        ]
        accuracies[f"{epsilon:g}"] = sum(shares) / DRAWS
    how = (
        f"estimated by simulating fedpft with noisy class sums at delta {DELTA:g}, as many records "
        f"as the survey found, and {source.how}; real features may be easier or harder"
    )
    return {"accuracy": accuracies, "how": how}


def _weight(features: Tensor) -> OwnParts:
    return KEPT if features.shape[1] >= FEWEST_MAPPED else ALL


def _accuracy(
    sites: Sequence[tuple[Tensor, Tensor]],
    epsilon: float,
    classes: int,
    test: tuple[Tensor, Tensor],
) -> float:
    names = tuple(map(str, range(classes)))
    claim = NoisySums(SUMS, epsilon, DELTA, partial(budget_shares, FAMILY)).mechanism()
    claim = claim.of("record", stated(_weight(sites[0][0])))
    surrogates = []
    for number, (x, y) in enumerate(sites):
        released = with_noise(statistics(x, y, torch.ones(len(y)), classes, FAMILY), claim)
        header = Header("fedpft", "", str(number), "features", names)
        surrogates.append(SumsSurrogate(header, Sums.of(released), claim))
    try:
        head, _ = learn_from_sums(surrogates, FAMILY, RANK)
    except RunError:
        # No class stands out from the noise: a guess.
        return 1 / classes
    right, tested = head.accuracy(test[0].float(), names, test[1])
    return right / tested
