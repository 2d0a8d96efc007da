"""Options of `coordinator` commands only, what a shell completes in them, and commands and options
that are no more; others are in `fedsurrogate.common.command_line`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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


Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Named settings to start from; `coordinator preset` lists them.",
        autocompletion=complete_presets,
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


_QUEUE = (
    "the queue of runs is gone, and no release had it; cron, at or systemd-run start `coordinator "
    "run --proposal FILE` at a time, and the SuperLink starts one run after another"
)
_CRATE = (
    "--format rocrate is gone, and fedsurrogate 0.2.0 was the last with it; `coordinator report` and "
    "`--format card` write what a reader needs, and any archiver packs the folder of the run"
)
_GRAPHS = (
    "TorchScript and torch.export are gone, and fedsurrogate 0.2.0 was the last with them; "
    "`--format onnx` writes the same graph for onnxruntime"
)
_TENSORBOARD = (
    "`coordinator tensorboard` is gone, and fedsurrogate 0.2.0 was the last with it; `coordinator "
    "mlflow RUN` logs a run, and `coordinator metrics` shows one that goes on to Prometheus"
)
GONE = {
    "enrol": "`coordinator accept REQUEST --folder FOLDER` takes the place of enrol, and registers the key",
    "queue": _QUEUE,
    "tensorboard": _TENSORBOARD,
    "run --queue": _QUEUE,
    "run --at": _QUEUE,
    "export --format rocrate": _CRATE,
    "export --format torchscript": _GRAPHS,
    "export --format torch-export": _GRAPHS,
}
