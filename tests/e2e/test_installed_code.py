"""Whoever commands the coordinator can send other code with a run; a site that starts its own app never runs it."""

import json
import shutil
from pathlib import Path

from server_app.submit import APP_FOLDER
from tests.e2e.processes import federation

SETTINGS = 'fedpft.covariance="spherical" sites=1 deadline=400.0 head.min-steps=50 head.epochs=1'
THEFT = """
from pathlib import Path
Path({trace!r}).write_text("the code of the run was started")
"""


def app_with_other_code(folder: Path, trace: Path) -> Path:
    """The app as a run would send it, its site's half with a line of its own."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(APP_FOLDER / name, folder)
    for room in ("common", "client_app", "server_app", "strategies"):
        shutil.copytree(APP_FOLDER / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "client_app" / "__init__.py").open("a") as file:
        file.write(THEFT.format(trace=str(trace)))
    return folder


def test_code_that_a_run_brings_along_is_never_started(tmp_path: Path) -> None:
    trace, node = tmp_path / "trace", f'data="digits" cache-dir="{tmp_path}/cache" state-dir="{tmp_path}/state"'
    app = app_with_other_code(tmp_path / "app", trace)
    output = tmp_path / "runs"
    for installed in (True, False):
        with federation(tmp_path / f"flower-{installed}", [node], isolated=installed) as running:
            run = running.submit(f'{SETTINGS} output-dir="{output}"', tmp_path, app)
            assert running.wait(run) == "finished:completed"
        # Flower's own way starts it, so the trace is one that can be left.
        assert trace.exists() is not installed
    used = [json.loads((folder / "metrics.json").read_text())["sites"]["used"] for folder in output.iterdir()]
    assert used == [1, 1]
