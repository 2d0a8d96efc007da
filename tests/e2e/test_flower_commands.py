"""Flower's own commands, as a Flower user types them in a checkout: `flwr run`, `list` and `log`."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.server_app.deployment.submit import (
    APP_FOLDER,
    DONE,
    PACKED,
    flower_environment,
    superlink,
)
from tests.children import ran
from tests.e2e.processes import PATIENCE, until

pytestmark = pytest.mark.slow
FLAGS = ["--federation-config", "num-supernodes=2 client-resources-num-cpus=1"]
QUICK = 'head.min-steps=20 output-dir="runs"'


class Checkout:
    """A copy of the checkout, in which commands are typed, with a SuperLink and a FLWR_HOME of its own.

    Attributes:
        folder: Of the copy.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        self._environment = flower_environment(home) | {"OMP_NUM_THREADS": "1"}

    def type(self, *words: str) -> str:
        """The output of a command of Flower, without its colours."""
        done = ran(words, cwd=self.folder, env=self._environment, timeout=PATIENCE)
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        assert done.returncode == 0, text
        return text

    def run(self, settings: str, *more: str) -> tuple[str, str]:
        """Type `flwr run .`; the id of the run, and the output."""
        text = self.type("flwr", "run", ".", *more, "--run-config", settings, *FLAGS)
        (run,) = re.findall(r"Successfully started run (\d+)", text)
        return run, text

    def status(self, run: str) -> str:
        """What `flwr list` shows of a run."""
        listed = self.type("flwr", "list", "--run-id", run, "--format", "json")
        (row,) = json.loads(listed[listed.index("{") :])["runs"]
        return str(row["status"])

    def folder_in(self, text: str) -> Path:
        """The run folder that a log names."""
        (found,) = set(re.findall(r"Run folder:\s+(\S+)", text))
        return Path(found)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    pytest.importorskip("ray")
    home = tmp_path_factory.mktemp("flower")
    copy = tmp_path_factory.mktemp("checkout") / "fedsurrogate"
    for name in (*PACKED, "fedsurrogate"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(APP_FOLDER / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(APP_FOLDER / name, copy / name)
    before = Path.cwd()
    # A relative output-dir is relative to the folder in which the SuperLink was started.
    os.chdir(copy)
    try:
        with superlink(home, flower_environment(home) | {"OMP_NUM_THREADS": "1"}) as control:
            (home / "config.toml").write_text(
                '[superlink]\ndefault = "here"\n\n'
                f'[superlink.here]\naddress = "{control}"\ninsecure = true\n'
            )
            yield Checkout(copy, home)
    finally:
        os.chdir(before)


def result(folder: Path) -> dict[str, Any]:
    """What a run has left."""
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


def test_a_bare_run_names_its_folder_in_its_log_and_one_that_cannot_start_says_why(
    checkout: Checkout,
) -> None:
    """The second begins while the first runs, and is streamed."""
    bare, text = checkout.run(QUICK)
    assert "Run folder" not in text
    run, streamed = checkout.run(f"{QUICK} epsilon=-1.0", "--stream")
    until(lambda: checkout.status(bare).startswith("finished"))
    text = checkout.type("flwr", "log", bare, "--show")
    folder = checkout.folder_in(text)
    assert folder.parent == checkout.folder / "runs", "where the user looks"
    assert (result(folder)["status"], result(folder)["sites"]["used"]) == ("ok", 2)
    assert str(folder / "report.html") in text
    assert (folder / "report.html").is_file()
    assert checkout.status(bare) == DONE
    folder = checkout.folder_in(streamed)
    assert result(folder)["status"] == "failed"
    assert "epsilon" in result(folder)["failure"]
    assert "epsilon" in (folder / "report.html").read_text()
    assert checkout.status(run) == "finished:failed"
