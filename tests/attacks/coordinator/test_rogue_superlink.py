"""A real `site join` at a SuperLink that an attacker runs. He has the coordinator's TLS key, so that
nothing but the site itself protects it: it takes memory for what it accepts, charges before it answers,
answers without a charge only with a code, and goes on.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any

import psutil
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message, ObjectTree

from fedsurrogate.common.flower.parts import LARGEST_PROJECT
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import to_record
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.attacks.coordinator.rogue import NODE, Rogue, packed_app, rogue_superlink
from tests.attacks.parts import (
    Parts,
    doubling_tree,
    part,
    question,
    wide_tree,
    with_payload,
    with_repeated_piece,
)
from tests.e2e.hospitals import CLASSES, Hospital
from tests.e2e.processes import BIN, environment, heed_signals, until

pytestmark = pytest.mark.slow
MIB = 2**20
SETTINGS: dict[str, Any] = {
    "classes": CLASSES,
    "epsilon": 1.0,
    "delta": 1e-5,
    "fedpft.covariance": "spherical",
    "sites": 1,
}
DIGEST = parse_run(SETTINGS).digest
CODES = {"status", "site"}
MOST = 400
"""MiB that an attack may add to the site's processes at most, beside those of the task."""
TASK = 550
"""MiB of a process of a task that does nothing: imported code, most of it shared with its parent."""


@dataclass
class Attacked:
    """A hospital that has joined the attacker's SuperLink."""

    rogue: Rogue
    hospital: Hospital
    process: Popen[bytes]
    log: Path
    peaks: dict[int, int] = field(default_factory=dict)
    run: int = 0

    def watch(self) -> None:
        """Note the largest memory of each of its processes, in MiB, until it ends."""
        while self.process.poll() is None:
            try:
                top = psutil.Process(self.process.pid)
                for each in (top, *top.children(recursive=True)):
                    used = each.memory_info().rss // MIB
                    self.peaks[each.pid] = max(used, self.peaks.get(each.pid, 0))
            except psutil.Error:
                pass
            time.sleep(0.1)

    def grown(self, before: dict[int, int]) -> int:
        """MiB by which the peaks of its processes are above those before, or above a task's."""
        return sum(max(peak - before.get(each, TASK), 0) for each, peak in self.peaks.items())

    def memory(self) -> int:
        """MiB of all its processes now."""
        top = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss // MIB for each in (top, *top.children(recursive=True)))

    def begin(self, **settings: Any) -> int:
        """Another run, with these settings; its id."""
        self.run += 1
        self.rogue.runs[self.run] = SETTINGS | settings
        return self.run

    def ask(self, **info: Any) -> Parts:
        """A sound request for a surrogate, in a new run."""
        return question(to_record(None, {"run": DIGEST, "round": 1} | info), self.begin(), NODE)

    def answers_to(self, *messages: Parts) -> list[dict[str, Any]]:
        """What it reports to each."""
        before = len(self.rogue.replies)
        self.rogue.send(*messages)
        return self.rogue.answers(before + len(messages))[before:]

    def is_well(self) -> bool:
        """Whether it answers a sound request, without having been started again."""
        charged = len(self.hospital.charges())
        (answer,) = self.answers_to(self.ask())
        # The budget of the hospital ends at some time.
        return (answer["status"], len(self.hospital.charges()) - charged) in (
            ("ok", 1),
            ("budget", 0),
        ) and "started again" not in self.log.read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "flower").mkdir()
    hospital, log = Hospital(folder, "north", 0), folder / "site.log"
    with rogue_superlink() as rogue, log.open("w") as stream:
        process = Popen(
            [
                *(str(BIN / "site"), "join", "--insecure", "--superlink", rogue.address),
                *("--node-config", hospital.node_config),
            ],
            stdout=stream,
            stderr=STDOUT,
            env=environment(folder / "flower") | {"PYTHONPATH": str(APP_FOLDER)},
            preexec_fn=heed_signals,
        )
        attacked = Attacked(rogue, hospital, process, log)
        threading.Thread(target=attacked.watch, daemon=True).start()
        try:
            until(lambda: "connected; only" in log.read_text())
            assert attacked.is_well(), log.read_text()
            yield attacked
        finally:
            process.terminate()
            process.wait(120)


