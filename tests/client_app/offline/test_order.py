"""A release into a file, step by step with every step replaced by one that notes itself: what is
checked before what is charged, and what a refusal leaves undone. So for a check of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.client_app.governance.entries import Release
from fedsurrogate.client_app.governance.release import Failure
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline import answers as bundle_writer
from fedsurrogate.common.errors import (
    BudgetError,
    ConfigError,
    DataError,
    LedgerError,
    PolicyError,
)
from fedsurrogate.common.privacy.accounting import GaussianEvent
from fedsurrogate.common.security.documents import Request

KEY, PUBLIC = b"private", b"public"
NORTH = NodeConfig(site="north")
ASKED = Request("0123456789abcdef", {"seed": 5}, b"centre", receipts={"north": "shown"})
RUN_NAME = "bundle-0123456789abcdef"
GUARD = object()


def release() -> Release:
    # Every number differs, so that none can stand for another one.
    return Release(
        run="digest",
        flower_run=RUN_NAME,
        method="fedpft",
        round=3,
        mechanism="sums",
        events=(GaussianEvent(2.0),),
        unit="patient",
        epsilon=1.5,
        delta=1e-5,
        sigmas={"sums": 4.0},
        sensitivities={"sums": 1.0},
        facts={"clipped": 0.25},
        bytes=77,
        sha256="hash",
        rounds=9,
    )


class Site:
    """A site whose steps only note that they are made. One of them can fail."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        self.done: list[Any] = []
        self.failing: dict[str, Exception] = {}
        self.receipt: dict[str, str] = {"receipt": "new"}
        self.entries: list[dict[str, str]] = []
        self.release = release()
        self.prepared = SimpleNamespace(
            made=SimpleNamespace(payload=b"payload", guard=GUARD),
            release=self.release,
            failure=Failure(),
        )
        ledger = SimpleNamespace(
            answered=lambda: {each["flower_run"] for each in self.entries} - {"older"},
            entries=lambda: self.entries,
        )
        self.gate = SimpleNamespace(
            ledger=ledger,
            policy=object(),
            check_receipts=lambda shown: self.step("receipts", shown, answer=4),
            new_receipt=lambda before: self.step("receipt", before, answer=self.receipt),
        )
        answers: dict[str, Callable[..., Any]] = {
            "coordinator_key": lambda node: PUBLIC,
            "private_key": lambda node, name: self.step("key", name, answer=KEY + name.encode()),
            "read_request": lambda file, key: self.step("read", file, key, answer=ASKED),
            "open_gate": lambda node, data, name: self.step("gate", data, name, answer=self.gate),
            "prepare": lambda asked, gate, **more: self.step(
                "prepare", asked, gate is self.gate, more, answer=self.prepared
            ),
            "check_attacks": lambda run, node, policy: self.step(
                "attacks", run.digest, node, policy is self.gate.policy
            ),
            "pack_bundle": lambda *content: content,
            "stage_file": lambda file, content: self.step("stage", file, content, answer="staged"),
            "charge_and_release": lambda gate, sent, files, guard: self.step(
                "charge", gate is self.gate, sent, files, guard
            ),
            "replace_file": lambda file, content: self.step("replace", file, content),
        }
        for name, answer in answers.items():
            if hasattr(module, name):
                patch.setattr(module, name, answer)

    def step(self, name: str, *seen: Any, answer: Any = None) -> Any:
        self.done.append((name, *seen))
        if name in self.failing:
            raise self.failing[name]
        return answer

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.done]


