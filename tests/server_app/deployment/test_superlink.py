"""The SuperLink of a coordinator: its database holds what sites send, and it fetches nothing."""

from __future__ import annotations

import os

import pytest

from fedsurrogate.common.flower.environment import QUIET
from fedsurrogate.server_app.deployment import superlink


class Seen:
    """What Flower's SuperLink finds when it starts."""

    mask: int
    environment: dict[str, str]

    def superlink(self, *_: object) -> None:
        Seen.mask = os.umask(0o022)
        Seen.environment = dict(os.environ)


def serve(arguments: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Start it with these variables, and no others of those that keep Flower quiet."""
    for name in QUIET:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(superlink, "flower", Seen)
    monkeypatch.setattr(superlink, "table_of_registered", lambda _: None)
    monkeypatch.setattr(superlink, "folder_of_key", lambda _: None)
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
