"""The `coordinator` command."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsurrogate.common.command_line import (
    Json,
    console,
    keep_objects,
    new_app,
    print_table,
    run_command,
    stderr_console,
)
from fedsurrogate.common.errors import ConfigError, FedSurrogateError
from fedsurrogate.common.escapes import human_bytes, human_seconds

from .certs import accept, audit_log, certs, init, kit
from .control import app as run_app
from .control import register, run, runs, sites, stop, superlink, unregister, watch
from .model import evaluate, export, survey
from .monitoring import log, sweep
from .offline import exchange, learn, request
from .offline import key as show_key
from .options import RunArgument, RunSettings, complete_runs
from .proposals import approve, approver, propose
from .settings import sample_data, settings

if TYPE_CHECKING:
    from fedsurrogate.common.models.classifiers import Classifier

# Unix time at which this program was started, up to the import of its first modules.
BEGAN = time.time()
app = new_app(
    "The coordinator of a federation: plan runs, run them, read their results.", "coordinator"
)


@contextmanager
def _timed() -> Iterator[None]:
    """Let the processes of a run know when this program was started, for the duration in
    metrics.json.
    """
    from fedsurrogate.common.flower.environment import COMMAND_BEGAN

    os.environ[COMMAND_BEGAN] = f"{BEGAN:f}"
    try:
        yield
    finally:
        del os.environ[COMMAND_BEGAN]


def simulate(
    sites: Annotated[int, typer.Option("--sites", "-n", min=1)] = 3,
    run_config: RunSettings = None,
    gpus: Annotated[float, typer.Option(min=0)] = 0.0,
    parallel: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    engine: Annotated[
        Literal["flower", "local"] | None,
        typer.Option(show_default="local, unless the work is large"),
    ] = None,
) -> None:
    """Run a whole federation on this machine.

    Example: coordinator simulate --sites 10 -c 'alpha=0.1 compare=true'

    Args:
        sites: How many sites to simulate.
        gpus: Share of a GPU each simulated site gets.
        parallel: Sites that run at the same time; fewer need less memory. 0: one a core.
        as_json: Print metrics.json and the folder, no table.
        engine: flower: Flower's simulation, sites in parallel. local: in this process, one by one.
            Same results.
    """
    from ..lifecycle.before_start import (
        Interrupted,
        check_simulation,
        flower_engine,
        goodbye,
        interruptible,
    )
    from ..monitoring.watch import Progress
    from ..runs.presets import typed_settings

    # Before the imports of an engine, which take seconds.
    config, settings = check_simulation(typed_settings(run_config))
    progress, so_far = stderr_console(), Progress()
    # Only Flower's simulation has these options.
    wanted = engine == "flower" if engine else True if parallel or gpus else None
    rounds = config.rounds if config.plan.kind == "rounds" else 0
    by_flower, why = flower_engine(wanted, sites, rounds)
    if why:
        progress.print(why)
    with (
        _timed(),
        progress.status(f"loading the libraries and the data of {sites} simulated sites") as status,
    ):

        def show(event: dict[str, Any]) -> None:
            progress.print(so_far.line(event))
            status.update(so_far.status)

        try:
            with interruptible():
                if by_flower:
                    from ..deployment.submit import Machine
                    from ..deployment.submit import simulate as start

                    folder = start(sites, settings, Machine(parallel, gpus), show)
                else:
                    # A million objects that stay: looking for garbage among them takes a tenth of a
                    # small run.
                    gc.disable()
                    from ..deployment.local_engine import simulate_here

                    keep_objects()
                    gc.enable()
                    folder = simulate_here(sites, settings, show, report=False)
        except Interrupted as stop:
            status.stop()
            options = [
                "--sites",
                str(sites),
                "--engine",
                "flower" if by_flower else "local",
            ]
            options += ["--parallel", str(parallel)] if parallel else []
            options += ["--gpus", f"{gpus:g}"] if gpus else []
            for line in goodbye(stop, ["coordinator", "simulate", *options], settings):
                progress.print(line)
            raise typer.Exit(stop.exit_code) from None
    metrics = json.loads((folder / "metrics.json").read_text())
    if as_json:
        typer.echo(json.dumps(metrics | {"folder": str(folder)}, indent=2))
    else:
        _print_result(folder, metrics)
    if not by_flower:
        # Its pictures take as long as a small run, so the result is printed first.
        _draw_report(folder)
    if not as_json:
        if (folder / "report.html").is_file():
            console.print(f"report {folder / 'report.html'}")
        console.print(str(folder))


def _draw_report(folder: Path) -> None:
    """Draw the report; a disk without room does not make a failure of a run that has its result."""
    from ..report.build import write_report

    progress = stderr_console()
    try:
        with progress.status("drawing the report"):
            write_report(folder)
    except OSError as error:
        progress.print(f"no report: {error}", style="yellow")


def _print_result(folder: Path, metrics: dict[str, Any]) -> None:
    from ..report.quality_view import privacy_line, recorded_quality, sentence_of
    from ..report.tables import warnings_of
    from ..runs.reader import read_run

    _print_accuracies(metrics)
    run = read_run(folder)
    if found := recorded_quality(run):
        console.print(sentence_of(found))
    for warning in warnings_of(run):
        stderr_console().print(f"warning: {warning}", style="yellow")
    console.print(f"privacy {privacy_line(metrics)}")


def plan(
    run_config: RunSettings = None,
    classes: Annotated[int, typer.Option(min=0)] = 0,
    records: Annotated[int, typer.Option(min=1)] = 1000,
    dimension: Annotated[int, typer.Option(min=0)] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    dpia: Annotated[bool, typer.Option("--dpia")] = False,
    as_json: Json = False,
) -> None:
    """Show what a run costs each site before it starts.

    Bytes, rounds, messages and privacy, and those of alternatives.

    Args:
        classes: Number of classes at a site; 0: those that the run names, or ten.
        records: Number of training records at a site.
        dimension: Feature dimension; 0: detect it if possible.
        rounds: Number of rounds of FedAvg, for comparison.
        dpia: Print fields of a data protection impact assessment and of the AI Act instead.
    """
    from dataclasses import asdict

    from fedsurrogate.common.costs import check_payload, find_dimension
    from fedsurrogate.common.help import without_effect
    from fedsurrogate.common.run import parse_run

    from ..lifecycle.before_start import check_data_named
    from ..runs.plan import impact_fields, in_words
    from ..runs.plan import plan as costs
    from ..runs.presets import typed_settings

    config = parse_run(typed_settings(run_config))
    check_data_named(config.settings)
    if classes == 1 and config.target is None:
        raise ConfigError(
            "--classes = 1: a model tells two classes apart, or more; give 2 at least"
        )
    classes = classes or len(config.settings.classes) or 10
    known_dimension = dimension or find_dimension(config.settings)
    check_payload(config, known_dimension, classes, records)
    rows = costs(config, known_dimension, classes, records, rounds)
    if dpia:
        fields = impact_fields(config, rows[0], known_dimension, classes, records)
        if as_json:
            names = ("field", "article", "text")
            typer.echo(
                json.dumps([dict(zip(names, each, strict=True)) for each in fields], indent=2)
            )
            return
        for field, article, text in fields:
            console.print(f"**{field}** ({article}): {text}\n")
        return
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    private = rows[0].epsilon is not None
    columns = ["a site", "up", "down", "rounds", "messages", *(["epsilon", "delta"] * private)]
    cells = []
    for row in rows:
        budget = [f"{number:g}" if number else "none" for number in (row.epsilon, row.delta)]
        sizes = (row.name, human_bytes(row.up), human_bytes(row.down))
        cells.append((*sizes, str(row.rounds), str(row.messages), *(budget * private)))
    print_table(columns, cells)
    for line in [
        *without_effect(config.method, config.settings.flat()),
        *config.gaps(),
        *in_words(config, rows[0], known_dimension, classes, records),
    ]:
        console.print(line)


def report(
    run: RunArgument,
    beside: Annotated[list[Path] | None, typer.Option(autocompletion=complete_runs)] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
) -> None:
    """Write RUN/report.html again from the files in the run folder.

    Args:
        beside: Another run, to compare its accuracy; may be given several times.
        csv: Also write every table of the report to a CSV file in FOLDER.
    """
    from fedsurrogate.common.pages.svg import undrawn

    from ..lifecycle.ends import complete_killed
    from ..report.build import write_csv, write_report
    from ..report.quality_view import privacy_line
    from ..runs.reader import read_run

    complete_killed(run, *(beside or ()))
    console.print(f"privacy {privacy_line(read_run(run).metrics)}")
    for file in write_csv(run, csv, beside or ()) if csv is not None else ():
        console.print(str(file))
    console.print(str(write_report(run, beside or ())))
    if why := undrawn():
        stderr_console().print(f"warning: {why}", style="yellow")


def refit(
    run: RunArgument,
    without: list[str] | None = None,
    classes: str = "",
    defence: str = "",
) -> None:
    """Learn a new head from stored surrogates, asking no site.

    Leaving a site out removes its contribution exactly. Prints the folder of the new head.

    Args:
        without: Leave this site out; may be given several times.
        classes: Only these classes, comma-separated.
        defence: Another defence than the run's; 'none' puts back the sites it left out.
    """
    from fedsurrogate.common.settings import split_names

    from ..refit import refit as learn_again

    try:
        names = split_names(classes)
    except ValueError as error:
        raise ConfigError(f"classes: {error}") from None
    folder, head = learn_again(run, without or (), names, defence)
    console.print(f"{len(head.header.classes)} classes: {', '.join(head.header.classes)}")
    _print_scores(run, head)
    console.print(str(folder))


def _print_scores(run: Path, head: Classifier) -> None:
    """How good a new model is on the test records of a simulation, next to the run's own."""
    from ..refit import scores_of

    try:
        found = scores_of(run, head)
    except FedSurrogateError as error:
        console.print(f"accuracy not measured: {error}", style="yellow")
        return
    if found is None:
        return
    tested, scores = found
    if not isinstance(scores, tuple):
        _print_measured({"all": scores}, f"{tested} test records")
        return
    console.print(
        f"accuracy {scores[0]:.2%} on {tested} test records of these classes; the run's own model "
        f"{scores[1]:.2%}"
    )