@pytest.mark.parametrize("receipt", [True, False])
def test_a_bundle_is_staged_before_its_charge_and_signed_again_with_its_receipt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, receipt: bool
) -> None:
    site, run = Site(monkeypatch, bundle_writer), ASKED.run()
    site.receipt = {"receipt": "new"} if receipt else {}
    site.entries = [{"flower_run": "older", "time": "2020-01-01T00:00"}]
    out, asked = tmp_path / "out", tmp_path / "asked"
    # Neither the clip fractions, which are exact, nor what the coordinator knows.
    facts: dict[str, Any] = {
        "run": "digest",
        "method": "fedpft",
        "round": 3,
        "mechanism": "sums",
        "events": ({"noise_multiplier": 2.0, "sample_rate": 1.0, "count": 1},),
        "unit": "patient",
        "epsilon": 1.5,
        "delta": 1e-5,
        "sigmas": {"sums": 4.0},
        "sensitivities": {"sums": 1.0},
        "bytes": 77,
        "sha256": "hash",
        "sealed": False,
        "sample_rate": 1.0,
        "disclosure": "",
        "opens": False,
        "proposal": "",
        "allowed_by": "",
    }
    assert bundle_writer.release_to(out, asked, NORTH) is site.release
    content = (ASKED, "north", b"payload", facts, KEY + b"north")
    wanted: list[Any] = [
        ("read", asked, PUBLIC),
        ("gate", run.settings.data, RUN_NAME),
        ("receipts", "shown"),
        (
            "prepare",
            SiteRequest(run, NORTH, "north", flower_run=RUN_NAME, payload=b"centre"),
            True,
            {},
        ),
        ("attacks", run.digest, NORTH, True),
        ("key", "north"),
        ("stage", out, content),
        ("charge", True, site.release, {out: "staged"}, GUARD),
        ("receipt", 4),
    ]
    if receipt:
        again = (*content[:3], facts | {"receipt": "new"}, content[-1])
        wanted.append(("replace", out, again))
    assert site.done == wanted


@pytest.mark.parametrize(
    ("step", "error", "expected", "match"),
    [
        ("prepare", PolicyError("no"), PolicyError, "^no$"),
        ("attacks", PolicyError("no"), PolicyError, "^no$"),
        ("stage", PermissionError(13, "Denied"), LedgerError, r"out' .*\(Denied\); nothing was"),
        ("charge", BudgetError("spent"), BudgetError, "^spent$"),
    ],
)
def test_a_step_that_fails_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    step: str,
    error: Exception,
    expected: type[Exception],
    match: str,
) -> None:
    site = Site(monkeypatch, bundle_writer)
    site.failing = {step: error}
    with pytest.raises(expected, match=match):
        bundle_writer.release_to(tmp_path / "out", tmp_path / "asked", NORTH)
    assert site.names[-1] == step


def test_a_receipt_that_cannot_be_written_leaves_the_bundle_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site(monkeypatch, bundle_writer)
    site.failing = {"replace": PermissionError(13, "Denied")}
    assert bundle_writer.release_to(tmp_path / "out", tmp_path / "asked", NORTH) is site.release


def test_records_that_cannot_be_used_are_neither_attacked_nor_charged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site(monkeypatch, bundle_writer)
    site.prepared.failure = Failure("one class only")
    with pytest.raises(DataError, match=r"used \(one class only\); nothing was charged"):
        bundle_writer.release_to(tmp_path / "out", tmp_path / "asked", NORTH)
    assert site.names == ["read", "gate", "receipts", "prepare"]


def test_an_answered_request_is_refused_with_its_first_day_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site(monkeypatch, bundle_writer)
    for entries, days in (
        (["2026-05-04T10:00", "2026-05-06T10:00"], "answered on 2026-05-04; a second"),
        ([], "answered; a second"),
    ):
        site.done.clear()
        site.entries = [{"flower_run": "older", "time": "2020-01-01T00:00"}]
        site.entries += [{"flower_run": RUN_NAME, "time": time} for time in entries]
        site.gate.ledger.answered = lambda: {RUN_NAME}
        with pytest.raises(PolicyError, match=f"0123456789abcdef was {days}"):
            bundle_writer.release_to(tmp_path / "out", tmp_path / "asked", NORTH)
        assert site.names == ["read", "gate", "receipts"]


def test_a_bundle_needs_a_name_of_the_site_and_a_new_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site(monkeypatch, bundle_writer)
    out, asked = tmp_path / "out", tmp_path / "asked"
    asked.write_bytes(b"")
    for unnamed in (NodeConfig(), NodeConfig(num_partitions=1)):
        with pytest.raises(ConfigError, match="names no site"):
            bundle_writer.release_to(out, asked, unnamed)
    out.write_bytes(b"")
    for node in (NORTH, NodeConfig(partition_id=1, num_partitions=2)):
        with pytest.raises(ConfigError, match="out' exists; a bundle is never replaced"):
            bundle_writer.release_to(out, asked, node)
    assert site.done == []
    bundle_writer.release_to(
        tmp_path / "other", asked, NodeConfig(partition_id=1, num_partitions=2)
    )
    # The receipts of another site are not shown to this one.
    assert ("receipts", "") in site.done
