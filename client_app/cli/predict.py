"""The `site predict` command: a model on new images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsurrogate.common.command_line import Json, console
from fedsurrogate.common.errors import ConfigError

from .options import MaybeNode, check_writable, node_of, print_json

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
    data_dir: Annotated[
        str, typer.Option(help="Folder of the new images: image files, a table of paths, or DICOM.")
    ],
    out: Annotated[
        Path, typer.Option(help="The CSV file to write, or to continue after an interruption.")
    ],
    model: ModelArgument = "in-use",
    node_config: MaybeNode = None,
    data: Annotated[
        Literal["auto", "imagefolder", "dicom", "slides"], typer.Option(help="Kind of the images.")
    ] = "auto",
    patient_column: Annotated[
        str, typer.Option(help="Column of the table that holds the patient ID.")
    ] = "",
    bag_column: Annotated[
        str,
        typer.Option(
            help="For a model of bags, what names the bag of an image: a column of the table; study, "
            "series or patient of DICOM; folder for folders. Else as in the node-config."
        ),
    ] = "",
    by_patient: Annotated[
        Path | None, typer.Option(help="Also write one row for each patient: CSV.")
    ] = None,
    positive: Annotated[str, typer.Option(help="The class that --threshold is for.")] = "",
    threshold: Annotated[
        float | None, typer.Option(help="Smallest probability of that class; else the stored one.")
    ] = None,
    abstain_above: Annotated[
        float | None,
        typer.Option(
            help="Abstain where the out-of-distribution score is larger; else the stored number."
        ),
    ] = None,
    score: Annotated[OodScore | None, typer.Option(help="The score for --abstain-above.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Classify new images with a model, and write a CSV.

    It has probabilities, decision and out-of-distribution score of each. Nothing leaves this site.
    An interrupted command continues where it stopped when it is given again.

    Example: site predict --data-dir /data/new --out predictions.csv

    Example: site predict RUN --data-dir xrays/new --out predictions.csv
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
    patients = (
        None
        if by_patient is None
        else write_patients(out, by_patient, predictor.calibration, predictor.classes)
    )
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
