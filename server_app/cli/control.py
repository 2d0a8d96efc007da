"""The `coordinator superlink`, `app`, `run`, `runs`, `watch`, `stop`, `sites register`, `unregister`
and `list` commands.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsurrogate.common.command_line import Json, console, print_table, stderr_console
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.escapes import human_seconds

from .options import MetricsAsJson, RunSettings, complete_runs
from .proposals import ProposalFile, check_run_signed, keys_of, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..control_api import KnownSite


def _usual_control(address: str) -> str:
    from ..deployment.addresses import usual_control

    return address or usual_control()


Control = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The SuperLink's Control API: unix:/path:NUMBER; this account's own without it.",
        envvar="FEDSURROGATE_CONTROL",
        callback=_usual_control,
    ),
]


def _authority_here(file: Path | None) -> Path | None:
    from ..deployment.federation import certificates_here

    return file or ((credentials := certificates_here()) and credentials / "ca.crt")


Authority = Annotated[
    Path | None,
    typer.Option(
        help="ca.crt, if the SuperLink uses TLS; in the folder of `coordinator init` its own.",
        envvar="FEDSURROGATE_ROOT_CERTIFICATES",
        callback=_authority_here,
    ),
]


# Events that say whether a site could take part; the last one of a site counts.
CHECKED = ("invited", "identified", "rejected", "dropped", "absent")


def superlink(context: typer.Context) -> None:
    """Start Flower's SuperLink so that many sites can reply at once. Takes the arguments of
    flower-superlink; in the folder of `coordinator init` it needs none.

    Example: coordinator superlink --insecure --database superlink.db
    """
    from ..deployment.federation import superlink_here
    from ..deployment.superlink import serve

    serve(context.args or superlink_here())


def app(
    runtime: Annotated[str, typer.Option(metavar="ADDRESS")] = "",
    parent_pid: int | None = None,
) -> None:
    """Run the coordinator's app for every run of a SuperLink with `--isolation process`: the
    installed one, whatever a run brings.

    Example: coordinator app --runtime unix:/runtime/link/app:9091

    Args:
        runtime: The SuperLink's API for its apps.
        parent_pid: Process with which it ends; a SuperLink names itself.
    """
    from ..deployment.addresses import usual_runtime
    from ..deployment.submit import serve

    serve(runtime or usual_runtime(), parent_pid)


def register(
    folder: Path,
    control: Control = "",
    root_certificates: Authority = None,
    wait: Annotated[float, typer.Option(min=0)] = 0.0,
    proposal: ProposalFile = None,
) -> None:
    """Register the keys of all sites with the SuperLink, and store their names: a site has the name
    of its key.

    A registered key stays as it is. A new key under a registered name replaces the old key, which
    is revoked.

    Args:
        folder: The folder that `coordinator sites certs` has made.
        wait: Seconds to wait for a SuperLink that is still starting.
    """
    from ..deployment.audit_log import note
    from ..deployment.submit import check_connection, registration
    from ..deployment.supernodes import register as register_keys

    check_connection(control, root_certificates)
    allowed_by = _check_keys_allowed(folder, "register", None, proposal)
    if new := keys_of(folder, None):
        note(folder, "register", {"sites": new, "allowed_by": allowed_by})
    for site, what in register_keys(folder, control, root_certificates, wait).items():
        console.print(f"{what:<11}{site}")
        if what == "taken back":
            console.print(
                f"{'':<11}this key was revoked, and is never accepted again. To let {site} in with "
                "a new key:"
            )
            for step in again(folder, site, registration(folder, control, root_certificates)):
                console.print(f"{'':<13}{step}")


def again(folder: Path, site: str, register: str) -> list[str]:
    """What to do so that a site whose key was revoked takes part again.

    Args:
        folder: of `coordinator sites certs`.
        site: its name.
        register: the command that registers its key.

    Returns:
        The steps, one line each.
    """
    from ..deployment.kit import CERTIFICATE

    place = shlex.quote(str(folder))
    if (folder / "sites" / site / CERTIFICATE).is_file():
        return [
            f"1. a new key, at the hospital: rm {site}/certificates/site.key; site enrol {site}",
            f"2. here, with its request: coordinator sites accept {site}.csr --folder {place}",
            f"3. at the hospital, next to its folder: tar xzf {site}.tar.gz {site}/certificates",
            "   then start the site again",
        ]
    return [
        f"1. a new key: coordinator sites certs {place} --site {site} --new-key",
        f"2. a new kit for the hospital: coordinator sites kit {place} {site} --coordinator HOST:PORT "
        f"--out {site}-new.tar.gz",
        f"3. its registration: {register}",
        f"4. at the hospital, next to the old folder {site}: tar xzf {site}-new.tar.gz "
        f"{site}/certificates",
        "   then its containers again: docker compose up -d --force-recreate",
    ]


def unregister(
    folder: Path,
    site: str,
    control: Control = "",
    root_certificates: Authority = None,
    proposal: ProposalFile = None,
) -> None:
    """Revoke a site's key, for ever: its holder is disconnected at once and cannot connect again.

    The key goes into the list of revoked keys next to the table of registered sites, so it stays out
    after the SuperLink has lost its database. A new key lets the site in again.

    Args:
        folder: The folder that `coordinator sites certs` has made.
        site: A site that leaves, or whose key is lost or stolen.
    """
    from ..deployment.audit_log import note
    from ..deployment.submit import check_connection
    from ..deployment.supernodes import forget

    check_connection(control, root_certificates)
    allowed_by = _check_keys_allowed(folder, "unregister", site, proposal)
    note(folder, "revoke", {"site": site, "allowed_by": allowed_by})
    known = forget(folder, site, control, root_certificates)
    console.print(f"{'unregistered' if known else 'not known':<14}{site}")
    text = f"its key stays barred; `coordinator sites register` shows how {site} gets a new one"
    stderr_console().print(text)


def _check_keys_allowed(
    folder: Path, action: Literal["register", "unregister"], site: str | None, file: Path | None
) -> list[str]:
    """Who has allowed it; none if nothing would change. Raises ConfigError if the federation asks for
    signatures that the proposal in `file` has not.
    """
    from fedsurrogate.common.security.documents import Proposal, read_proposal

    from ..deployment.audit_log import approvals_needed, check_allowed
    from ..deployment.supernodes import table_file

    rules, keys = table_file(folder).parent, keys_of(folder, site)
    if not keys or (file is None and not approvals_needed(rules)):
        return []
    signed = read_proposal(file) if file else None
    done = Proposal.fresh(action, keys, "this command", 1)
    return check_allowed(rules, action, done.digest(), signed)


def run(
    run_config: RunSettings = None,
    proposal: ProposalFile = None,
    check: Annotated[bool, typer.Option("--check")] = False,
    control: Control = "",
    root_certificates: Authority = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Run a federation with the connected sites, and watch it. Exits with 0 only when it finished.

    With --check every connected site says who it is, and whether policy and budget allow the run;
    nothing is charged. Exits with 0 only if all could take part.

    With --proposal the settings are those that people have signed; others may be added only if they
    change nothing of what sites release. Ctrl-C stops the run. If the terminal is lost, the run
    continues, and `coordinator watch` watches it again.

    Args:
        check: Only show which sites could take part, and why others could not.
    """
    from fedsurrogate.common.flower.environment import is_loopback
    from fedsurrogate.common.help import without_effect
    from fedsurrogate.common.privacy.accounting import budget_warnings
    from fedsurrogate.common.run import parse_run

    from ..deployment.submit import check_connection, options_of, warn
    from ..deployment.submit import run as start
    from ..lifecycle.before_start import (
        Interrupted,
        check_submission,
        goodbye,
        interruptible,
        own_folders,
        with_map_digest,
    )
    from ..monitoring.watch import Progress
    from ..runs.presets import typed_settings

    overrides = settings_of(proposal, typed_settings(run_config))
    if check:
        overrides["check-only"] = True
    config = parse_run(overrides)
    check_connection(control, root_certificates)
    overrides = with_map_digest(overrides) if is_loopback(control) else overrides
    check_run_signed(overrides, root_certificates)
    check_submission(config, control)
    output = Path(config.settings.output_dir).expanduser().absolute()
    output_console, progress, events = stderr_console(), Progress(), list[dict[str, Any]]()

    def show(event: dict[str, Any]) -> None:
        events.append(event)
        output_console.print(progress.line(event))

    budget = budget_warnings(config.settings.epsilon, config.settings.delta)
    warn([*without_effect(config.method, config.settings.flat()), *budget], show)
    settings = overrides | own_folders(config.settings.output_dir, config.settings.resume)
    try:
        with interruptible():
            folder = start(settings, output, control, root_certificates, show)
    except RunError as error:
        if not check:
            raise
        _show_check(events, str(error))
    except Interrupted as stop:
        if stop.terminal_is_lost:
            # Nothing is printed: there is no terminal.
            raise typer.Exit(stop.exit_code) from None
        at = options_of(control, root_certificates)
        for line in goodbye(stop, ["coordinator", "run", *at], settings):
            output_console.print(line)
        raise typer.Exit(stop.exit_code) from None
    if check:
        _show_check(events)
        return
    show_result(folder, output, as_json, root_certificates is not None)


