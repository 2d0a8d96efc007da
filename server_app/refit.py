"""Learn a new head from a run's stored surrogates, without contacting the sites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import DataError, RunError
from fedsurrogate.common.models.classifiers import Classifier, class_indices, target_of_model
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.run import Run
from fedsurrogate.common.signed_models.signed_model import (
    MODEL_FILE,
    is_simulated,
    settings_of_run,
)
from fedsurrogate.common.surrogates.surrogates import class_order
from fedsurrogate.common.targets.metrics import measured, metrics_of
from fedsurrogate.common.wire import model_proto
from fedsurrogate.common.wire.records import unpack_public_mean
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.one_shot import CENTRE_FILE, OneShot, in_order
from fedsurrogate.strategies.base.outcome import Learned, Suspect

from .runs.reader import read_payloads

# By name: the coordinator's code does not import the site's. In a simulation, this machine is every
# site.
TEST_RECORDS = "fedsurrogate.client_app.diagnostics.first_look"
Scores = tuple[float, float] | Mapping[str, Mapping[str, float]]


def refit(
    run: Path, without: Sequence[str] = (), classes: Sequence[str] = (), defence: str = ""
) -> tuple[Path, Classifier]:
    """Learn a head from all stored surrogates except those of some sites.

    Every site and class has its own sampling stream. So the head is exactly the head of a run
    without these sites: their contribution is removed, not only reduced.

    Args:
        run: the run folder.
        without: names of the sites that are left out.
        classes: names of the classes that the head is for; empty for all.
        defence: against hostile sites; that of the run if empty. Sites that it left out are back with
            "none".

    Returns:
        The new folder in the run folder, `refitted/<UTC time>/`, with model and manifest; and the
        model.

    Raises:
        ConfigError: for a defence that the method does not have.
        RunError: for an unknown site or class, or if the run stored nothing of each site, or
            nothing is left to learn from.
    """
    config = settings_of_run(run)
    if config.settings.secure_aggregation:
        raise RunError(
            "this run stored only the sum over its sites, and a site cannot be taken out of secure "
            "aggregation; run again without that site, which the sites answer while enough of them "
            "take part"
        )
    if config.plan.kind == "chain" and not config.settings.epsilon and without:
        raise RunError(
            "the last surrogate of a chain stands for the records of all its sites, and one site "
            "cannot be removed from it; run again without that site"
        )
    if defence:
        config = Run.resolve(config.settings.model_copy(update={"defence": defence}))
    strategy, stored = _stored(run, config)
    sites = [sent.header.site for sent in stored]
    if missing := set(without) - set(sites):
        raise RunError(f"site {sorted(missing)[0]!r} is not in this run; it has {', '.join(sites)}")
    # As the sites sent them, each in the frame of its own columns.
    kept = strategy.in_one_frame([each for each in stored if each.header.site not in without])
    known = config.settings.classes or class_order(kept)
    _check_classes(classes, known)
    wanted = (
        tuple(name for name in known if name in classes) if classes else config.settings.classes
    )
    suspects: list[Suspect] = []
    if classes:
        # Sites are screened by all of their classes, not only by the selected ones.
        suspects = strategy.defend(kept, known).suspects
        accused = {suspect.site for suspect in suspects}
        parts = [
            strategy.restricted(sent, classes) for sent in kept if sent.header.site not in accused
        ]
        kept = [part for part in parts if part is not None]
    if not kept:
        raise RunError("no surrogate is left to learn from")
    learned = strategy.learn(in_order(kept), wanted)
    model = learned.model
    folder = run / "refitted" / f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    folder.mkdir(parents=True)
    model_proto.save_model(model, folder / "model.safetensors")
    facts: dict[str, object] = {
        "sites": [sent.header.site for sent in kept],
        "without": list(without),
        "classes": list(model.header.classes),
    }
    if learned.defended.capped:
        facts["capped"] = learned.defended.capped
    if suspects := suspects + learned.defended.suspects:
        facts["suspects"] = {suspect.site: suspect.reason for suspect in suspects}
    (folder / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n")
    return folder, model


def scores_of(run: Path, model: Classifier) -> tuple[int, Scores] | None:
    """Test a new model on the test records of a simulation.

    Args:
        run: the run folder.
        model: learned from what the run stored.

    Returns:
        Number of the test records, and accuracies of the new and the run's own model on those of its
        classes, or the metrics of each answer to another target; None where the run was no simulation.

    Raises:
        FedSurrogateError: the test records are no longer there.
    """
    if not is_simulated(run):
        return None
    config = settings_of_run(run)
    found = import_module(TEST_RECORDS).test_records(config.settings, config.power, config.target)
    records, names = found
    if config.target is not None:
        outputs, target = model.header.classes, target_of_model(model)
        sums = measured(target, outputs, model.scores(records.features), records.targets())
        return len(records.labels), metrics_of(sums)
    known = class_indices(model.header.classes, names)[records.labels] >= 0
    if not known.any():
        raise DataError(f"no test record of {', '.join(model.header.classes)}")
    of_classes = records.features[known], names, records.labels[known]
    # As sites receive them, at 16 bits.
    right = [
        model_proto.unpack_classifier(model_proto.pack_classifier(each)).accuracy(*of_classes)[0]
        for each in (model, model_proto.load_model(run / MODEL_FILE))
    ]
    count = int(known.sum())
    return count, (right[0] / count, right[1] / count)


def learned_again(run: Path) -> Learned:
    """What a run learned, from what it stored.

    Args:
        run: the run folder.

    Raises:
        RunError: if the run stored nothing of each site.
        SurrogateError: for stored surrogates that cannot be read.
    """
    config = settings_of_run(run)
    strategy, stored = _stored(run, config)
    return strategy.learn(in_order(strategy.in_one_frame(stored)), config.settings.classes)


def _stored(run: Path, config: Run) -> tuple[OneShot[Any], list[Any]]:
    """What learns again, and what the sites sent. Raises RunError where nothing is stored."""
    device, file = pick_device(config.settings.device), run / CENTRE_FILE
    centre = unpack_public_mean(file.read_bytes() if file.exists() else None)
    strategy = stored_strategy(config)(config, Unrecorded(), device, centre)
    return strategy, [strategy.unpack(payload) for payload in read_payloads(run)]


def _check_classes(classes: Sequence[str], known: Sequence[str]) -> None:
    """Raise RunError for classes that a run does not have, or for one alone."""
    if missing := set(classes) - set(known):
        raise RunError(
            f"class {sorted(missing)[0]!r} is not in this run; it has {', '.join(known)}"
        )
    if len(set(classes)) == 1:
        raise RunError(
            f"classes = {classes[0]!r}: a head tells two classes apart, or more; name another one"
        )
