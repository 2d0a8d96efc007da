"""Where state and features of a user are kept, and what happens where no file can be made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedsurrogate.client_app.cli.join import check_settings
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.requests import _open_log
from fedsurrogate.common.errors import StorageError
from fedsurrogate.common.machine import CACHE, STATE, home_folder, user_folder, why_not_writable
from fedsurrogate.server_app.lifecycle.before_start import site_folders

# A folder that nobody can make, not even root.
NOWHERE = "/proc/nowhere"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (STATE, CACHE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HOME", NOWHERE)


def test_folders_are_below_the_home_folder_or_where_the_variables_say(
    home: Path, tmp_path: Path
) -> None:
    assert user_folder(STATE) == home / ".local/state/fedsurrogate"
    assert user_folder(CACHE) == home / ".cache/fedsurrogate"
    assert user_folder(STATE, {STATE: str(tmp_path)}) == tmp_path / "fedsurrogate"
    assert user_folder(STATE, {STATE: "relative"}) == home / ".local/state/fedsurrogate"


def test_a_ledger_of_an_earlier_version_is_not_lost_to_a_variable(
    home: Path, tmp_path: Path
) -> None:
    earlier = home / ".local/state/fedsurrogate"
    earlier.mkdir(parents=True)
    assert user_folder(STATE, {STATE: str(tmp_path)}) == earlier
    (tmp_path / "fedsurrogate").mkdir()
    assert user_folder(STATE, {STATE: str(tmp_path)}) == tmp_path / "fedsurrogate"


def test_a_user_without_a_home_folder_gets_an_error_and_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    assert why_not_writable(home_folder() / "x") or os.access("/", os.W_OK)


@pytest.mark.usefixtures("nowhere")
def test_a_real_site_names_the_setting_and_the_variable() -> None:
    node = parse_node_config({"data": "digits"})
    for check in (lambda: check_settings(node), lambda: _open_log(node)):
        with pytest.raises(StorageError) as error:
            check()
        text = str(error.value)
        for part in (
            f"state-dir = '{NOWHERE}/.local/state/fedsurrogate'",
            "set state-dir in the node-config",
            STATE,
        ):
            assert part in text
        assert "\n" not in text


@pytest.mark.usefixtures("nowhere")
def test_simulated_sites_get_private_folders_that_are_removed() -> None:
    before = dict(os.environ)
    with site_folders() as warnings:
        node = parse_node_config({})
        assert why_not_writable(node.state) == why_not_writable(node.cache) == ""
        assert node.state.parents[1].stat().st_mode & 0o777 == 0o700
        folder = node.state
    assert dict(os.environ) == before
    assert not folder.exists()
    assert [STATE in warnings[0], CACHE in warnings[1]] == [True, True]


@pytest.mark.usefixtures("home")
def test_folders_of_a_user_who_can_write_are_used_without_a_warning() -> None:
    with site_folders() as warnings:
        assert warnings == []
        assert STATE not in os.environ
