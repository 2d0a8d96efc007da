"""Options of `coordinator` commands alone; those of both commands are in `common.command_line`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[
    str, typer.Option("--preset", metavar="NAME", help="Settings to begin with; `coordinator preset` lists them.")
]
MetricsAsJson = Annotated[bool, typer.Option("--json", help="Print metrics.json instead of lines.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", exists=True, file_okay=False)]
