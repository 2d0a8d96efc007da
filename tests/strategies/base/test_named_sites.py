"""A run that names its sites asks these, and no other: a site that it does not name gets no message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Proposal
from fedsurrogate.common.security.registrations import VARIABLE, Registration, write_table
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE
from tests.grid import InProcessGrid, events_of, metrics_of, run_federation
from tests.strategies.base.test_nobody_pays_for_another import PRIVATE, hospital

CITIES = ("berlin", "lyon", "utrecht", "oslo")
NAMED = "berlin,lyon,utrecht"


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcessGrid:
    """Four registered hospitals, and the table that the coordinator's process reads."""
    table = {name: Registration(f"key {name}", FIRST_NODE + at) for at, name in enumerate(CITIES)}
    write_table(tmp_path / "registered.json", table)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registered.json"))
    # The process of a federation, not that of a simulation, reads the table.
    monkeypatch.setattr("fedsurrogate.server_app.serverapp._check_allowed", lambda *_: None)
    return InProcessGrid([hospital(tmp_path, name) for name in CITIES], run_id=4711)


RUNS = [
    {}, {"method": "dp-fedavg", "fedavg.rounds": 2}, {"secure_aggregation": True}, {"fedpft.topology": "chain"},
    {"counting.kind": "survey"},
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=["once", "rounds", "sum", "chain", "survey"])
def test_a_site_that_is_not_named_is_never_asked(
    run: dict[str, object], grid: InProcessGrid, tmp_path: Path
) -> None:
    folder = run_federation(tmp_path, grid, **PRIVATE | run, sites=NAMED, quorum=1.0)
    asked = {message.metadata.dst_node_id - FIRST_NODE for message in grid.sent}
    assert asked == {0, 1, 2}
    assert metrics_of(folder)["sites"]["invited"] == 3
    assert "oslo" not in json.dumps(events_of(folder))
    assert not (tmp_path / "oslo/state/ledgers").exists() or not charges_of(tmp_path, "oslo")


def charges_of(home: Path, name: str) -> list[str]:
    files = (home / name / "state/ledgers").rglob("*.jsonl")
    return [line for file in files for line in file.read_text().splitlines() if '"release"' in line]


def test_a_name_that_is_not_registered_stops_the_run(grid: InProcessGrid, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="sites names rome, and no such site is registered"):
        run_federation(tmp_path, grid, **PRIVATE, sites="berlin,rome")
    assert not grid.sent


def test_without_a_table_nobody_is_asked(tmp_path: Path) -> None:
    grid = InProcessGrid([hospital(tmp_path, "berlin")])
    with pytest.raises(RunError, match=r"coordinator sites accept.*number of sites"):
        run_federation(tmp_path, grid, **PRIVATE, sites="berlin")
    assert not grid.sent


def test_people_sign_whom_a_run_names() -> None:
    settings = {"method": "fedpft", "classes": "a,b", "epsilon": 1.0, "delta": 1e-5}
    named = parse_run(settings | {"sites": NAMED})
    assert named.document["settings"]["sites"] == NAMED
    assert named.settings.site_count == 3
    # The same settings, of a proposal, give the same run; a number of sites is not signed.
    assert parse_run(named.settings.flat()).full_digest == named.full_digest
    proposal = Proposal.fresh("run", settings | {"sites": NAMED}, "spring", 30)
    assert proposal.digest() == named.full_digest
    assert NAMED in proposal.body().decode()
    digests = {
        parse_run(settings | {"sites": each}).full_digest for each in (0, 3, NAMED, "berlin")
    }
    assert len(digests) == 3


@pytest.mark.parametrize("wrong", [-1, True, 1.5, ",", "a,a", "../x", "a b"])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^sites = "):
        parse_run({"method": "fedpft", "sites": wrong})
