"""A lost, restored or unopened ledger gives no new budget: attacks through a site's real request
handling.

The policy allows one run of epsilon 1. An attack succeeds if the site replies to a second run.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.governance.ledger import Ledger, own_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import PUBLIC_SENTENCES, ConfigError, LedgerError, RunError
from fedsurrogate.common.security.registrations import MOST_RECEIPTS
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.server_app.exchange import learn_from_files, make_request
from fedsurrogate.strategies.base.outcome import FOLDER, Receipts
from tests.e2e.hospitals import CLASSES, write_features
from tests.grid import (
    FAST,
    Fault,
    InProcessGrid,
    NodeConfig,
    events_of,
    metrics_of,
    run_federation,
    run_folders,
)

BUDGETED: dict[str, Any] = {"classes": CLASSES, "epsilon": 1.0, "delta": 1e-5}
PRIVATE: dict[str, Any] = FAST | BUDGETED | {"fedpft.covariance": "spherical"}
ROUNDS: dict[str, Any] = BUDGETED | {
    "fedavg.local-epochs": 1,
    "fedavg.sample-rate": 1.0,
    "method": "dp-fedavg",
    "fedavg.rounds": 1,
}
ANSWERED, LEDGER, BUDGET = "", PUBLIC_SENTENCES["ledger"], PUBLIC_SENTENCES["budget"]


class Hospital:
    """One site with its own data, and a coordinator whose folder is `home`/runs."""

    def __init__(self, home: Path, name: str = "north", seed: int = 0) -> None:
        self.home, self.name, place = home, name, home / name
        write_features(place / "data", seed)
        (place / "policy.toml").write_text("epsilon-per-run = 1.2\nepsilon-total = 1.2\n")
        self.state, self.check_log = place / "state", place / "check-log"
        self.node: NodeConfig = {"site": name, "data": "safetensors", "dataset": "f"}
        folders = {"data-dir": "data", "state-dir": "state", "cache-dir": "cache"}
        files = folders | {"policy": "policy.toml"}
        self.node |= {key: str(place / value) for key, value in files.items()}

    @property
    def ledger(self) -> Ledger:
        found = own_ledger(parse_node_config(self.node))
        assert found is not None
        return found

    @property
    def receipts(self) -> Path:
        """The receipts of this site at the coordinator."""
        return self.home / "runs" / FOLDER / f"{self.name}.json"

    def run(self, opened: bool = True, before: tuple[NodeConfig, ...] = (), **settings: Any) -> str:
        """The reason why a run refused the site; "" if it was used. before: sites at the nodes
        before its own.
        """
        chosen = PRIVATE | {"quorum": 0.1} | settings
        with suppress(RunError):
            run_federation(self.home, [*before, self.node], opened=opened, **chosen)
        folders = run_folders(Path(settings.get("output_dir", self.home / "runs")))
        newest = max(folders, key=lambda folder: (folder / "metrics.json").stat().st_mtime_ns)
        refused = [event["reason"] for event in events_of(newest) if event["event"] == "rejected"]
        return refused[0] if refused else ANSWERED

    def copy(self, *folders: Path) -> Callable[[], None]:
        """Make a backup of folders; the returned function restores it."""
        for folder in folders:
            shutil.copytree(folder, folder.with_suffix(".backup"), dirs_exist_ok=True)

        def restore() -> None:
            for folder in folders:
                shutil.rmtree(folder)
                shutil.copytree(folder.with_suffix(".backup"), folder)

        return restore

    def restored(self, *folders: Path, **settings: Any) -> None:
        """Release a little, make a backup, release more, and restore the backup."""
        self.run(epsilon=1e-3)
        restore = self.copy(*folders)
        assert self.run(**settings) == ANSWERED
        restore()


def number_from(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Other numbers of nodes."""
    for module in ("tests.grid", "fedsurrogate.server_app.deployment.local_engine"):
        monkeypatch.setattr(f"{module}.FIRST_NODE", first)


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    """A site that has released nothing so far."""
    return Hospital(tmp_path)


