"""The queue starts each run once, in its order, when it may start; a restart loses and repeats none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.proposals import Proposal, SignedProposal, read_setting
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.deployment import run_queue
from fedsurrogate.server_app.deployment.federation_rules import APPROVERS, RULES
from fedsurrogate.server_app.deployment.run_queue import QueuedRun, add, moment, read, serve
from fedsurrogate.server_app.runs.writer import RunWriter
from tests.commands import coordinator

NOW = datetime.now(UTC)
DELAYS = st.none() | st.integers(-5, 5).filter(bool)


def proposed(number: int) -> SignedProposal:
    content: dict[str, Scalar] = {"method": "fedpft", "seed": number}
    return SignedProposal(Proposal.fresh("run", content, f"run {number}", 30))


class Killed(BaseException):
    """A process that ends without a word."""


class Runs:
    """Stands for a SuperLink: keeps which runs were started and followed, and makes run folders."""

    def __init__(self, output: Path) -> None:
        self.output, self.started, self.followed = output, list[int](), list[str]()
        self.kill, self.fail, self.with_folder = set[int](), set[int](), True
        self.folders = dict[int, str]()

    def start(self, settings: Mapping[str, Scalar]) -> None:
        number = int(settings["seed"])
        self.started.append(number)
        if self.with_folder:
            run = parse_run({**settings, "output-dir": str(self.output)})
            self.folders[number] = RunWriter(run, number).path.name
        if number in self.kill:
            raise Killed
        if number in self.fail:
            raise RunError("quorum missed")

    def follow(self, folder: Path) -> None:
        self.followed.append(folder.name)


@given(st.lists(st.tuples(DELAYS, st.booleans()), min_size=1, max_size=6), st.data())
def test_each_run_is_started_once_in_its_order_when_it_may_however_often_it_is_restarted(
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[tuple[int | None, bool]],
    data: st.DataObject,
) -> None:
    output = tmp_path_factory.mktemp("runs")
    superlink = Runs(output)
    superlink.with_folder = data.draw(st.booleans())
    allowed_ids = set[str]()
    may = []
    for number, (hours, allowed) in enumerate(runs):
        signed = proposed(number)
        at = (NOW + timedelta(hours=hours)).isoformat() if hours else ""
        add(output, signed, at)
        if allowed:
            allowed_ids.add(signed.proposal.id)
        if allowed and not (hours and hours > 0):
            may.append(number)
    superlink.kill = set(data.draw(st.lists(st.sampled_from(may)))) if may else set()
    superlink.fail = set(data.draw(st.lists(st.sampled_from(may)))) if may else set()
    for _ in range(len(runs) + 1):
        try:
            serve(
                output,
                lambda each: each.id in allowed_ids,
                superlink.start,
                superlink.follow,
                False,
            )
            break
        except Killed:
            continue
    assert superlink.started == may
    followed = [superlink.folders.get(number) for number in may if number in superlink.kill]
    assert superlink.followed == (followed if superlink.with_folder else [])
    states = {}
    for number, each in enumerate(read(output)):
        states[number] = each.state(each.id in allowed_ids, NOW)
        if number in may:
            lost = number in superlink.kill and not superlink.with_folder
            failed = number in superlink.fail and number not in superlink.kill
            status = run_queue.UNKNOWN if lost else "quorum missed" if failed else "finished"
            assert each.status == status
    for number, (hours, allowed) in enumerate(runs):
        later = "scheduled" if hours and hours > 0 else "ended"
        assert states[number] == (later if allowed else "waiting for approval")


def test_a_run_carries_the_signatures_that_it_had_when_it_started(tmp_path: Path) -> None:
    file = add(tmp_path, proposed(1))
    signed = run_queue.read_proposal(file).sign(b"a" * 32)
    file.write_text(signed.text())
    seen = list[SignedProposal]()
    serve(
        tmp_path,
        lambda _: True,
        lambda settings: seen.append(read_setting(str(settings["approval"]))),
        lambda _: None,
        forever=False,
    )
    assert seen == [signed]


def test_two_processes_do_not_serve_one_queue(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    with (
        FileLock(tmp_path / "queue" / ".lock"),
        pytest.raises(RunError, match="another process serves"),
    ):
        serve(tmp_path, lambda _: True, lambda _: None, lambda _: None, forever=False)


def test_a_run_is_removed_before_it_starts_and_not_after(tmp_path: Path) -> None:
    first, second = proposed(1), proposed(2)
    add(tmp_path, first)
    add(tmp_path, second)
    with pytest.raises(ConfigError, match="in the queue already"):
        add(tmp_path, first)
    assert run_queue.remove(tmp_path, second.proposal.id[:9]).id == second.proposal.id
    serve(tmp_path, lambda _: True, lambda _: None, lambda _: None, forever=False)
    with pytest.raises(ConfigError, match="has started"):
        run_queue.remove(tmp_path, first.proposal.id)
    for wrong in ("", "zz"):
        with pytest.raises(ConfigError, match="0 runs of the queue"):
            run_queue.remove(tmp_path, wrong)
    assert [each.id for each in read(tmp_path)] == [first.proposal.id]


def test_a_run_that_waits_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One whose last day has passed waits for a new proposal: signatures do not help."""
    papers = tmp_path / "papers"
    papers.mkdir()
    (papers / RULES).write_text("approvals = 1\n")
    (papers / APPROVERS).write_text(f'"Ada" = "{public_key(b"a" * 32).hex()}"\n')
    runs, late = tmp_path / "runs", Proposal("0" * 32, "run", {"seed": 1}, "late", "2026-01-01")
    add(runs, proposed(1))
    add(runs, SignedProposal(late).sign(b"a" * 32))
    shown = ("queue", "--runs", runs, "--root-certificates", papers / "ca.crt", "--json")
    assert coordinator(monkeypatch, *shown) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in rows} == {"waiting for approval"}
    assert "has 0 signatures of the 1 people" in rows[0]["status"]
    assert "expired on 2026-01-01" in rows[1]["status"]