def doubled(site: Attacked) -> Parts:
    """Parts that are all there, each twice below the one above it."""
    below = part("ConfigRecord", [], b"")
    name = hashlib.sha256(below).hexdigest()
    contents, tree = {name: below}, ObjectTree(object_id=name)
    for level in range(24):
        above = part("RecordDict", [name], str(level).encode())
        twice = [tree, ObjectTree(object_id=name)]
        name = hashlib.sha256(above).hexdigest()
        contents[name], tree = above, ObjectTree(object_id=name, children=twice)
    return replace(site.ask().with_tree(tree), contents=contents)


def announced(site: Attacked) -> Parts:
    """A message with 300 MiB in what announces it."""
    message = site.ask()
    message.announced.metadata.group_id = "x" * (300 * MIB)
    return message


def bomb(site: Attacked) -> Parts:
    """An app of one mebibyte, with a gibibyte of settings."""
    message = site.ask()
    site.rogue.apps[site.run] = packed_app(b"#" * (LARGEST_PROJECT * 1000))
    return message


def no_app(site: Attacked) -> Parts:
    message = site.ask()
    site.rogue.apps[site.run] = b"no archive"
    return message


def unreadable(site: Attacked) -> Parts:
    message = site.ask()
    message.announced.ClearField("metadata")
    return message


def another_app(site: Attacked) -> Parts:
    message = site.ask()
    site.rogue.lies.add(site.run)
    return message


