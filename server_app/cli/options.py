"""Options of `coordinator` commands only, and what a shell completes in them; others are in
`fedsurrogate.common.command_line`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import complete_settings


def complete_keys(incomplete: str) -> list[tuple[str, str]]:
    """Settings of a run, and their meaning."""
    from fedsurrogate.common.help import descriptions

    return [(row.key, row.text) for row in descriptions() if row.key.startswith(incomplete)]


def complete_methods(incomplete: str) -> list[tuple[str, str]]:
    """Names of methods, and their papers."""
    from fedsurrogate.common.methods import METHODS

    return [(name, spec.paper) for name, spec in METHODS.items() if name.startswith(incomplete)]


def complete_presets(incomplete: str) -> list[tuple[str, str]]:
    """Names of presets, and their notes."""
    from ..runs.presets import preset_notes, presets

    return [(name, preset_notes(name)[0]) for name in presets() if name.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Run folders, newest first: those in the folder that is typed so far, or in runs/."""
    from ..runs.reader import run_folders

    typed = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    folders = dict.fromkeys(
        str(folder) for place in (typed, Path("runs")) for folder in run_folders(place)
    )
    return [folder for folder in folders if folder.startswith(incomplete)]


RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--run-config",
        "--set",
        metavar="'key=value ...'",
        help="Settings of the run, a file of them (TOML), or a preset (`coordinator settings --preset "
        "all` lists them); may be given several times, later ones win.",
        autocompletion=lambda incomplete: [
            *complete_presets(incomplete),
            *complete_settings(incomplete),
        ],
    ),
]
MetricsAsJson = Annotated[bool, typer.Option("--json", help="Print metrics.json instead of lines.")]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder.",
        exists=True,
        file_okay=False,
        autocompletion=complete_runs,
    ),
]