def test_who_edits_a_queued_run_takes_its_signatures_from_it(tmp_path: Path) -> None:
    (tmp_path / RULES).write_text("approvals = 1\n")
    (tmp_path / APPROVERS).write_text(f'"Ada" = "{public_key(b"a" * 32).hex()}"\n')
    file = add(tmp_path, proposed(1).sign(b"a" * 32))
    (queued,) = read(tmp_path)
    allowed = run_queue.may_start(tmp_path, tmp_path)
    assert allowed(queued)
    honest = file.read_text()
    for old, new in (('"seed": 1', '"seed": 2'), ("run 1", "run 2"), ('"id": "', '"id": "0')):
        file.write_text(honest.replace(old, new))
        assert file.read_text() != honest
        assert not allowed(queued)
    file.unlink()
    assert not allowed(queued)


@pytest.mark.parametrize("text", ["", "24:00", "tonight", "7", "22:60", "2020-01-01T22:00"])
def test_another_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--at"):
        moment(text, NOW)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    add(tmp_path, proposed(1))
    (file,) = (tmp_path / "queue").glob("*.state")
    file.write_text("{")
    with pytest.raises(RunError, match=file.name):
        read(tmp_path)
    file.write_text(json.dumps({"id": "x"}))
    with pytest.raises(RunError, match=file.name):
        read(tmp_path)
    assert QueuedRun("a" * 32, "").state(True, NOW) == "queued"


TEXTS = (
    st.none()
    | st.integers()
    | st.booleans()
    | st.text(max_size=9)
    | st.lists(st.text(), max_size=2)
)
TIMES = TEXTS | st.datetimes().map(datetime.isoformat)


@given(
    st.fixed_dictionaries(
        {"id": TEXTS | st.just("../" * 10 + "etc/passwd") | st.just("b" * 32)},
        optional=dict.fromkeys(("added", "not_before", "started", "ended"), TIMES) | {"status": TEXTS},
    ) | TEXTS
)  # fmt: skip
def test_any_edited_state_is_an_error_in_words_or_shown(
    tmp_path_factory: pytest.TempPathFactory, content: object
) -> None:
    output = tmp_path_factory.mktemp("runs")
    add(output, proposed(1))
    (output / "queue" / "edited.state").write_text(json.dumps(content))
    shown = []
    with suppress(RunError):
        shown = read(output)
    for each in shown:
        run_queue.why_not(output, None, each)
        assert each.state(True, NOW) in run_queue.STATES


@pytest.mark.parametrize("damage", ["{", None, "another"])
def test_a_damaged_proposal_stops_no_other_run_and_the_table_says_so(
    tmp_path: Path, damage: str | None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without a federation's rules too, where no signature is looked at."""
    file = add(tmp_path, proposed(1))
    add(tmp_path, proposed(2))
    file.unlink() if damage is None else file.write_text(
        damage.replace("another", proposed(3).text())
    )
    superlink = Runs(tmp_path)
    serve(tmp_path, run_queue.may_start(tmp_path, None), superlink.start, superlink.follow, False)
    assert superlink.started == [2]
    assert coordinator(monkeypatch, "queue", "--runs", tmp_path, "--json") == 0
    bad, good = json.loads(capsys.readouterr().out)
    assert (bad["state"], good["state"]) == ("waiting for approval", "ended")
    assert file.name in bad["status"]


def test_a_run_that_would_start_after_its_last_day_is_refused(tmp_path: Path) -> None:
    signed = proposed(1)
    last = datetime.fromisoformat(signed.proposal.expires + "T12:00:00+00:00")
    with pytest.raises(ConfigError, match="may be started until"):
        add(tmp_path, signed, (last + timedelta(days=1)).isoformat())
    assert not (tmp_path / "queue").exists()
    add(tmp_path, signed, last.isoformat())


def test_settings_that_the_queue_would_drop_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spring.json").write_text(proposed(1).text())
    monkeypatch.chdir(tmp_path)
    words = ("run", "--queue", "--proposal", "spring.json")
    assert coordinator(monkeypatch, *words, "-c", "deadline=10.0") == 1
    assert "deadline" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert coordinator(monkeypatch, *words) == 0


@pytest.mark.parametrize("words", [("run", "--queue"), ("propose", "p.json", "--purpose", "go on")])
def test_a_queued_run_resumes_the_folder_of_who_typed_it(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts it, in another folder."""
    monkeypatch.chdir(tmp_path)
    assert coordinator(monkeypatch, *words, "-c", 'method="fedavg" resume="runs/one"') == 0
    (file,) = (*tmp_path.glob("p.json"), *tmp_path.glob("runs/queue/*.json"))
    content = run_queue.read_proposal(file).proposal.content
    assert content["resume"] == str(tmp_path / "runs" / "one")