def _show_check(events: Sequence[dict[str, Any]], problem: str = "") -> None:
    """Show which sites could take part; exit with 1 if one could not."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] in CHECKED and "site" in event:
            found.setdefault(event["site"], {}).update(event)
    rows = []
    for site, facts in sorted(found.items()):
        backbone = f"{facts['fingerprint']}, {facts['dimension']}" if "dimension" in facts else ""
        classes = str(facts.get("classes") or "")
        why = facts.get("reason") or (
            "yes" if facts["event"] == "identified" else "it did not reply"
        )
        rows.append((site, facts.get("version", ""), backbone, classes, why))
    print_table(("site", "version", "backbone", "classes", "could take part"), rows)
    if problem:
        console.print(problem)
    if problem or any(facts["event"] != "identified" for facts in found.values()):
        raise typer.Exit(1)


def show_result(folder: Path | None, output: Path, as_json: bool, secured: bool) -> None:
    """Print the result of a run that has finished.

    Args:
        folder: the run folder; None if it is on another machine.
        output: folder of all runs.
        as_json: whether metrics.json is printed instead of lines.
        secured: whether the SuperLink uses TLS.
    """
    from ..deployment.submit import DONE
    from ..runs.metrics import effect_lines, missing_line

    if folder is None:
        console.print(
            f"{DONE}; the run folder is on the machine of the coordinator's app, in {output}"
        )
        return
    if as_json:
        print((folder / "metrics.json").read_text())
        return

    metrics = json.loads((folder / "metrics.json").read_text())
    card, sites = metrics["card"], metrics["sites"]
    if card["state"] != "green":
        console.print(f"{card['state']}: {missing_line(card)}")
    for line in effect_lines(card):
        console.print(line)
    if secured and card["names"] == "claimed":
        console.print(
            "the coordinator's app had no table of registered sites, so the sites chose their "
            "names themselves; start the SuperLink with `coordinator superlink`, or set "
            "FEDSURROGATE_REGISTERED where the app runs"
        )
    came = sites["invited"] + card["never_came"]
    console.print(f"{DONE}, {sites['used']} of {came} sites used; report {folder / 'report.html'}")
    console.print(str(folder))


Handle = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run folder or its name, Flower's number of a run, or 'latest'.",
        autocompletion=complete_runs,
    ),
]
Output = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder of all runs.")]


def runs(
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
    newest: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: Json = False,
) -> None:
    """List runs, newest first: state, progress, sites, age. Takes run folders, and the SuperLink's
    runs if it answers.

    Args:
        newest: Number of runs to list, newest first.
    """
    from ..control_api import overview
    from ..lifecycle.ends import complete_killed
    from ..runs.reader import run_folders

    complete_killed(*run_folders(output)[:newest])
    rows, problem = overview(output, control, root_certificates, newest)
    if problem:
        stderr_console().print(f"only run folders are listed: {problem}", style="yellow")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    began = ("" if row.age is None else f"{human_seconds(row.age)} ago" for row in rows)
    print_table(
        ("run", "Flower's number", "state", "done", "sites", "began"),
        (
            (r.name, r.id, r.state, r.progress, r.sites, ago)
            for r, ago in zip(rows, began, strict=True)
        ),
    )


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", autocompletion=complete_runs)] = "runs",
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS")] = 0.0,
    wait_for_next: Annotated[bool, typer.Option("--next")] = False,
    once: Annotated[bool, typer.Option("--once")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Watch a run until it ends: rounds, accuracy, sites.

    Waits until a run begins if there is none yet. A folder is watched by its files alone, by whoever
    can read them. Ctrl-C ends only this command; the run continues. Exits with 0 when the run
    succeeded (with --once: has not failed), with 1 when it failed or --timeout has passed.

    Example: coordinator watch latest

    Args:
        run: A run folder, or the folder of all runs, which selects the newest run. Or Flower's
            number of a run, the name of its folder in --runs, or 'latest': then the SuperLink is
            asked, too.
        timeout: Stop after this time without a run, or without an event of the run; 0: never.
        wait_for_next: Wait for the next run, and ignore the runs that exist already.
        once: Show the current state of the run, and exit.
        as_json: Print each event as a JSON object on its own line, then metrics.json; with --once
            the state.
    """
    from ..control_api import LATEST
    from ..deployment.submit import attach
    from ..monitoring.watch import Progress, show_once
    from ..monitoring.watch import watch as show
    from ..runs.reader import run_folders

    named = not Path(run).expanduser().exists() and (output / run).is_dir()
    if not (run.isdecimal() or run == LATEST or named):
        folder = Path(run)
        known = run_folders(folder) if wait_for_next else []
        shown = show_once(folder, console, as_json) if once else None
        if not (show(folder, console, timeout, known, as_json) if shown is None else shown):
            raise typer.Exit(1)
        return
    if once or wait_for_next or timeout:
        raise ConfigError(f"{run}: --once, --next and --timeout need a folder, such as {output}")
    output_console, progress = stderr_console(), Progress()

    def print_event(event: dict[str, Any]) -> None:
        output_console.print(progress.line(event))

    try:
        found = attach(run, output, control, root_certificates, print_event)
    except KeyboardInterrupt:
        output_console.print(
            "the run continues; `coordinator watch` watches it again, `coordinator stop` ends it"
        )
        raise typer.Exit(130) from None
    show_result(found, output, as_json, root_certificates is not None)