UNREAD: dict[str, Callable[[Attacked], Parts]] = {
    "parts twice at each level": doubled,
    "a tree that is not there": lambda site: site.ask().with_tree(doubling_tree(40)),
    "ten thousand parts": lambda site: site.ask().with_tree(wide_tree(10_000)),
    "a gibibyte of settings": bomb,
    "no app": no_app,
    "an app of another hash": another_app,
    "metadata that are missing": unreadable,
    "parts that are missing": lambda site: replace(site.ask(), contents={}),
    "settings that its app does not have": lambda site: otherwise(**{"no-such": 1})(site),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_a_site_cannot_read_stays_unread_and_it_goes_on(site: Attacked, name: str) -> None:
    charged, answered = len(site.hospital.charges()), len(site.rogue.replies)
    before = dict(site.peaks)
    message = UNREAD[name](site)
    site.rogue.send(message)
    site.rogue.idle()
    time.sleep(1)
    assert (len(site.hospital.charges()), len(site.rogue.replies)) == (charged, answered)
    assert site.grown(before) < MOST, site.peaks
    assert site.is_well(), site.log.read_text()[-3000:]


def sized(site: Attacked) -> Parts:
    """Five mebibytes that stand for three gibibytes."""
    payload = with_payload(5 * MIB, run=DIGEST, round=1)
    return with_repeated_piece(question(payload, site.begin(), NODE), 600)


def metrics(site: Attacked) -> Parts:
    """A million numbers beside the request."""
    record = to_record(None, {"run": DIGEST, "round": 1})
    record["metrics"] = MetricRecord({"x": list(range(1_000_000))})
    return question(record, site.begin(), NODE)


def records(site: Attacked) -> Parts:
    content = {str(number): ConfigRecord({"a": 1}) for number in range(900)}
    return question(RecordDict(content), site.begin(), NODE)


def otherwise(**settings: Any) -> Callable[[Attacked], Parts]:
    """The request of one run with the settings of another."""
    return lambda site: question(
        to_record(None, {"run": DIGEST, "round": 1}), site.begin(**settings), NODE
    )


def model(content: bytes, kind: str) -> Callable[[Attacked], Parts]:
    """A payload in place of a model."""
    return lambda site: question(
        to_record(content, {"run": DIGEST, "round": 1, "bytes": len(content)}),
        site.begin(),
        NODE,
        kind,
    )


REFUSED: dict[str, Callable[[Attacked], Parts]] = {
    "five mebibytes as three gibibytes": sized,
    "a million metrics": metrics,
    "many records": records,
    "settings unlike the digest": otherwise(epsilon=0.5),
    "huge settings": otherwise(classes=",".join(map(str, range(100_000)))),
    "a model of no form": model(os.urandom(1000), "evaluate"),
    "a model that is empty": model(b"\0", "evaluate"),
    "a request of no kind": lambda site: with_metadata(site.ask(), other_kind),
}


def with_metadata(message: Parts, change: Callable[[Any], object]) -> Parts:
    """The same message with other metadata inside."""
    body = next(each for each in message.contents.values() if each.startswith(b"Message"))
    inner = Message.FromString(body.partition(b"\0")[2])
    change(inner.metadata)
    return message.with_body("Message", inner.SerializeToString())


def other_kind(metadata: Any) -> None:
    metadata.message_type = "query.no-such"


def other_run(metadata: Any) -> None:
    metadata.run_id += 1000


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_site_refuses_costs_no_budget_and_shows_a_code_alone(
    site: Attacked, name: str
) -> None:
    charged, before = len(site.hospital.charges()), max(site.peaks.values())
    (answer,) = site.answers_to(REFUSED[name](site))
    assert len(site.hospital.charges()) == charged
    assert answer.keys() <= CODES | {"error"}, answer
    assert answer.get("status") != "ok"
    assert str(site.hospital.home) not in str(answer)
    assert max(site.peaks.values()) < before + 2 * MOST, site.peaks
    assert site.is_well(), site.log.read_text()[-3000:]


def test_a_replayed_request_is_answered_once(site: Attacked) -> None:
    """The same message, and the same request in another message of its run."""
    first = site.ask()
    again = question(to_record(None, {"run": DIGEST, "round": 1}), site.run, NODE)
    charged = len(site.hospital.charges())
    answers = site.answers_to(first, first, again)
    new = len(site.hospital.charges()) - charged
    assert [each["status"] for each in answers[1:]] == ["budget", "budget"]
    assert [each.keys() <= CODES for each in answers] == [not new, True, True]
    assert new <= 1


def test_a_release_is_charged_to_the_run_that_was_announced(site: Attacked) -> None:
    """Whatever run the message itself names; its SuperNode then sends an error in place of it."""
    charged = len(site.hospital.charges())
    (answer,) = site.answers_to(with_metadata(site.ask(), other_run))
    new = [each["flower_run"] for each in site.hospital.charges()[charged:]]
    assert new == [str(site.run)]
    assert answer.keys() == {"error"}


def test_a_flood_of_requests_stays_within_the_limits(site: Attacked) -> None:
    """Requests beyond the hospital's budget and its limits get a code each; nothing grows."""
    site.rogue.idle(10)
    before, charged = site.memory(), len(site.hospital.charges())
    kept = sum(file.stat().st_size for file in site.hospital.home.rglob("*") if file.is_file())
    answers = site.answers_to(*(site.ask() for _ in range(40)))
    new = len(site.hospital.charges()) - charged
    assert sum(each["status"] == "ok" for each in answers) == new
    assert {each["status"] for each in answers} <= {"ok", "budget", "policy"}
    site.rogue.idle(10)
    assert site.memory() - before < MOST
    after = sum(file.stat().st_size for file in site.hospital.home.rglob("*") if file.is_file())
    assert after - kept < 2 * MIB


def test_an_announcement_beyond_grpcs_limit_ends_the_node_which_begins_again(
    site: Attacked,
) -> None:
    """Last, because the node begins again, as after a lost connection."""
    before = dict(site.peaks)
    connected = site.log.read_text().count("connected; only")
    site.rogue.send(announced(site))
    until(lambda: site.log.read_text().count("connected; only") > connected)
    # Another node stands beside the one that ended.
    assert site.grown(before) < MOST + 600, site.peaks
    assert site.answers_to(site.ask())
