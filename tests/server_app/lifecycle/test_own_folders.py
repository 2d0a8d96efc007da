"""The printed command to continue a run works wherever it is typed: its folders are absolute."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.lifecycle.before_start import (
    CHECKPOINTS,
    continuation,
    go_on,
    own_folders,
)

NAMES = st.text(st.characters(categories=("L", "N", "Zs"), include_characters="-_."), min_size=1)


@given(name=NAMES.filter(lambda name: name.strip(" .") and len(name.encode()) < 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_printed_command_names_the_same_folder_wherever_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / name).mkdir(parents=True, exist_ok=True)
    elsewhere.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    kind = parse_run({"method": "fedavg"}).plan.kind
    (here / name / CHECKPOINTS[kind]).write_bytes(b"")
    command = go_on(["coordinator", "run"], {"method": "fedavg"}, Path(name))
    assert command.startswith("continue it: coordinator run -c ")
    monkeypatch.chdir(elsewhere)
    typed = parse_overrides([shlex.split(command)[-1]])
    assert Path(str(typed["resume"])) == here / name


CONTAINER = Path("/runs-of-a-container")


@given(name=NAMES.filter(lambda name: name.strip(" .") and len(name.encode()) < 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_reader_on_the_host_is_given_the_path_inside_the_container(
    tmp_path: Path, name: str
) -> None:
    """`runs/` of the coordinator's folder is /runs inside, where `coordinator run` is typed."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / CHECKPOINTS["rounds"]).write_bytes(b"")
    for simulated, output_dir, expected in (
        (False, CONTAINER, CONTAINER / name),
        (False, tmp_path, folder),
        # A simulation's folder that was moved continues where it is.
        (True, CONTAINER, folder),
    ):
        config = {"method": "fedavg", "output-dir": str(output_dir)}
        (folder / "manifest.json").write_text(
            json.dumps({"config": config, "simulated": simulated})
        )
        printed = continuation(folder)
        assert printed.startswith("continue it: ")
        typed = parse_overrides([shlex.split(printed)[-1]])
        assert Path(str(typed["resume"])) == expected


def test_a_relative_folder_is_that_of_who_types_it_not_that_of_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = {"output-dir": str(tmp_path / "runs"), "resume": str(tmp_path / "runs/one")}
    assert own_folders("runs", "runs/one") == expected
    assert "resume" not in own_folders("runs", "")
