"""Ray gets a folder that it can use, whatever TMPDIR is."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.machine import LONGEST, ray_folder


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
