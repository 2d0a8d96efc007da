"""Settings of runs that count: an evaluation of a run's model, and a survey of the sites' records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.signed_models.making import feature_settings
from fedsurrogate.common.signed_models.run_folders import settings_of_run
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.common.targets.answers import facts_of
from fedsurrogate.common.targets.target import Facts
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.json_values import as_number, at
from fedsurrogate.strategies.counting.strategy import payload_of, read_model

# Of a simulated run, the settings that decide which records its sites have.
RECORDS = (
    *(
        "data",
        "data-dir",
        "dataset",
        "label-column",
        "patient-column",
        "bag-column",
        "site-column",
        "weights-path",
    ),
    *("partition", "alpha", "classes-per-site"),
)

# Of a target, the settings that decide how a model is learned, and may need a budget.
HOW_LEARNED = ("time-head",)
# Errors beyond so many deviations that a model states count as these.
FOUR = 4.0


@dataclass(frozen=True)
class CountingBudget:
    """The budget of a run that counts.

    Attributes:
        epsilon: of all counts; zero for counts without noise.
        delta: of all counts; it does not matter without epsilon.
        secure_sum: whether the coordinator sees only the sum over all sites.

    Example:
        >>> CountingBudget(1.0, 1e-5, secure_sum=True).settings()
        {'epsilon': 1.0, 'delta': 1e-05, 'secure-sum': True}
    """

    epsilon: float
    delta: float
    secure_sum: bool = False

    def settings(self) -> dict[str, Scalar]:
        """As settings of a run."""
        budget: dict[str, Scalar] = {
            "epsilon": self.epsilon,
            "delta": self.delta if self.epsilon else 0.0,
        }
        return budget | ({"secure-sum": True} if self.secure_sum else {})


def evaluation_settings(source: Path, privacy: CountingBudget) -> tuple[dict[str, Scalar], int]:
    """Settings of an evaluation of a model. Features are computed as for the run that learned it.

    Args:
        source: a run folder, or a signed model file.
        privacy: the budget.

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
        if read_json(source, "manifest.json").get("simulated") is True:
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
    return {**features, **more, **named, **counting, **privacy.settings()}, simulated


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


def survey_settings(classes: tuple[str, ...], privacy: CountingBudget) -> dict[str, Scalar]:
    """Settings of a survey of the sites' training records.

    Args:
        classes: names of the classes that are counted; none where the settings name another target.
        privacy: the budget.

    Returns:
        The settings, flat.

    Raises:
        ConfigError: the name of a class has a comma.
    """
    named = _named(classes) if classes else {}
    return {**named, "counting.kind": "survey", **privacy.settings()}


def _named(classes: tuple[str, ...]) -> dict[str, Scalar]:
    if any("," in name for name in classes):
        raise ConfigError("a class name with a comma cannot be in the settings of a run")
    return {"classes": ",".join(classes)}


def rows_of(result: Mapping[str, object]) -> list[tuple[str, dict[str, object]]]:
    """The classes of a result with their measures, for tables."""
    classes = result.get("classes")
    return (
        [(str(name), dict(each)) for name, each in classes.items()]
        if isinstance(classes, dict)
        else []
    )