def _print_accuracies(metrics: dict[str, Any]) -> None:
    """Print a table of the main results: accuracies and bytes."""
    from fedsurrogate.common.methods import METHODS

    from ..report.build import BASELINES
    from ..runs.state import natural_order

    accuracy, sent, rounds = metrics["accuracy"], metrics["bytes"], len(metrics.get("rounds") or ())
    seconds = metrics["seconds"].get("command", metrics["seconds"]["total"])
    facts = (
        f"{metrics['method']}, {metrics['sites']['used']} of {metrics['sites']['invited']} sites",
        *([f"{human_bytes(sent['up'] / rounds)} a round"] if rounds > 1 else []),
        human_seconds(seconds),
    )
    what = (
        METHODS[metrics["method"]].usual.combination.tested
        if metrics["method"] in METHODS
        else "the model"
    )
    caption = f"at site: {what}, on the site's own test records" if accuracy["per_site"] else None
    tested = metrics.get("tested", {})
    if metric_values := metrics.get("metric_values"):
        _print_measured(metric_values, ", ".join((*facts, human_bytes(sent["up"]))))
        return
    known, rows = [("this run", "model", sent["up"])], []
    known += [(words, key, sent["compare"].get(key)) for key, words in BASELINES.items()]
    for label, key, count in known:
        if key in accuracy:
            rows.append((label, f"{accuracy[key]:.2%}", "", human_bytes(count) if count else ""))
    for site, share in sorted(
        accuracy["per_site"].items(), key=lambda item: natural_order(item[0])
    )[:20]:
        uplink = human_bytes(sent["up_per_site"].get(site, 0))
        of = f"{tested[site]:,} records" if site in tested else ""
        rows.append((f"at site {site}", f"{share:.2%}", of, uplink))
    columns = ("", "accuracy", "of", "uplink")
    print_table(columns, rows, title=", ".join(facts), caption=caption)


