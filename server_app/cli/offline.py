"""The `coordinator offline` commands, for sites without a network connection, and `sites key`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import console

from .options import MetricsAsJson, RunSettings
from .proposals import ProposalFile, settings_of

if TYPE_CHECKING:
    from fedsurrogate.common.settings.base import Scalar

Folder = Annotated[
    Path,
    typer.Argument(
        help="The folder of `coordinator sites certs`; it holds the key, coordinator.key."
    ),
]


def key(folder: Folder) -> None:
    """Show the public key that verifies this coordinator's requests: the sites' setting
    coordinator-key.

    This command or `coordinator sites certs` makes the private key when it is missing. It stays in the
    folder.
    """
    from ..deployment.request_key import make_request_key, request_public_key

    make_request_key(folder)
    print(request_public_key(folder))


def request(
    folder: Folder,
    out: Annotated[Path, typer.Option()],
    run_config: RunSettings = None,
    days: Annotated[int, typer.Option(min=0, max=3650)] = 90,
    proposal: ProposalFile = None,
) -> None:
    """Write a signed request for sites without a network connection; `site offline release` replies with a
    bundle.

    Args:
        out: The file to write, for all sites.
        days: Days until the request expires; 0: it never expires.
    """
    from ..deployment.request_key import read_request_key
    from ..exchange import make_request
    from ..runs.presets import typed_settings

    settings = settings_of(proposal, typed_settings(run_config))
    _check_and_note(folder, "request", settings)
    made = make_request(settings, out, read_request_key(folder), days)
    until = f", valid until {made.expires}" if made.expires else ""
    console.print(f"request {made.id}{until}: {out}")


def learn(
    request: Path,
    bundles: Annotated[list[Path] | None, typer.Argument()] = None,
    keys: Path | None = None,
    unsigned: Annotated[list[Path] | None, typer.Option(metavar="RUN_OR_FILE")] = None,
    run_config: RunSettings = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Learn a head from the files with which sites replied to a request. Refused files are listed;
    the others are used.

    Only files signed by a listed key are used, unless you vouch for them: --unsigned names a run
    whose surrogates arrived over your authenticated network, or a single surrogate. Of the settings
    only those of this machine may be given: output-dir, device, quorum, sites.

    Args:
        request: The request file that the sites have received.
        bundles: Bundles; used only if a key in --keys signed them.
        keys: File with the sites' public keys, one per line, as `site offline key` prints them.
        unsigned: A run whose unsigned surrogates are used too, or one surrogate (.pb); may be given
            several times.
    """
    from ..exchange import learn_from_files
    from ..report.quality_view import privacy_line
    from ..runs.presets import typed_settings
    from ..runs.reader import read_run

    local = typed_settings(run_config)
    runs = [each for each in unsigned or () if each.is_dir()]
    files = [each for each in unsigned or () if each not in runs]
    folder = learn_from_files(request, bundles or (), keys, local, runs, files)
    run = read_run(folder)
    if as_json:
        print(json.dumps(run.metrics, indent=2))
        return
    for site in run.sites:
        console.print(
            f"{site.status:<10}{site.name}  {'; '.join(why for _, why in site.troubles)}".rstrip()
        )
    console.print(f"privacy {privacy_line(run.metrics)}")
    console.print(str(folder))


def exchange(
    folder: Folder,
    keys: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option(metavar="FOLDER")],
    run_config: RunSettings = None,
    days: Annotated[int, typer.Option(min=1, max=365)] = 30,
    proposal: ProposalFile = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Run a federation whose messages are files (offline exchange): every method, also in rounds, and
    secure aggregation.

    Each step writes one file a site, OUT/02-north.request. At the site, `site offline release
    02-north.request --out 02-north.reply` answers it. The command waits for the replies in OUT, and
    keeps running until the end. An empty file 02-north.lost tells that no reply will come.

    Args:
        keys: File with the public keys of all sites, as `site offline key` prints them.
        out: A new folder, for the files of all messages.
        days: Days that sites have to answer one step.
    """
    from ..exchange import run_by_files
    from ..lifecycle.before_start import Interrupted, goodbye, interruptible
    from ..runs.presets import typed_settings
    from .control import show_result

    def show(line: str) -> None:
        console.print(line)

    overrides = settings_of(proposal, typed_settings(run_config))
    _check_and_note(folder, "start", overrides)
    try:
        with interruptible():
            made = run_by_files(overrides, folder, keys, out, days, show)
    except Interrupted as stop:
        # Each run needs a folder of its own for its messages.
        fresh = next(
            name for n in count(2) if not (name := out.with_name(f"{out.name}-{n}")).exists()
        )
        words = ["--keys", str(keys), "--out", str(fresh), "--days", str(days)]
        if proposal is not None:
            words += ["--proposal", str(proposal)]
        own = {key: value for key, value in overrides.items() if key != "approval"}
        for line in goodbye(stop, ["coordinator", "offline", "exchange", str(folder), *words], own):
            show(line)
        raise typer.Exit(stop.exit_code) from None
    show_result(made, made.parent, as_json, True)


def _check_and_note(folder: Path, action: str, settings: Mapping[str, Scalar]) -> None:
    """Check that enough people have signed what sites are about to be asked, and note it."""
    from ..deployment.audit_log import note
    from ..deployment.submit import facts_of_run
    from .proposals import check_run_signed

    check_run_signed(settings, folder / "ca.crt")
    note(folder, action, facts_of_run(settings))
