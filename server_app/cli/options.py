"""Options that several of the coordinator's commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[
    str, typer.Option("--preset", metavar="NAME", help="Settings to begin with; `coordinator preset` lists them.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--run-config",
        metavar="'key=value ...'",
        help="Settings of the run, as in `flwr run`; strings in quotes.",
    ),
]
MetricsAsJson = Annotated[bool, typer.Option("--json", help="Print metrics.json instead of lines.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", exists=True, file_okay=False)]
