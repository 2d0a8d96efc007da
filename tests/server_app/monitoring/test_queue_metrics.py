"""The page for Prometheus counts the runs of the queue as `coordinator queue` lists them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.security.proposals import Proposal, SignedProposal
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.server_app.deployment.federation_rules import APPROVERS, RULES
from fedsurrogate.server_app.deployment.run_queue import FOLDER, LOCK, QueuedRun, add, write
from fedsurrogate.server_app.monitoring.queue_metrics import QueueCollector

KEY = b"k" * 32
NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def shown(collector: QueueCollector) -> dict[str, float]:
    samples = [each for metric in collector.collect() for each in metric.samples]
    return {each.labels.get("state", "served"): each.value for each in samples}


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["", "before", "after"]), st.booleans())))
def test_each_run_counts_as_what_it_waits_for(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[bool, str, bool]]
) -> None:
    output, rules = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("papers")
    (rules / RULES).write_text("approvals = 1\n")
    (rules / APPROVERS).write_text(f'"Ada" = "{public_key(KEY).hex()}"\n')
    expected = dict.fromkeys(
        ("queued", "scheduled", "waiting for approval", "running", "ended", "unreadable", "served"),
        0.0,
    )
    times = {"": "", "before": (NOW - HOUR).isoformat(), "after": (NOW + HOUR).isoformat()}
    for number, (approved, at, started) in enumerate(runs):
        proposal = Proposal.fresh("run", {"method": "fedpft", "seed": number}, "a test", 30)
        signed = SignedProposal(proposal)
        add(output, signed.sign(KEY) if approved else signed, times[at])
        if started:
            write(output, QueuedRun(proposal.id, times[at], started=NOW.isoformat()))
        waits = (
            "waiting for approval" if not approved else "scheduled" if at == "after" else "queued"
        )
        expected["running" if started else waits] += 1
    assert shown(QueueCollector(output, rules)) == expected


def test_a_queue_is_served_while_a_process_holds_it_and_a_damaged_one_says_so(
    tmp_path: Path,
) -> None:
    assert shown(QueueCollector(tmp_path, None))["served"] == 0
    (tmp_path / FOLDER).mkdir()
    with FileLock(tmp_path / FOLDER / LOCK):
        assert shown(QueueCollector(tmp_path, None))["served"] == 1
    assert shown(QueueCollector(tmp_path, None))["served"] == 0
    (tmp_path / FOLDER / "x.state").write_text("{")
    found = shown(QueueCollector(tmp_path, None))
    assert (found["unreadable"], found["queued"]) == (1, 0)
