"""Paths with blanks, quotes, dollar signs and umlauts on the way to Ray's workers, and what is said
about them.
"""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv

from fedsurrogate.common.flower.environment import RAY_JOB, quoted_python
from fedsurrogate.common.machine import environment_warning

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
