"""The `site evaluate` and `adapt` commands: how good a model is at this site, and a version of its own.
Nothing leaves.

The `site predict` command: a model on new images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsurrogate.common.command_line import Json, console
from fedsurrogate.common.errors import ConfigError, StateError

from .options import MaybeNode, check_writable, node_of, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from fedsurrogate.common.models.class_metrics import ModelQuality

NOT_CALIBRATED = (
    "probabilities are as the model was learned, not calibrated on records of this site; with labelled "
    "records `site evaluate --temperature --store` calibrates them"
)


OodScore = Literal["relative", "mahalanobis"]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A model file, the name of a kept model, in-use, or the run folder of a simulation on "
        "this machine, which needs no --node-config.",
    ),
]


def predict(
    data_dir: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()],
    model: ModelArgument = "in-use",
    node_config: MaybeNode = None,
    data: Literal["auto", "imagefolder", "dicom", "slides"] = "auto",
    patient_column: str = "",
    bag_column: str = "",
    by_patient: Path | None = None,
    positive: str = "",
    threshold: float | None = None,
    abstain_above: float | None = None,
    score: OodScore | None = None,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    as_json: Json = False,
) -> None:
    """Classify new images with a model, and write a CSV.

    It has probabilities, decision and out-of-distribution score of each. Nothing leaves this site.
    An interrupted command continues where it stopped when it is given again.

    Example: site predict --data-dir /data/new --out predictions.csv

    Example: site predict RUN --data-dir xrays/new --out predictions.csv

    Args:
        data_dir: Folder of the new images: image files, a table of paths, or DICOM.
        out: The CSV file to write, or to continue after an interruption.
        data: Kind of the images.
        patient_column: Column of the table that holds the patient ID.
        bag_column: For a model of bags, what names the bag of an image: a column of the table;
            study, series or patient of DICOM; folder for folders. Else as in the node-config.
        by_patient: Also write one row for each patient: CSV.
        positive: The class that --threshold is for.
        threshold: Smallest probability of that class; else the stored one.
        abstain_above: Abstain where the out-of-distribution score is larger; else the stored
            number.
        score: The score for --abstain-above.
        overwrite: Replace an existing file.
    """
    from ..features.site_features import site_backbone
    from ..model_use.adaptation import adapted_classifier
    from ..model_use.calibration import (
        check_of_classes,
        is_of_labels,
        own_gaussians,
        read_calibration,
    )
    from ..model_use.held_out import bag_column_of
    from ..model_use.inputs import find_inputs
    from ..model_use.prediction import Predictor
    from ..model_use.prediction import by_patient as write_patients
    from ..model_use.prediction import predict as run
    from ..model_use.store import opened
    from ..node_config import NodeConfig

    check_writable(out, by_patient)
    read = Path(data_dir).expanduser().resolve()
    for file in (out, by_patient):
        if file is not None and file.expanduser().resolve().is_relative_to(read):
            raise ConfigError(
                f"{str(file)!r} lies in --data-dir, where it would be read as data; choose another "
                "folder"
            )
    named = opened(model, node_of(node_config) if node_config else None)
    signed, node = named.model, named.node
    own = node or NodeConfig()
    of_classes: dict[str, object] = {"--abstain-above": abstain_above is not None, "--score": score}
    if not is_of_labels(signed.classifier):
        of_classes |= {"--positive": positive, "--threshold": threshold is not None}
    check_of_classes(signed.classifier, of_classes)
    calibration = read_calibration(node, signed).chosen(
        positive=positive or None,
        threshold=threshold,
        abstain_above=abstain_above,
        score=score,
    )
    classifier = adapted_classifier(node, signed) or signed.classifier
    predictor = Predictor(classifier, calibration, own_gaussians(node, signed))
    bags = bag_column_of(signed, bag_column, own)
    run_settings = (named.simulated or signed.manifest.run_config({"device": "auto"})).settings
    if data == "auto" and "slides" in (own.data, run_settings.data):
        data = "slides"
    inputs = find_inputs(data_dir, data, patient_column, own.dicom_frames, bags)
    backbone = site_backbone(run_settings, own) if inputs.slides is None else None
    done = run(signed, predictor, inputs, backbone, out, overwrite)
    patients: int | None = None
    if by_patient is not None:
        patients = write_patients(out, by_patient, predictor.calibration, predictor.classes)
    if as_json:
        facts = {
            "file": str(out),
            "model": signed.manifest.name,
            "classes": predictor.classes,
            "adapted": classifier is not signed.classifier,
            "written": done.written,
            "earlier": done.earlier,
            "unreadable": done.unreadable,
            "patients": patients,
        }
        print_json(facts)
        return
    if named.note:
        console.print(named.note, style="dim")
    earlier = f", {done.earlier} were there already" if done.earlier else ""
    what = "images" if inputs.bags is None else "bags of images"
    what = "bags of slides" if inputs.slides else what
    console.print(f"{done.written} {what}, {done.rate:.0f} a second{earlier}: {out}")
    warnings = {
        "the model is of bags; without --bag-column each image is one of its own": (
            bags == "" and inputs.slides is None
        ),
        f"{done.unreadable} {what} cannot be read; their rows have a problem": done.unreadable,
        f"no out-of-distribution score: {signed.manifest.gaussians}": predictor.gaussians is None,
        NOT_CALIBRATED: named.uncalibrated(predictor.calibration.temperature),
    }
    for text in (text for text, holds in warnings.items() if holds):
        console.print(text, style="yellow")
    if patients is not None:
        console.print(f"{patients} patients: {by_patient}")


def adapt(
    model: ModelArgument = "in-use",
    node_config: MaybeNode = None,
    data_dir: str = "",
    data: LabelledKind = None,
    label_column: LabelColumn = "label",
    patient_column: PatientColumn = "",
    store: Annotated[bool, typer.Option("--store")] = False,
    remove: Annotated[bool, typer.Option("--remove")] = False,
    as_json: Json = False,
) -> None:
    """Adapt a shared model to this site's own records.

    Only if that is significantly better. Nothing leaves. Compares by cross-validation: the shared
    model, its scores moved, scaled, or corrected by a ridge on own records.

    Args:
        data_dir: Labelled records; else the training records of this site.
        store: Use the chosen model at this site from now on.
        remove: Go back to the shared model.
    """
    from fedsurrogate.common.models.classifiers import target_of_model
    from fedsurrogate.common.targets.metrics import facts_of

    from ..model_use.adaptation import adapt as compare
    from ..model_use.adaptation import adapted_file, store_adapted
    from ..model_use.held_out import Source, held_out
    from ..model_use.store import opened

    named = opened(model, node_of(node_config) if node_config else None)
    signed, node = named.model, named.site()
    file = adapted_file(node, signed)
    if remove:
        if not file.is_file():
            raise StateError(f"this site has no version of its own of {signed.manifest.name}")
        file.unlink()
        console.print(f"removed {file}; the shared model is in use")
        return
    where = data_dir, data or "", label_column, patient_column
    source = Source(*where, known_only=True, simulated=named.simulated)
    named.check_records(data_dir)
    held = held_out(signed, node, source, "train")
    adaptation = compare(signed.classifier, held)
    stored = None
    if store and adaptation.own is not None:
        stored = store_adapted(node, signed, adaptation.own, adaptation.chosen)
    if as_json:
        facts = {
            "chosen": adaptation.chosen,
            "reason": adaptation.reason,
            "share": float(adaptation.own is not None),
            "stored": stored and str(stored),
            "judged": [asdict(each) for each in adaptation.judged],
            "records": len(held.labels),
        }
        print_json(facts)
        return
    if named.note:
        console.print(named.note, style="dim")
    from rich.table import Table

    of_numbers = facts_of(target_of_model(signed.classifier)).get("name") == "regression"
    table = Table(
        "candidate",
        "accuracy",
        "gain in squared error" if of_numbers else "gain in likelihood",
        "95 % interval",
        title=f"{len(held.labels)} records",
    )
    for each in adaptation.judged:
        limits = "" if each.name == "shared" else f"{each.low:+.3f} to {each.high:+.3f}"
        right = "" if each.accuracy is None else f"{each.accuracy:.1%}"
        table.add_row(each.name, right, f"{each.gain:+.3f}", limits)
    console.print(table)
    console.print(f"chosen: {adaptation.chosen}; {adaptation.reason}")
    if stored is not None:
        console.print(f"in use at this site: {stored}; `site adapt --remove` goes back")
    elif adaptation.own is not None:
        console.print("give --store to use it at this site")


LabelledKind = Annotated[
    Literal["imagefolder", "dicom", "parquet", "safetensors", "slides"] | None,
    typer.Option(help="Kind of --data-dir; else as in the node-config."),
]
LabelColumn = Annotated[str, typer.Option(help="Column of the class in a table of --data-dir.")]
PatientColumn = Annotated[str, typer.Option(help="Column of the patient ID in that table.")]

BagColumn = Annotated[
    str,
    typer.Option(
        help="For a model of bags, column of the bag of an image in that table; else as in the "
        "node-config."
    ),
]


def evaluate(
    model: ModelArgument = "in-use",
    node_config: MaybeNode = None,
    out: Path = Path("evaluation"),
    data_dir: str = "",
    data: LabelledKind = None,
    label_column: LabelColumn = "label",
    patient_column: PatientColumn = "",
    bag_column: BagColumn = "",
    by: Annotated[str, typer.Option(metavar="column,column")] = "",
    known_only: Annotated[bool, typer.Option("--known-only")] = False,
    positive: str = "",
    threshold: float | None = None,
    sensitivity: float = 0.0,
    specificity: float = 0.0,
    prevalence: Annotated[str, typer.Option(metavar="label=share,...|here")] = "",
    temperature: Annotated[bool, typer.Option("--temperature")] = False,
    abstain: float = 0.0,
    score: OodScore | None = None,
    attack: Annotated[bool, typer.Option("--attack")] = False,
    store: Annotated[bool, typer.Option("--store")] = False,
    as_json: Json = False,
) -> None:
    """Judge a model on labelled records of this site.

    Writes metrics with intervals and plots, also by groups. Nothing leaves.

    Example: site evaluate --out evaluation --by scanner,sex

    Args:
        out: Folder for evaluation.html and evaluation.json.
        data_dir: Labelled records that the run has not seen; else the test records of this site.
        by: Also by the values of these columns of the table.
        known_only: Leave out records of classes that the model does not know.
        positive: The class that a threshold is for; of two classes, the last.
        threshold: Smallest probability of that class.
        sensitivity: Choose the threshold for this sensitivity, on half of the records.
        specificity: Choose the threshold of each label for this specificity, on half of the
            records.
        prevalence: Share of records with each label here, for which its probabilities are; here:
            that of half of the records.
        temperature: Fit a temperature for probabilities, on half of the records.
        abstain: Choose the score above which the model abstains, for this share of records, on half
            of them.
        score: The out-of-distribution score for --abstain.
        attack: Do losses and gradients under the model tell this site's training records from these?
        store: Store thresholds, prevalence, temperature and the number of --abstain with the model.
    """
    from ..model_use.adaptation import adapted_classifier
    from ..model_use.calibration import Wish, own_gaussians, read_calibration, store_calibration
    from ..model_use.evaluation import evaluate as judge
    from ..model_use.held_out import Source, held_out
    from ..model_use.store import opened

    named = opened(model, node_of(node_config) if node_config else None)
    signed, node = named.model, named.site()
    note = None if threshold is None else "given by a person"
    calibration = read_calibration(node, signed).chosen(
        positive=positive or None, threshold=threshold, note=note
    )
    calibration = calibration.checked(tuple(signed.manifest.classes))
    wished = Wish(temperature, sensitivity, specificity, prevalence, abstain, score)
    of_classes = {
        "--temperature": temperature,
        "--abstain": abstain,
        "--score": score,
        "--positive": positive,
        "--threshold": threshold is not None,
        "--known-only": known_only,
        "--attack": attack,
    }
    wished.check(signed.classifier, of_classes)
    columns = tuple(name.strip() for name in by.split(",") if name.strip())
    where = data_dir, data or "", label_column, patient_column
    source = Source(*where, columns, known_only, bag_column, named.simulated)
    named.check_records(data_dir)
    held = held_out(signed, node, source)
    own_records = replace(source, folder="", columns=())
    trained = held_out(signed, node, own_records, "train") if attack else None
    own, gaussians = adapted_classifier(node, signed), own_gaussians(node, signed)
    evaluation = judge(signed, held, calibration, wished, own, gaussians, trained)
    _, page = evaluation.write(out)
    stored = None
    if store:
        stored = store_calibration(node, signed, evaluation.calibration, evaluation.gaussians)
    report = evaluation.report
    if as_json:
        shown = {"page": str(page), "stored": stored and str(stored)} | evaluation.content
        print_json(shown)
        return
    if named.note:
        console.print(named.note, style="dim")
    content = evaluation.content
    console.print(_answers(content) if report is None else _table(report, held.where))
    if report is not None and report.left_out:
        text = f"no record: {', '.join(report.left_out)}; undefined, and in no average"
        console.print(text, style="yellow")
    if promise := content.get("promise"):
        text = (
            f"{promise['verdict']}: of these records {promise['error']:.1%} are wrong, of points drawn from what "
            f"all sites sent {promise['promised']:.1%}"
        )
        console.print(text, style=None if promise["kept"] else "yellow")
    for name, each in content.get("membership", {}).items():
        limits = f"{each['low']:.3f} to {each['high']:.3f}"
        console.print(f"attack by {name}: AUC {each['auc']:.3f} ({limits}); 0.5 is a guess")
    if evaluation.calibration.note:
        console.print(
            f"decision: {evaluation.calibration.note}" + ("" if store else "; --store keeps it")
        )
    console.print(str(page))


def _answers(content: Mapping[str, Any]) -> Table:
    """The score of each answer of a model of labels, numbers or times; the page has all metrics."""
    from rich.table import Table

    from fedsurrogate.common.targets.metrics import IN_WORDS
    from fedsurrogate.common.targets.registry import TARGETS

    from ..model_use.target_report import in_words

    scores = [kind.score for kind in TARGETS.values()]
    title = f"{content['count']} records, {content['records']}"
    table = Table("", "", "value", "95 % interval", "records", title=title)
    for answer, own in content["metric_values"].items():
        for key in (key for key in scores if key in own):
            value, limits = in_words(key, own[key])
            table.add_row(answer, IN_WORDS.get(key, key), value, limits, str(own[key]["support"]))
    return table


def _table(report: ModelQuality, where: str) -> Table:
    """Averages over classes; AUROC first where accuracy misleads."""
    from rich.table import Table

    from fedsurrogate.common.models.class_metrics import leads_with_auroc
    from fedsurrogate.common.pages.svg import undefined_because

    names = ["accuracy", "balanced_accuracy", "macro_auroc", "macro_auprc", "macro_f1"]
    if leads_with_auroc(report.majority):
        names.insert(0, "macro_auroc")
    table = Table(
        "", "value", "95 % interval", "records", title=f"{report.records} records, {where}"
    )
    for name in dict.fromkeys(names):
        each = report.averages[name]
        if each.value is None:
            value, limits = "undefined", undefined_because(name, report.per_class)
        else:
            value = f"{each.value:.3f}"
            limits = "" if each.low is None else f"{each.low:.3f} to {each.high:.3f}"
        table.add_row(name.replace("_", " "), value, limits, str(each.support))
    return table
