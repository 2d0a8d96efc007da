"""The SuperLink of a coordinator: its database holds what sites send."""

from __future__ import annotations

import os

import pytest

from fedsurrogate.server_app.deployment import superlink


@pytest.mark.parametrize("arguments", [["--insecure"], ["--fleet-api-address", "unix:/run/fleet"]])
def test_its_files_are_for_its_account_only(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    class Flower:
        def superlink(self, *_: object) -> None:
            seen.append(os.umask(0o022))

    monkeypatch.setattr(superlink, "flower", Flower)
    monkeypatch.setattr(superlink, "table_of_registered", lambda _: None)
    monkeypatch.setattr(superlink, "folder_of_key", lambda _: None)
    before = os.umask(0o022)
    try:
        superlink.serve(arguments)
    finally:
        os.umask(before)
    assert seen == [0o077]
