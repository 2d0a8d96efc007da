"""A simulation whose disk takes no more says so in one line, and leaves no half of a run or a page."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedsurrogate.server_app.deployment.submit import APP_FOLDER

KIB = 2**10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest", "status"), [(1, None), (100, None), (270, "ok")], ids=["manifest", "space", "page"]
)
def test_a_disk_without_room_ends_in_one_line(
    largest: int, status: str | None, tmp_path: Path
) -> None:
    """The manifest, the space for the last words, and the page are too large in turn."""
    words = ["simulate", "--sites", "2", "--engine", "local", "-c", f'output-dir="{tmp_path}/runs"']
    done = subprocess.run(
        [sys.executable, "-m", "fedsurrogate.server_app.cli.main", *words],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(APP_FOLDER), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (largest * KIB, largest * KIB)
        ),
    )
    folders = [*tmp_path.glob("runs/*-fedpft-*")]
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    if status is None:
        assert done.returncode == 1
        assert "error: File too large; make room on the disk" in done.stderr
        assert folders == []
        return
    (folder,) = folders
    assert (done.returncode, json.loads((folder / "metrics.json").read_text())["status"]) == (
        0,
        status,
    )
    assert "no report: " in said
    assert "report.html" not in done.stdout
    assert not (folder / "report.html").exists()
    assert done.stdout.splitlines()[-1] == str(folder)
