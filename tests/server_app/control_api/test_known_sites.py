"""The list of sites: names of keys, versions, and keys that the table does not name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.common.flower.interface import FlowerNode
from fedsurrogate.common.security.documents import key_fingerprint
from fedsurrogate.common.security.registrations import Registration, write_table
from fedsurrogate.server_app import control_api
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.runs.state import SiteState


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Keys by name; the SuperLink knows four, and the table of registered sites names north and
    south alone.
    """
    issue(tmp_path, ("127.0.0.1",), ("north", "south", "west"))
    found = {
        name: (tmp_path / "sites" / name / "site.pub").read_text().strip()
        for name in ("north", "south", "west")
    }
    write_table(
        tmp_path / "registered.json",
        {name: Registration(found[name], at) for at, name in ((1, "north"), (2, "south"))},
    )
    monkeypatch.setattr(control_api, "table_file", lambda folder: tmp_path / "registered.json")
    nodes = [
        FlowerNode(at, name.encode(), online=online, revoked=not online, heartbeat_interval=30.0)
        for at, name, online in (
            (1, "north", True),
            (2, "south", True),
            (3, "west", False),
            (4, "", True),
        )
    ]
    monkeypatch.setattr(
        control_api,
        "_key",
        lambda raw: key_fingerprint(found[raw.decode()].encode()) if raw else "",
    )

    @contextmanager
    def control(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(nodes=lambda: nodes)

    monkeypatch.setattr(control_api, "flower", lambda: SimpleNamespace(control=control))
    return {name: key_fingerprint(key.encode()) for name, key in found.items()}


def test_keys_outside_the_table_are_named_by_their_first_digits(
    keys: dict[str, str], tmp_path: Path
) -> None:
    found = control_api.known_sites(tmp_path, tmp_path / "runs", "127.0.0.1:9", None)
    assert [site.name for site in found] == ["north", "south", f"key {keys['west'][:8]}", "node 4"]
    assert [site.health for site in found] == ["connected", "connected", "key revoked", "connected"]


def test_a_version_is_that_of_the_last_run_of_the_site(
    keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(name: str, version: str) -> dict[str, SiteState]:
        return {name: SiteState(name, fate="used", version=version)}

    runs = [
        state("north", ""),
        state("north", "0.2.0"),
        state("south", "0.1.0") | state("north", "0.1.0"),
    ]
    monkeypatch.setattr(control_api, "run_folders", lambda output: list(range(len(runs))))
    monkeypatch.setattr(control_api, "_sites_of", lambda run: runs[run])
    found = {
        site.name: site
        for site in control_api.known_sites(tmp_path, tmp_path / "runs", "127.0.0.1:9", None)
    }
    assert (found["north"].version, found["north"].last_run) == ("0.2.0", "used")
    assert (found["south"].version, found["south"].last_run) == ("0.1.0", "")
