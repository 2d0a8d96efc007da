"""Runs that count (an evaluation of a run's model, a survey of the sites' records): their settings,
and the accuracy that a survey lets expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.files import read_json
from fedsurrogate.common.image_histograms import HISTOGRAMS
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns, with_noise
from fedsurrogate.common.privacy.mechanism import SUMS, NoisySums
from fedsurrogate.common.privacy.shares import ALL, KEPT, OwnParts, budget_shares, stated
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.settings.heads import FEWEST_MAPPED
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    feature_settings,
    is_simulated,
    read_signed_model,
    settings_of_run,
)
from fedsurrogate.common.surrogates.class_sums import Sums, statistics
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.common.targets.metrics import facts_of
from fedsurrogate.common.targets.target import Facts
from fedsurrogate.strategies.counting.strategy import payload_of, read_model
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums

from .refit import learned_again
from .runs.state import as_number, at

EPSILONS, DELTA = (1.0, 2.0, 4.0), 1e-5
# Draws of the noise; records in the pool of features, and at most at one site.
DRAWS, POOL, MOST_RECORDS = 3, 4000, 20_000
FAMILY, RANK = "lowrank", 16


# Features of all classes to draw records from, (n, d), their labels (n,), and where they come from, in words.
LabelledSource = tuple[Tensor, Tensor, str]


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
        >>> tuple(source[0].shape), source[1][:4].tolist()
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
    return high * centres[y] + noise, y, how


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
    learned = learned_again(run)
    known = learned.model.header.classes
    if learned.source is None or (missing := sorted(set(classes) - set(known))):
        lacking = (
            "it stored no surrogates to draw features from"
            if learned.source is None
            else f"it lacks {missing[0]!r}"
        )
        raise RunError(f"--like {run}: {lacking}; name another run, or leave it out")
    x, y = learned.source(0, POOL)
    index = torch.tensor([list(classes).index(name) if name in classes else -1 for name in known])[
        y
    ]
    kept = index >= 0
    return x[kept].float(), index[kept], f"features drawn from the surrogates of {run.name}"


def estimate_of(survey: Mapping[str, Any], source: LabelledSource) -> dict[str, Any]:
    """As `estimate`, from the result of a survey. Secure aggregation shows no site's records: there, all
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
        "how": f"{result['how']}; the records are divided evenly, because secure aggregation shows no "
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
    order = torch.randperm(len(source[1]), generator=generator)
    (x, y), classes = (each[order] for each in source[:2]), len(counts[0])
    x = x.double()
    x = clip(weigh_mean_over_columns(x, _weight(x)), 0.0)[0]
    test = torch.arange(len(y)) < len(y) // 4
    pools = [(~test & (y == label)).nonzero().flatten() for label in range(classes)]
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
        shares = [_accuracy(sites, epsilon, classes, (x[test], y[test])) for _ in range(DRAWS)]
        accuracies[f"{epsilon:g}"] = sum(shares) / DRAWS
    how = (
        f"estimated by simulating fedpft with noisy class sums at delta {DELTA:g}, as many records "
        f"as the survey found, and {source[2]}; real features may be easier or harder"
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


# Of a simulated run, the settings that decide which records its sites have.
RECORDS = (
    *("data", "data-dir", "dataset", "label-column", "patient-column", "bag-column"),
    *("site-column", "weights-path", "partition", "alpha", "classes-per-site"),
)

# Of a target, the settings that decide how a model is learned, and may need a budget.
HOW_LEARNED = ("time-head",)
# Errors beyond so many deviations that a model states count as these.
FOUR = 4.0


def counting_budget(
    epsilon: float, delta: float, secure_aggregation: bool = False
) -> dict[str, Scalar]:
    """The budget of a run that counts, as settings of the run.

    Args:
        epsilon: of all counts; zero for counts without noise.
        delta: of all counts; it does not matter without epsilon.
        secure_aggregation: whether the coordinator sees only the sum over all sites.

    Example:
        >>> counting_budget(1.0, 1e-5, secure_aggregation=True)
        {'epsilon': 1.0, 'delta': 1e-05, 'secure-aggregation': True}
    """
    budget: dict[str, Scalar] = {"epsilon": epsilon, "delta": delta if epsilon else 0.0}
    return budget | ({"secure-aggregation": True} if secure_aggregation else {})


def evaluation_settings(
    source: Path, budget: Mapping[str, Scalar]
) -> tuple[dict[str, Scalar], int]:
    """Settings of an evaluation of a model. Features are computed as for the run that learned it.

    Args:
        source: a run folder, or a signed model file.
        budget: of `counting_budget`.

    Returns:
        The settings, flat; and the number of sites of a simulated run, else zero.

    Raises:
        RunError: the folder is no run folder.
        ConfigError: `source` is neither, or the name of a class has a comma.
    """
    source, simulated, more = source.expanduser(), 0, dict[str, Scalar]()
    if source.is_dir():
        signed = source / f"model{SUFFIX}"
        file = signed if signed.is_file() else source / "model.safetensors"
        config = settings_of_run(source)
        features = feature_settings(config.settings, config.power, config.target)
        if is_simulated(source):
            kept = config.settings.model_dump(by_alias=True, mode="json")
            more = {
                key: ",".join(kept[key]) if isinstance(kept[key], list) else kept[key]
                for key in RECORDS
            }
            simulated = int(
                as_number(at(read_json(source, "metrics.json"), "sites", "invited")) or 0
            )
    elif source.is_file():
        file, features = source, read_signed_model(source).manifest.settings
    else:
        raise ConfigError(
            f"{str(source)!r} is neither a run folder nor a model file; name one of them"
        )
    model = read_model(file)
    digest = payload_of(model)[1]
    counting = {
        "counting.kind": "evaluation",
        "counting.model": str(file.absolute()),
        "counting.digest": digest,
    }
    # The settings of features name what a model of another target answers.
    named = (
        {"counting.largest-error": largest_error(facts_of(target))}
        if (target := target_of_model(model))
        else _named(model.header.classes)
    )
    features = {key: value for key, value in features.items() if key not in HOW_LEARNED}
    return {**features, **more, **named, **counting, **budget}, simulated


def largest_error(facts: Facts) -> float:
    """The largest error that an evaluation counts in full, as a share of the range.

    Args:
        facts: that a model carries about its target.

    Returns:
        Of numbers, so many deviations of the one that varies most; otherwise one, the default.
    """
    widths = [high - low for low, high in facts.get("ranges", ())]
    deviations = [float(each) for each in facts.get("deviation", ())]
    shares = [each / width for each, width in zip(deviations, widths, strict=False)]
    return min(1.0, FOUR * max(shares)) if shares and max(shares) > 0 else 1.0


def survey_settings(
    classes: tuple[str, ...], budget: Mapping[str, Scalar], images: str = ""
) -> dict[str, Scalar]:
    """Settings of a survey of the sites' training records.

    Args:
        classes: names of the classes that are counted; none where the settings name another target.
        budget: of `counting_budget`.
        images: histograms of images that are counted too, separated by commas; "all"; empty for none.

    Returns:
        The settings, flat.

    Raises:
        ConfigError: the name of a class has a comma.
    """
    named = _named(classes) if classes else {}
    if images:
        named |= {"counting.images": ",".join(HISTOGRAMS) if images == "all" else images}
    return {**named, "counting.kind": "survey", **budget}


def _named(classes: tuple[str, ...]) -> dict[str, Scalar]:
    if any("," in name for name in classes):
        raise ConfigError("a class name with a comma cannot be in the settings of a run")
    return {"classes": ",".join(classes)}
