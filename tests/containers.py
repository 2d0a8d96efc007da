"""Docker or Podman, with the image of the demo: commands for the tests that need containers."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

IMAGE = os.environ.get("IMAGE", "fedsurrogate:demo")


def _works(*command: str) -> bool:
    found = shutil.which(command[0]) is not None
    return (
        found
        and subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    )


@cache
def engine() -> tuple[str, list[str]]:
    """The engine, "docker" or "podman", and its compose command, as deploy/demo.sh chooses them.
    Skips without them.
    """
    for name in ("docker", "podman"):
        if not _works(name, "info"):
            continue
        for compose in ([name, "compose"], [f"{name}-compose"], ["podman-compose"]):
            if _works(*compose, "version"):
                if not _works(name, "image", "inspect", IMAGE):
                    pytest.skip(f"needs the image {IMAGE}; make demo-compose builds it")
                if not _works(name, "run", "--rm", "--init", "--network", "none", IMAGE, "true"):
                    pytest.skip(f"{name} starts no container here")
                return name, compose
    pytest.skip("needs Docker or Podman, running, and its compose command")


def run(*command: str, cwd: Path | None = None, check: bool = True, seconds: float = 600) -> str:
    """Run a command of an engine, and return all its output."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout
    return done.stdout
