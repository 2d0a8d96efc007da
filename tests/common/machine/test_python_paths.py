"""Paths with blanks, quotes, dollar signs and umlauts on the way to Ray's workers, and what is said
about them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import RAY_JOB, quoted_python
from fedsurrogate.common.machine import LONGEST, environment_warning, ray_folder

PATHS = some.text(
    some.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1
).map("/".__add__)


def executable(variables: dict[str, str]) -> str:
    """Python in a job's settings, as Ray reads them."""
    return str(
        RuntimeEnv(
            **JobConfig.from_json(json.loads(variables[RAY_JOB])).runtime_env
        ).py_executable()
    )


@settings(max_examples=25, deadline=None)
@given(PATHS)
def test_ray_finds_python_at_any_path(path: str) -> None:
    variables = quoted_python(path, {})
    word = executable(variables) if variables else path
    # As in ray._private.runtime_env.context.
    line = " ".join(["printf", "%s", word])
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert done.stdout == path.encode()


def test_ray_merges_the_path_of_python_with_what_flower_gives_it() -> None:
    """Flower gives Ray variables of the environment only; both must hold."""
    from ray._private.worker import _merge_runtime_env

    given_by_us = JobConfig.from_json(
        json.loads(quoted_python("/a b/python", {})[RAY_JOB])
    ).runtime_env
    merged = _merge_runtime_env(given_by_us, {"env_vars": {"PYTHONPATH": "x"}})
    assert merged == {"py_executable": "'/a b/python'", "env_vars": {"PYTHONPATH": "x"}}


def test_ray_needs_nothing_for_a_plain_path_and_settings_of_a_job_stay() -> None:
    assert quoted_python("/opt/venv/bin/python3.11", {}) == {}
    assert quoted_python("/a b/python", {RAY_JOB: "{}"}) == {}


@pytest.mark.parametrize("path", ["/opt/venv", "/home/jörg/été_1.0@x+y=z", "/srv/研究/.venv"])
def test_nothing_is_said_about_a_path_that_works(path: str) -> None:
    assert environment_warning(path) == ""


@pytest.mark.parametrize(
    ("path", "what"),
    [("/mein projekt ä", "' '"), ("/a,b", "','"), ("/100%", "'%'"), ("/a'b", '"\'"')],
)
def test_a_path_with_a_blank_is_named_with_what_to_do(path: str, what: str) -> None:
    found = environment_warning(path)
    assert repr(path) in found
    assert f"contains {what}" in found
    assert "coordinator simulate" in found
    assert "\n" not in found


def test_the_check_of_the_environment_is_silent_where_all_is_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedsurrogate.common.machine"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, bool(done.stderr)) == ("", bool(environment_warning(sys.prefix)))


def test_ray_chooses_itself_where_its_choice_serves() -> None:
    assert ray_folder({}) == ray_folder({"TMPDIR": "/tmp"}) == {}


@pytest.mark.parametrize("folder", ["mit blank", "ä", "a" * (LONGEST + 1), "it's", "$HOME"])
def test_another_folder_is_given_for_one_that_ray_cannot_use(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert ray_folder({"TMPDIR": str(tmp_path / folder)}, ("/proc/nowhere", "/tmp")) == {
        "RAY_TMPDIR": "/tmp"
    }


def test_a_folder_that_a_person_names_for_ray_stays() -> None:
    assert ray_folder({"TMPDIR": "/a b", "RAY_TMPDIR": "/tmp"}) == {}


def test_a_folder_that_is_not_there_or_not_a_folder_is_left_out() -> None:
    assert ray_folder({"TMPDIR": "/proc/nowhere"}, ("/dev/null", "/tmp")) == {"RAY_TMPDIR": "/tmp"}


def test_without_any_folder_one_line_names_the_variable_and_another_way() -> None:
    with pytest.raises(RunError) as error:
        ray_folder({"TMPDIR": "/a b"}, ("/proc/nowhere",))
    assert "set RAY_TMPDIR to one, or use --engine local" in str(error.value)
    assert "/a b" in str(error.value)
