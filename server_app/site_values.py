"""The value of each site of a run: models of some of the sites from stored surrogates, tested on
the run's test data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.models.classifiers import (
    Classifier,
    Ensemble,
    Head,
    class_indices,
    target_of_model,
)
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.signed_models.making import feature_settings
from fedsurrogate.common.signed_models.run_folders import settings_of_run
from fedsurrogate.common.surrogates.surrogates import class_order
from fedsurrogate.common.targets.measures import IN_WORDS, measured, metrics_of
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.common.targets.target import Target
from fedsurrogate.server_app.counting import CountingBudget
from fedsurrogate.server_app.relearn import TEST_RECORDS, stored_centre
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.reader import read_payloads
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.one_shot import OneShot, in_order
from fedsurrogate.strategies.counting.evaluated import bounded, payload_of
from fedsurrogate.strategies.robustness.site_values import Measure, SiteValue, site_values

VALUES = "values.json"
# Sites of a deployment, all of whose subsets are compared: 63 models at most, whose noise grows
# with their root.
MOST_ASKED = 6
# From settings, the power of features and a target: features (n, d) and values (n, k).
TestValues = Callable[[Settings, float, Target], tuple[Tensor, Tensor]]
# What a model that knows nothing scores.
GUESSES = {"r2": 0.0, "auroc": 0.5, "concordance": 0.5}
# From settings and the power of features: features (n, d), labels (n,) and class names of all test
# records.
TestFeatures = Callable[[Settings, float], tuple[Tensor, Tensor, tuple[str, ...]]]


def value_of_sites(run: Path) -> dict[str, Any]:
    """Leave-one-out and Shapley values of accuracy, or of the score of another target, for a
    simulation.

    Without the run's defence and cap of weights: these would hide what a site does to the others.

    Args:
        run: the run folder.

    Returns:
        The values; also written to values.json in the run folder.

    Raises:
        RunError: the run is no simulation, or stored no surrogate of each site.
    """
    config = settings_of_run(run)
    if read_json(run, "manifest.json").get("simulated") is not True:
        raise RunError(
            f"{run.name} is no simulation, so the coordinator has no test records; `coordinator "
            "value RUN --epsilon 1` asks the sites for noisy counts"
        )
    strategy, sent = stored(config, run)
    if config.target is not None:
        return _value_for_target(run, config, strategy, sent)
    test_features: TestFeatures = import_module(TEST_RECORDS).test_features
    features, labels, names = test_features(config.settings, config.power)

    def accuracy(some: frozenset[str]) -> float:
        model = model_of(strategy, sent, some, config.settings.classes)
        if model is None:
            return float(labels.bincount().max()) / len(labels) if not some else 0.0
        right, tested = model.accuracy(features, names, labels)
        return right / tested

    return write_values(run, list(sent), accuracy, "accuracy")


def _value_for_target(
    run: Path, config: Run, strategy: OneShot[Any], sent: dict[str, Any]
) -> dict[str, Any]:
    """Values by the score of the run's target, meaned over what its model answers.

    Args:
        run: the run folder.
        config: its settings.
        strategy: of the run.
        sent: sums by site.
    """
    target = config.target
    assert target is not None
    test_values: TestValues = import_module(TEST_RECORDS).test_values
    features, values = test_values(config.settings, config.power, target)
    name = TARGETS[target.name].score

    def score(some: frozenset[str]) -> float:
        model = model_of(strategy, sent, some, ())
        found: Mapping[str, Mapping[str, float]] = {}
        if model is not None:
            outputs, scores = model.header.classes, model.scores(features)
            found = metrics_of(measured(target_of_model(model), outputs, scores, values))
        # Of what the model does not answer, a guess.
        each = [found.get(output, {}).get(name, GUESSES[name]) for output in target.outputs]
        return sum(each) / len(each)

    return write_values(run, list(sent), score, IN_WORDS.get(name, name))


def value_settings(
    run: Path, privacy: CountingBudget
) -> tuple[dict[str, Scalar], list[frozenset[str]]]:
    """Settings of a run that asks sites which of a run's models of some sites decide rightly.

    Args:
        run: the run folder. The models are written into it.
        privacy: the budget.

    Returns:
        The settings, flat; and the subsets of sites whose models these are, in order: all subsets
        of six sites at most; else everyone, and everyone without each site.

    Raises:
        RunError: the run stored no surrogate of each site, or its models are no linear heads.
    """
    config = settings_of_run(run)
    _check_of_classes(config.target)
    strategy, sent = stored(config, run)
    subsets = subsets_of(list(sent))
    models = [model_of(strategy, sent, some, config.settings.classes) for some in subsets]
    classes = config.settings.classes or class_order(list(sent.values()))
    heads = [each for each in models if isinstance(each, Head)]
    if not heads or any(model is not None and not isinstance(model, Head) for model in models):
        raise RunError(f"{run.name}: values are for linear heads")
    silent = replace(
        heads[0], weight=torch.zeros_like(heads[0].weight), bias=torch.zeros_like(heads[0].bias)
    )
    # From a subset that gives no head, a head without an opinion.
    wide = [
        _of_all_classes(model if isinstance(model, Head) else silent, classes) for model in models
    ]
    file, (payload, digest) = (
        run / "value-heads.pb",
        payload_of(Ensemble(tuple(map(bounded, wide)))),
    )
    file.write_bytes(payload)
    counting: dict[str, Scalar] = {
        "counting.kind": "values",
        "counting.model": str(file.absolute()),
        "counting.digest": digest,
        "counting.models": len(wide),
        "classes": ",".join(classes),
    }
    return {
        **feature_settings(config.settings, config.power, config.target),
        **counting,
        **privacy.settings(),
    }, subsets


def _check_of_classes(target: Target | None) -> None:
    """Raise ConfigError for a run of another target: sites count right decisions."""
    if target is not None:
        raise ConfigError(
            f"values from noisy counts are of right decisions, and this run learned target = "
            f"{target.name!r}; `coordinator relearn RUN --without SITE` learns its model without a "
            "site, and `coordinator evaluate` says how well a model answers; of a simulation, "
            "`coordinator value` without --epsilon gives values"
        )


def subsets_of(sites: Sequence[str]) -> list[frozenset[str]]:
    """The subsets of sites whose models are compared, everyone first.

    Example:
        >>> [sorted(some) for some in subsets_of(["north", "south"])]
        [['north', 'south'], ['south'], ['north']]
    """
    if len(sites) > MOST_ASKED:
        return [frozenset(sites), *(frozenset(sites) - {site} for site in sites)]
    every = [
        frozenset(site for place, site in enumerate(sites) if bits >> place & 1)
        for bits in range(1, 2 ** len(sites))
    ]
    return every[::-1]


def noisy_values(
    run: Path, sites: Sequence[str], counted: Mapping[str, Any], classes: int
) -> dict[str, Any]:
    """Values from noisy counts of right decisions.

    The measure of no site is a guess, one over the classes.

    Args:
        run: the run folder.
        sites: names of the sites.
        counted: "right": number of tested records, and of right decisions of each model of
            `subsets_of(sites)`; "noise": standard deviation of the noise on each of these.
        classes: number of classes.

    Returns:
        The values; also written to values.json. Each value's error is the standard deviation of its
        noise.

    Raises:
        RunError: the noise hides the values.
    """
    (tested, *right), noise = counted["right"], float(counted["noise"])
    if tested < 3 * noise or tested < 1:
        raise RunError(
            f"the noise hides the values: {tested} records with noise of {noise:.3g}; set a larger "
            "epsilon"
        )
    subsets = subsets_of(sites)
    reached = {some: count / tested for some, count in zip(subsets, right, strict=True)} | {
        frozenset[str](): 1 / classes
    }
    everyone = frozenset(sites)
    if len(sites) > MOST_ASKED:
        values = [
            SiteValue(s, reached[everyone] - reached[everyone - {s}], None, noise * 2**0.5 / tested)
            for s in sites
        ]
    else:
        shares = site_values(sites, reached.__getitem__)
        weights = [site_values(sites, lambda some, one=one: float(some == one)) for one in subsets]  # type: ignore[misc]
        errors = [
            sum((each[k].shapley or 0.0) ** 2 for each in weights) ** 0.5 for k in range(len(sites))
        ]
        values = [
            replace(each, error=noise * error / tested)
            for each, error in zip(shares, errors, strict=True)
        ]
    result = {
        "schema": 1,
        "measure": "accuracy on held-out records of the sites, from noisy counts",
        "all": reached[everyone],
        "none": 1 / classes,
        "models": len(subsets),
        "sites": [asdict(each) for each in values],
    }
    (run / VALUES).write_text(json.dumps(result, indent=2) + "\n")
    return result


def _of_all_classes(head: Head, classes: Sequence[str]) -> Head:
    """A head for all classes; it never decides for those that it did not learn."""
    rows = class_indices(tuple(classes), head.header.classes)
    lowest = float(head.bias.abs().max()) + 10 * float(head.weight.norm(dim=1).max())
    weight = head.weight.new_zeros(len(classes), head.weight.shape[1])
    bias = head.bias.new_full((len(classes),), -lowest if len(rows) < len(classes) else 0.0)
    weight[rows], bias[rows] = head.weight, head.bias
    return replace(
        head, header=replace(head.header, classes=tuple(classes)), weight=weight, bias=bias
    )


def write_values(run: Path, sites: Sequence[str], measure: Measure, name: str) -> dict[str, Any]:
    """Write the values of sites by a measure to values.json.

    Args:
        run: the run folder.
        sites: names of the sites.
        measure: of a model of some of the sites.
        name: of the measure.

    Returns:
        The content of values.json.
    """
    known: dict[frozenset[str], float] = {}

    def kept(some: frozenset[str]) -> float:
        return known.setdefault(some, measure(some))

    values = site_values(sites, kept)
    result = {
        "schema": 1,
        "measure": f"{name} on the test records of the simulation",
        "all": kept(frozenset(sites)),
        "none": kept(frozenset()),
        "models": len(known),
        "sites": [asdict(each) for each in values],
    }
    (run / VALUES).write_text(json.dumps(result, indent=2) + "\n")
    return result


def stored(config: Run, run: Path) -> tuple[OneShot[Any], dict[str, Any]]:
    """The strategy without a defence, and the surrogates of a run by site.

    Args:
        config: the settings of the run.
        run: the run folder.

    Returns:
        The strategy, and the surrogates.

    Raises:
        RunError: for a run without them.
    """
    if config.settings.secure_sum or config.plan.counts or config.plan.kind != "one-shot":
        raise RunError(
            f"{run.name} stored no surrogate of each site; values need one-shot methods without "
            "secure-sum"
        )
    plain = replace(
        config, settings=config.settings.model_copy(update={"defence": "none", "max_share": 0.0})
    )
    strategy = stored_strategy(config)(plain, Unrecorded(), pick_device("cpu"), stored_centre(run))
    sent = in_order(strategy.unpack(payload) for payload in read_payloads(run))
    return strategy, {each.header.site: each for each in sent}


def model_of(
    strategy: OneShot[Any], sent: dict[str, Any], some: frozenset[str], classes: Sequence[str]
) -> Classifier | None:
    """The model that would have been learned from some of the sites.

    Args:
        strategy: of the run.
        sent: surrogates by site.
        some: names of these sites.
        classes: names of the model's classes; empty for those of the sites.

    Returns:
        The model; None for none, or if nothing can be learned.
    """
    kept = [each for site, each in sent.items() if site in some]
    if not kept:
        return None
    try:
        return strategy.learn(strategy.in_one_frame(kept), classes).model
    except RunError:
        return None