def _print_measured(metric_values: dict[str, Any], title: str) -> None:
    """Print a table of what a model answers, and how well."""
    from fedsurrogate.common.targets.metrics import IN_WORDS, metric_text

    names = list(dict.fromkeys(name for own in metric_values["all"].values() for name in own))
    rows = (
        (output, *(metric_text(name, own.get(name)) for name in names))
        for output, own in metric_values["all"].items()
    )
    columns = ("", *(IN_WORDS.get(name, name) for name in names))
    print_table(columns, rows, title=title, caption=metric_values.get("ranks") or None)


for command in (
    simulate, sweep, plan, settings, init, run, watch, runs, stop, report, refit, evaluate, survey, export, log,
    sample_data,
):  # fmt: skip
    app.command()(command)
# Started by containers and by Flower, or once in the life of a federation: no person looks for them.
app.command(name="app", hidden=True)(run_app)
app.command(
    hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(superlink)
for name, text, members in (
    (
        "sites",
        "Certificates, keys and kits of sites, and who is connected.",
        {
            "list": sites, "accept": accept, "certs": certs, "kit": kit, "register": register,
            "unregister": unregister, "key": show_key,
        },
    ),
    (
        "approval",
        "What people sign before a run, and the record of what was done.",
        {"propose": propose, "approve": approve, "key": approver, "log": audit_log},
    ),
    (
        "offline",
        "Runs whose messages are files (offline exchange).",
        {"request": request, "learn": learn, "exchange": exchange},
    ),
):  # fmt: skip
    app.add_typer(group := new_app(text), name=name)
    for member, function in members.items():
        group.command(member)(function)


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