def test_the_budget_affords_one_run(hospital: Hospital) -> None:
    assert [hospital.run(), hospital.run()] == [ANSWERED, BUDGET]


def test_a_deleted_state_folder_is_no_fresh_budget(hospital: Hospital) -> None:
    assert hospital.run() == ANSWERED
    shutil.rmtree(hospital.state)
    assert hospital.run() == LEDGER


def test_an_older_copy_of_the_state_folder_is_no_fresh_budget(hospital: Hospital) -> None:
    hospital.restored(hospital.state)
    assert hospital.run() == LEDGER
    # After any number of requests.
    assert hospital.run() == LEDGER


@pytest.mark.parametrize("settings", [{}, ROUNDS], ids=["fedpft", "dp-fedavg"])
def test_older_copies_of_ledger_and_check_log_are_refused_where_the_coordinator_has_seen_newer_ones(
    hospital: Hospital, settings: dict[str, Any]
) -> None:
    hospital.restored(hospital.state, hospital.check_log, **settings)
    assert hospital.run(**settings) == LEDGER


def test_a_site_that_comes_back_as_another_node_is_shown_what_was_seen_of_it(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital.run(epsilon=1e-3)
    restore = hospital.copy(hospital.state, hospital.check_log)
    assert hospital.run() == ANSWERED
    restore()
    other = Hospital(hospital.home, "south", 1)
    number_from(monkeypatch, 5001)
    assert hospital.run(before=(other.node,)) == LEDGER
    assert other.receipts.exists(), "the other site has answered"


def test_a_run_that_is_resumed_elsewhere_brings_what_was_seen_before(hospital: Hospital) -> None:
    hospital.restored(hospital.state, hospital.check_log, **ROUNDS)
    (interrupted,) = (hospital.home / "runs").glob("*-dp-fedavg-*")
    resumed = {"resume": str(interrupted), "output_dir": str(hospital.home / "elsewhere")}
    assert hospital.run(**ROUNDS | resumed) == LEDGER


def test_all_of_a_site_deleted_and_opened_once_more_is_refused_where_the_coordinator_knows_better(
    hospital: Hospital,
) -> None:
    assert hospital.run() == ANSWERED
    shutil.rmtree(hospital.state)
    shutil.rmtree(hospital.check_log)
    hospital.ledger.open()
    assert hospital.run() == LEDGER
    # A person's decision ends the refusal; the epsilon entered as spent counts.
    hospital.ledger.reopen("the machine was lost", 1.0, 1e-5)
    assert hospital.run() == BUDGET


def test_a_deleted_check_log_stops_releases_until_a_person_decides(hospital: Hospital) -> None:
    assert hospital.run() == ANSWERED
    shutil.rmtree(hospital.check_log)
    before = hospital.ledger.path.read_bytes()
    assert hospital.run() == LEDGER
    assert hospital.ledger.path.read_bytes() == before
    with pytest.raises(LedgerError, match="ledger reopen"):
        hospital.ledger.open()
    hospital.ledger.reopen("the folder was lost", 0.0, 1e-5, keep=True)
    assert hospital.run() == BUDGET, "what the ledger records still counts"


def test_keeping_an_older_copy_is_refused_where_the_coordinator_has_seen_more(
    hospital: Hospital,
) -> None:
    hospital.restored(hospital.state)
    with pytest.raises(ConfigError, match="1 of 3 entries are missing, and epsilon 0"):
        hospital.ledger.reopen("it looks whole", 0.0, 1e-5, keep=True)
    assert hospital.run() == LEDGER
    # Without its check log the site cannot know; the coordinator does, however often it is said.
    shutil.rmtree(hospital.check_log)
    for _ in range(2):
        hospital.ledger.reopen("it looks whole", 0.0, 1e-5, keep=True)
        assert hospital.run() == LEDGER


def test_an_older_ledger_than_a_decision_is_refused_where_the_coordinator_has_seen_what_followed(
    hospital: Hospital,
) -> None:
    hospital.run(epsilon=1e-3)
    hospital.ledger.reopen("first", 0.0, 1e-5)
    restore = hospital.copy(hospital.state, hospital.check_log)
    hospital.ledger.reopen("second", 0.0, 1e-5)
    assert hospital.run() == ANSWERED
    restore()
    assert hospital.run() == LEDGER


def test_data_that_no_person_has_opened_release_nothing(hospital: Hospital) -> None:
    assert hospital.run(opened=False) == LEDGER
    assert hospital.run(opened=False, **ROUNDS) == LEDGER
    assert not list(hospital.state.rglob("*.jsonl"))
    hospital.ledger.open()
    with pytest.raises(LedgerError, match="was open before"):
        hospital.ledger.open()
    assert hospital.run(opened=False) == ANSWERED


@pytest.mark.parametrize("place", ["inside state-dir", "a file in the way"])
def test_a_check_log_folder_of_no_use_stops_releases_before_anything_is_charged(
    hospital: Hospital, place: str
) -> None:
    hospital.run(epsilon=1e-3)
    before = hospital.ledger.path.read_bytes()
    hospital.node["check-log-dir"] = str(hospital.state / "check-log")
    if place == "a file in the way":
        hospital.node["check-log-dir"] = str(hospital.home / "file")
        (hospital.home / "file").write_text("")
    assert hospital.run(opened=False) == LEDGER
    assert hospital.ledger.path.read_bytes() == before


def with_part(at: int, text: str) -> Callable[[str], str]:
    """Another part of a receipt: its ledger, opening, length or tag."""

    def forge(receipt: str) -> str:
        parts = receipt.split(":")
        return ":".join([*parts[:at], text, *parts[at + 1 :]])

    return forge


FORGERIES: dict[str, Callable[[str], str]] = {
    "another tag": lambda receipt: receipt[:-1] + ("0" if receipt[-1] != "0" else "1"),
    "a longer ledger": with_part(2, "9"),
    "no length": with_part(2, "0"),
    "another opening": with_part(1, "1"),
    "another ledger": with_part(0, "f" * 32),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_receipt_makes_the_site_refuse_and_nothing_else(
    hospital: Hospital, forgery: str
) -> None:
    hospital.run(epsilon=1e-3)
    (receipt,) = json.loads(hospital.receipts.read_text())["receipts"]
    forged = json.loads(hospital.receipts.read_text()) | {"receipts": [FORGERIES[forgery](receipt)]}
    genuine = hospital.receipts.read_bytes()
    hospital.receipts.write_text(json.dumps(forged))
    before = {
        file: file.read_bytes()
        for file in hospital.home.glob("north/*/**/*")
        if file.suffix in (".jsonl", ".witness")
    }
    assert len(before) == 2
    assert hospital.run() == LEDGER
    assert before == {file: file.read_bytes() for file in before}
    hospital.receipts.write_bytes(genuine)
    assert hospital.run() == ANSWERED


def test_a_receipt_tells_how_many_entries_there_are_and_no_hash_of_them(hospital: Hospital) -> None:
    grid = InProcessGrid([hospital.node])
    run_federation(hospital.home, grid, **PRIVATE)
    hashes = [json.loads(line)["hash"] for line in hospital.ledger.path.read_text().splitlines()]
    (receipt,) = json.loads(hospital.receipts.read_text())["receipts"]
    ledger, _, length, tag = receipt.split(":")
    assert length == "2"
    check_log = next(hospital.check_log.glob("*.witness")).read_text()
    assert not {ledger, tag} & {*hashes, *check_log.split()}
    (reply,) = grid.replies(0)
    assert reply.content.config_records["info"]["receipt"] == receipt
    assert not [
        each
        for kind in ("evaluate", "query.hello")
        for each in grid.replies(0, kind)
        if "receipt" in str(each.content)
    ]


class Silent:
    """A recorder that ignores all events."""

    def event(self, event: str, **fields: object) -> None:
        """Ignore the event."""
        raise AssertionError(event, fields)

    surrogate = keep = discard = event


def test_a_hostile_site_can_neither_fill_the_coordinators_disk_nor_speak_for_another(
    tmp_path: Path, hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    south = Hospital(hospital.home, "south", 1)
    assert hospital.run(before=(south.node,)) == ANSWERED
    kept = south.receipts.read_bytes()
    forged = [f"{number:032x}:1:1:{'0' * 64}" for number in range(2 * MOST_RECEIPTS)]
    for number, text in enumerate(["x" * 10**6, "../../x", 7, *forged[:3]]):

        def lie(record: RecordDict, text: str | int = text) -> None:
            record.config_records["info"]["receipt"] = text

        west = Hospital(hospital.home / f"{number}", "west", 2)
        number_from(monkeypatch, 5001)
        grid = InProcessGrid([south.node, west.node], {1: Fault(reply=lie)})
        with suppress(RunError):
            run_federation(hospital.home, grid, **PRIVATE | {"quorum": 0.1})
    kept_of_west = json.loads((hospital.receipts.parent / "west.json").read_text())["receipts"]
    # The site sees the forged receipt, and refuses as for any other.
    assert kept_of_west == forged[:1]
    assert south.receipts.read_bytes() == kept
    assert {file.name for file in hospital.receipts.parent.iterdir()} == {
        "north.json",
        "south.json",
        "west.json",
    }
    receipts = Receipts(str(tmp_path / "many"), "", Silent())
    for text in forged:
        receipts.take("west", 5, text)
    assert receipts.of("west") == ",".join(forged[MOST_RECEIPTS:])
    assert (tmp_path / "many" / FOLDER / "west.json").stat().st_size < 4096


def test_bundles_that_people_carry_bring_receipts_and_requests_show_them(
    hospital: Hospital,
) -> None:
    home, node = hospital.home, parse_node_config(hospital.node)
    hospital.ledger.open()
    restore = hospital.copy(hospital.state, hospital.check_log)
    settings = PRIVATE | {"output-dir": str(home / "runs")}
    coordinator = new_key()
    node = node.model_copy(update={"coordinator_key": public_key(coordinator).hex()})
    request = make_request(settings, home / "first.json", coordinator)
    assert not request.receipts
    release_to(home / "first.bundle", home / "first.json", node)
    (home / "keys.toml").write_text(f'north = "{public_key(private_key(node, "north")).hex()}"')
    own = {"output-dir": str(home / "runs")}
    keys = home / "keys.toml"
    folder = learn_from_files(home / "first.json", [home / "first.bundle"], keys, own)
    assert metrics_of(folder)["sites"]["used"] == 1
    restore()
    make_request(settings, home / "second.json", coordinator)
    with pytest.raises(LedgerError, match="the coordinator has seen 2 entries"):
        release_to(home / "second.bundle", home / "second.json", node)
    assert not (home / "second.bundle").exists()
    # Over the network as well.
    assert hospital.run() == LEDGER


def test_public_data_need_no_opening_and_give_no_receipt(tmp_path: Path) -> None:
    digits: NodeConfig = {"site": "demo", "data": "digits", "state-dir": str(tmp_path / "state")}
    folder = run_federation(
        tmp_path, [digits], opened=False, **FAST | {"fedpft.covariance": "spherical"}
    )
    assert metrics_of(folder)["sites"]["used"] == 1
    assert not (tmp_path / "runs" / FOLDER).exists()
    assert not list(tmp_path.rglob("*.witness"))
    with pytest.raises(ConfigError, match="is public"):
        open_ledger(parse_node_config(digits))


def test_what_is_written_down_as_not_noticed_is_what_is_not_noticed(hospital: Hospital) -> None:
    """Both check logs at the site are restored together, and the coordinator withholds its receipt."""
    hospital.run(epsilon=1e-3)
    restore = hospital.copy(hospital.state, hospital.check_log)
    assert hospital.run() == ANSWERED
    restore()
    hospital.receipts.unlink()
    assert hospital.run() == ANSWERED
