"""The SuperLink of a coordinator: its database holds what sites send, it fetches nothing, only its account
reaches what asks for no key; and without one no run is submitted.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET
from fedsurrogate.common.flower.interface import SuperLinkArguments
from fedsurrogate.server_app.deployment import submit, superlink
from fedsurrogate.server_app.deployment.addresses import check_socket, usual_control
from tests import commands


class Seen:
    """What Flower's SuperLink finds when it starts."""

    mask: int
    environment: dict[str, str]
    arguments: list[str]

    def parse_superlink(self, arguments: list[str]) -> SuperLinkArguments:
        return flower().parse_superlink(arguments)

    def superlink(self, arguments: list[str], *_: object) -> None:
        Seen.mask = os.umask(0o022)
        Seen.environment, Seen.arguments = dict(os.environ), arguments


def serve(arguments: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Start it with these variables, and no others of those that keep Flower quiet."""
    for name in QUIET:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(superlink, "flower", Seen)
    monkeypatch.setattr(superlink, "table_of_registered", lambda _: None)
    before = os.umask(0o022)
    try:
        superlink.serve(arguments)
    finally:
        os.umask(before)


@pytest.mark.parametrize("arguments", [["--insecure"], ["--fleet-api-address", "unix:/run/fleet"]])
def test_its_files_are_for_its_account_only(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(arguments, monkeypatch)
    assert Seen.mask == 0o077


def test_it_fetches_no_package_for_a_run_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator without internet, whose shell has none of Flower's variables."""
    serve(["--insecure"], monkeypatch)
    assert Seen.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert QUIET.items() <= Seen.environment.items()
    serve(["--insecure"], monkeypatch, FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="0")
    assert Seen.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "0"


def test_without_addresses_it_listens_where_the_commands_of_its_account_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(["--insecure"], monkeypatch)
    assert usual_control() in Seen.arguments
    folder = Path(usual_control().removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    named = f"unix:{tmp_path}/own/control:9093"
    serve(["--insecure"], monkeypatch, FEDSURROGATE_CONTROL=named)
    assert named in Seen.arguments
    assert usual_control() == named


PORTS = ("127.0.0.1:9093", "0.0.0.0:9093", "[::1]:9093", "localhost:1", "fl.example.org:9093")


@pytest.mark.parametrize(
    "words",
    [
        *([option, port] for option in ("--control-api-address", "--serverappio-api-address") for port in PORTS),
        [f"--control-api-address={PORTS[0]}"],
        ["--exec-api-address", PORTS[0]],
        ["--enable-http-api"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_api_that_other_accounts_could_reach_does_not_start(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flower().__class__.__name__ != "Flower134" and not words[0].startswith(
        ("--control", "--server")
    ):
        pytest.skip("the newest Flower has no such option")  # fmt: skip
    with pytest.raises(ConfigError, match="every user of this machine may open a port"):
        serve(["--insecure", *words], monkeypatch)


@given(mode=st.integers(0o700, 0o777))
def test_a_folder_that_others_may_write_holds_no_socket(
    mode: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("link")
    folder.chmod(mode)
    if mode & 0o022:
        with pytest.raises(ConfigError, match="must belong to this account"):
            check_socket(f"unix:{folder}/control:9093")
    else:
        check_socket(f"unix:{folder}/control:9093")


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can give a folder to another account")
def test_a_folder_of_another_account_holds_no_socket(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match="must belong to this account"):
        check_socket(f"unix:{tmp_path}/control:9093")


def test_a_second_superlink_does_not_take_the_place_of_the_first(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/control:9093"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(f"{tmp_path}/control:9093")
        # What a killed one has left is no other one.
        check_socket(address)
        first.listen()
        with pytest.raises(ConfigError, match="in use"):
            check_socket(address)
    with pytest.raises(ConfigError, match="at most 107"):
        check_socket(f"unix:{tmp_path}/{'long' * 40}/control:9093")


@pytest.mark.parametrize("command", [("run",), ("survey", "--classes", "a,b")])
def test_without_a_superlink_nothing_is_started(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit, "submit", None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert commands.coordinator(monkeypatch, *command, "--control", address) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert address in line
    assert "no SuperLink listens there" in line