def stop(
    run: Handle,
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
) -> None:
    """Stop a run at its SuperLink. Its folder records that it was interrupted; runs in rounds can
    be continued.
    """
    from ..deployment.submit import options_of
    from ..deployment.submit import stop as end
    from ..lifecycle.before_start import continuation

    handle = end(run, output, control, root_certificates)
    console.print(f"stopped {handle.folder or handle.id}")
    if handle.folder is not None and (
        how := continuation(handle.folder, options_of(control, root_certificates))
    ):
        console.print(how)


def sites(
    folder: Annotated[Path | None, typer.Argument()] = None,
    output: Output = Path("runs"),
    control: Control = "",
    root_certificates: Authority = None,
    as_json: Json = False,
) -> None:
    """List the sites: name, key, connection, last sign of life, and version and part in the newest
    run.

    The names come from the table of `coordinator sites register`; other keys are shown by their first
    digits. The version is that of a site's last run. Exits with 1 if a registered site is not
    connected.

    Args:
        folder: The folder of certificates and keys, for their names; in the folder of `coordinator
            init` its own.
    """
    from ..control_api import NEWEST, known_sites
    from ..deployment.federation import certificates_here
    from ..lifecycle.ends import complete_killed
    from ..runs.reader import run_folders

    folder = folder or certificates_here()
    complete_killed(*run_folders(output)[:NEWEST])
    rows = known_sites(folder, output, control, root_certificates)
    if as_json:
        print(json.dumps([row.facts() for row in rows], indent=2))
    else:
        columns = ("site", "key", "state", "since", "last seen", "version", "last run")
        print_table(columns, map(_cells, rows))
    if folder is None and any(row.key and row.nameless for row in rows):
        stderr_console().print(
            "a key without a name: `coordinator sites list FOLDER` with the folder of `coordinator sites certs` "
            "shows the names",
            style="yellow",
        )
    if any(row.health not in ("connected", "key revoked") for row in rows):
        raise typer.Exit(1)


def _cells(site: KnownSite) -> tuple[str, ...]:

    now = datetime.now(UTC)
    since, seen = (
        "" if moment is None else human_seconds((now - moment).total_seconds())
        for moment in (site.since, site.seen)
    )
    return (
        site.name,
        site.key[:8],
        site.health,
        since,
        f"{seen} ago" if seen else "",
        site.version,
        site.last_run,
    )
