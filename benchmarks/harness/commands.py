"""Commands of the project, and parts of a benchmark, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.samples import ROOT

MODULES = {
    "coordinator": "fedsurrogate.server_app.cli.main",
    "site": "fedsurrogate.client_app.cli.main",
}


def run_command(command: str, *words: str) -> str:
    """Run a command of the project as users do, from the checkout.

    Args:
        command: "coordinator" or "site".
        words: what follows it.

    Returns:
        What it prints. Its errors and progress are shown.

    Raises:
        SystemExit: where it fails.
    """
    full = [sys.executable, "-m", MODULES[command], *words]
    done = subprocess.run(full, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} {words[0]} ended with exit code {done.returncode}")
    return done.stdout


def json_of(command: str, *words: str) -> Any:
    """The result of a command that has the option --json. Arguments as for `run_command`."""
    return json.loads(run_command(command, *words, "--json"))


def text_of(settings: Mapping[str, Any]) -> str:
    """Settings as in `-c`.

    Example:
        >>> text_of({"data": "digits", "alpha": 0.1})
        'data="digits" alpha=0.1'
    """
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def start_child(script: str, *words: str) -> "subprocess.Popen[str]":
    """Start a script in a process of its own, such as one whose memory is measured.

    Args:
        script: its file, usually `__file__`.
        words: its arguments.
    """
    command, own = [sys.executable, script, *words], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True)


def result_of(child: "subprocess.Popen[str]") -> Any:
    """What a child printed last, as JSON. Raises AssertionError where it fails."""
    out = child.communicate()[0]
    assert child.returncode == 0, out
    return json.loads(out.splitlines()[-1])
