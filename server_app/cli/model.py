"""Commands about the model of a run: `coordinator evaluate`, `export`, and before it `survey`.

The first and the last ask the sites for counts, with noise that their ledgers charge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsurrogate.common.command_line import Json, console, print_table, stderr_console
from fedsurrogate.common.errors import ConfigError, RunError

from . import proposals
from .control import Authority, Control
from .options import RunArgument, RunSettings, complete_runs

if TYPE_CHECKING:
    from fedsurrogate.common.settings.base import Scalar

Epsilon = Annotated[
    float,
    typer.Option(min=0, help="Privacy budget at each site; 0: exact, where policies allow it."),
]
Delta = Annotated[float, typer.Option(min=0, max=0.01, help="Delta of the privacy budget.")]
Summed = Annotated[
    bool,
    typer.Option(
        "--secure-aggregation",
        help="See only the sum over all sites, with one distributed noise instead of one a site.",
    ),
]


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_OR_RUN", autocompletion=complete_runs)],
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    secure_aggregation: Summed = False,
    control: Control = "",
    root_certificates: Authority = None,
    run_config: RunSettings = None,
    proposal: proposals.ProposalFile = None,
    propose: proposals.ProposeFile = None,
    purpose: proposals.Purpose = "",
    as_json: Json = False,
) -> None:
    """Ask the sites how good a model is on held-out records.

    Gives noisy counts of decisions and scores, and intervals. The model of a simulated run is
    evaluated in a simulation with the same sites, next to the exact values.

    Args:
        model: A run folder, or a signed model.
    """
    from ..counting import counting_budget, evaluation_settings
    from ..runs.presets import typed_settings

    settings, sites = evaluation_settings(
        model, counting_budget(epsilon, delta, secure_aggregation)
    )
    settings = proposals.as_proposed(settings, proposal) | typed_settings(run_config)
    if propose is not None:
        proposals.write_proposal(propose, "run", settings, purpose)
        return
    folder = _run(settings, sites, control, root_certificates)
    result = _result(folder, "evaluation")
    if model.is_dir():
        # For `coordinator report RUN`.
        (model / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    _show_counts(folder, result, as_json)


def survey(
    classes: str = "",
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    secure_aggregation: Summed = False,
    images: str = "",
    control: Control = "",
    root_certificates: Authority = None,
    run_config: RunSettings = None,
    simulate: Annotated[int, typer.Option(min=0)] = 0,
    like: Path | None = None,
    expected: Annotated[float, typer.Option(min=0.01, max=0.999)] = 0.9,
    dimension: Annotated[int, typer.Option(min=2, max=4096)] = 128,
    proposal: proposals.ProposalFile = None,
    propose: proposals.ProposeFile = None,
    purpose: proposals.Purpose = "",
    as_json: Json = False,
) -> None:
    """Ask the sites how many records of which classes they have.

    Estimates what accuracy a run could reach. Or how many are annotated for each label, what values
    a number has, or how many events there are. With --images also what the images of each site are
    like, and which sites have them turned, inverted or empty.

    Example: coordinator survey --classes normal,pneumonia --epsilon 0.5

    Example: coordinator survey --classes normal,pneumonia --images all

    Example: coordinator survey --run-config "task='multilabel' label-columns='edema,mass'"

    Args:
        classes: All classes that may occur, separated by commas; none with a target in
            --run-config.
        images: Also count images: all, or some of size, spacing, bits, brightness, contrast,
            orientation, view, mirror, maker.
        simulate: Simulate so many sites, with data of --run-config.
        like: Estimate accuracies with features like those of this run, which stored surrogates.
        expected: Else: the accuracy that is expected without noise.
        dimension: Else: numbers in the features of a record.
    """
    from fedsurrogate.common.settings import split_names

    from ..counting import (
        counting_budget,
        estimate_of,
        features_like,
        features_with,
        survey_settings,
    )
    from ..report.build import write_report
    from ..runs.presets import typed_settings

    try:
        proposed = proposals.settings_of(proposal, {})
        names = split_names(classes or str(proposed.get("classes", "")))
        images = images or str(proposed.get("counting.images", ""))
    except ValueError as error:
        raise ConfigError(f"--classes: {error}") from None
    settings = survey_settings(names, counting_budget(epsilon, delta, secure_aggregation), images)
    settings = proposals.as_proposed(settings, proposal) | typed_settings(run_config)
    if propose is not None:
        proposals.write_proposal(propose, "run", settings, purpose)
        return
    of_target = settings.get("task", "classification") != "classification"
    if of_target and (names or like is not None):
        raise ConfigError(
            f"task = {settings['task']!r} has no {'classes' if names else 'estimate'}; leave out "
            f"--{'classes' if names else 'like'}"
        )
    if not (of_target or names):
        raise ConfigError(
            "name all classes with --classes, or another target with --run-config, such as "
            "\"task='regression' target-range='0,100'\""
        )
    # Before the sites are charged: these may fail.
    source = None
    if not of_target:
        source = (
            features_like(like, names) if like else features_with(len(names), dimension, expected)
        )
    folder = _run(settings, simulate, control, root_certificates)
    result = _result(folder, "survey")
    if source is not None:
        result["estimate"] = estimate_of(result, source)
        (folder / "survey.json").write_text(json.dumps(result, indent=2) + "\n")
        write_report(folder)
    _show_counts(folder, result, as_json)


def _run(settings: Mapping[str, Scalar], sites: int, control: str, authority: Path | None) -> Path:
    """Run to the end, simulated in this process with so many sites, or with the connected sites;
    return the run folder.
    """
    from fedsurrogate.common.run import parse_run

    from ..deployment.submit import check_connection
    from ..deployment.submit import run as start
    from ..lifecycle.before_start import check_submission
    from ..monitoring.watch import Progress

    config, output_console, progress = parse_run(settings), stderr_console(), Progress()

    def show(event: dict[str, Any]) -> None:
        output_console.print(progress.line(event))

    output = Path(config.settings.output_dir).expanduser().absolute()
    settings = {**settings, "output-dir": str(output)}
    if sites:
        from ..deployment.local_engine import simulate_here

        return simulate_here(sites, settings, show)
    check_connection(control, authority)
    proposals.check_run_signed(settings, authority)
    check_submission(config, control)
    folder = start(settings, output, control, authority, show)
    if folder is None:
        raise RunError(f"the result is in output-dir of the SuperLink's machine, not in {output}")
    return folder


def _show_counts(folder: Path, result: Mapping[str, Any], as_json: bool) -> None:
    """Print the result of a run that counted, as JSON or as tables."""
    from ..report.counts_view import counts_views

    if as_json:
        print(json.dumps({**result, "folder": str(folder)}, indent=2))
        return
    for view in counts_views(folder):
        print_table(view.columns, view.rows)
        for sentence in (view.title + ".", *view.words):
            console.print(sentence)
    _print_images(folder)
    console.print(str(folder))


def _print_images(folder: Path) -> None:
    """Print the warnings of a survey of images, and where all that it counted is."""
    from ..report.images_view import images_view

    if (view := images_view(folder)) is None:
        return
    nothing = (
        "no site is warned of: none has images that are turned, inverted or empty, beyond the noise"
    )
    for sentence in (*(view["warnings"] or [nothing]), *view["words"][1:]):
        console.print(sentence)
    console.print("the images at each site are in report.html")


def _result(folder: Path, kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{kind}.json").read_text())
    return content


ENDINGS = {"fedsurrogate": ".fedsurrogate", "onnx": ".onnx", "card": ".md"}


def export(
    run: RunArgument,
    format_: Annotated[
        Literal["fedsurrogate", "onnx", "card"], typer.Option("--format")
    ] = "fedsurrogate",
    out: Path | None = None,
    weights_path: str = "",
    key: Path | None = None,
) -> None:
    """Write a run's model: signed file, ONNX graph, or model card.

    A graph has normalisation, backbone and head in one; it is read again and compared before the
    command ends.

    Args:
        format_: What to write.
        out: The file to write; by default in the run folder.
        weights_path: File of the backbone's weights; empty downloads the library's.
        key: Folder with coordinator.key, to sign a model that is not signed yet.
    """
    from ..deployment.audit_log import note
    from ..export.graph import signed_model_of

    model = signed_model_of(run, key)
    note(key, "export", {"run": run.name, "model": model.manifest.name, "format": format_})
    # The suffix is not taken with `with_suffix`, which would cut a name at its last dot.
    file = out if out is not None else run / f"{model.manifest.name}{ENDINGS[format_]}"
    if not file.expanduser().absolute().parent.is_dir():
        raise ConfigError(
            f"--out {str(file)!r}: there is no folder {str(file.parent)!r}; create it first"
        )
    if format_ == "fedsurrogate":
        from fedsurrogate.common.signed_models.signed_model import save_signed_model

        file.write_bytes(save_signed_model(model))
    elif format_ == "card":
        from ..export.model_card import model_card

        file.write_text(model_card(model, run), encoding="utf-8")
    else:
        from fedsurrogate.common.logs import counted

        from ..export.graph import check_onnx, graph_of, write_graph
        from ..export.model_card import model_card

        # Before a network is built.
        check_onnx()
        with counted("export", 2, what="steps") as advance:
            graph = graph_of(model, weights_path or _weights(run))
            advance(1)
            apart = write_graph(graph, file)
            advance(1)
        console.print(f"largest difference of an answer: {apart:.2g}")
        card = file.with_name(f"{file.name}.md")
        card.write_text(model_card(model, run, graph.preprocessing), encoding="utf-8")
        console.print(str(card))
    console.print(str(file))


def _weights(run: Path) -> str:
    """The weights file in the settings of a run."""
    from fedsurrogate.common.signed_models.signed_model import settings_of_run

    return settings_of_run(run).settings.weights_path
