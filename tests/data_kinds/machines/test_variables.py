"""HOME, TMPDIR, RAY_TMPDIR and RAY_ADDRESS as clusters set them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedsurrogate.common.flower.environment import OWN_CLUSTER
from fedsurrogate.common.machine import (
    CACHE,
    LONGEST,
    STATE,
    VARIABLE,
    ray_folder,
    user_folder,
    warnings_on,
)
from fedsurrogate.server_app.lifecycle.before_start import site_folders

USELESS = ["/proc/nowhere", "/dev/null", "/scratch/" + "a" * LONGEST, "/tmp/with blank", "/tmp/ü"]


@pytest.mark.parametrize("folder", USELESS)
@pytest.mark.parametrize("name", [VARIABLE, "TMPDIR"])
def test_ray_gets_another_folder_for_one_that_it_cannot_use(name: str, folder: str) -> None:
    environment = {name: folder}
    chosen = ray_folder(environment, ("/proc/nowhere", "/tmp"))
    assert chosen == {VARIABLE: "/tmp"}
    # A person who named the folder reads it.
    assert [folder in line for line in warnings_on(environment, chosen)] == [True] * (
        name == VARIABLE
    )


def test_a_folder_for_ray_that_serves_stays() -> None:
    environment = {VARIABLE: "/tmp", "TMPDIR": "/proc/nowhere"}
    assert ray_folder(environment) == {}
    assert warnings_on(environment, {}) == []
    assert ray_folder({VARIABLE: "", "TMPDIR": ""}) == {}


@pytest.mark.parametrize("foreign", ["10.0.0.1:6379", "auto", "ray://head:10001", "local", "bad"])
def test_a_foreign_cluster_is_not_joined(foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    services = pytest.importorskip("ray._private.services")
    monkeypatch.setenv("RAY_ADDRESS", foreign)
    for name, value in OWN_CLUSTER.items():
        monkeypatch.setenv(name, value)
    # No address: Ray starts its own cluster.
    assert services.canonicalize_bootstrap_address(os.environ["RAY_ADDRESS"]) is None


@pytest.mark.parametrize("home", ["/proc/nowhere", "/dev/null", "/proc/" + "a" * 300, ""])
def test_simulated_sites_write_whatever_the_home_folder_is(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", home)
    for name in (STATE, CACHE):
        monkeypatch.delenv(name, raising=False)
    with site_folders():
        for name in (STATE, CACHE):
            (user_folder(name) / "file").write_text("written")
