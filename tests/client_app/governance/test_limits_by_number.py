"""Limits of a site by the numbers that its documents state, and what lies just within and just
beyond them.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance import budget, ledger
from fedsurrogate.client_app.governance.budget import Budget, check_budget, runs_left, spent
from fedsurrogate.client_app.governance.gate import (
    Allowed,
    Decision,
    after,
    decide,
    decisions,
    open_gate,
    open_ledger,
)
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger, dataset_id
from fedsurrogate.client_app.governance.policy import DEFAULT, PUBLIC_DATA
from fedsurrogate.client_app.governance.release import DISCLOSURES, check_dimension, disclosure_of
from fedsurrogate.client_app.governance.work_limits import NO_WORK_LIMITS, UNLIMITED
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.errors import BudgetError, ConfigError, LedgerError, PolicyError
from fedsurrogate.common.privacy.accounting import GaussianEvent, PrivacyFilter, epsilon_spent
from tests.client_app.governance.ledger_processes import TOTAL, release

WORK = {
    "most_classes": 1000, "longest_class_name": 200, "largest_image_size": 1024, "largest_dimension": 8192,
    "largest_width": 2048, "most_components": 100, "largest_rank": 512, "most_synthetic": 1_000_000,
    "most_numbers": 2_000_000_000, "most_rounds": 1000, "most_steps": 20_000, "most_passes": 1000,
    "most_seconds": 259_200.0, "requests_per_run": 10_000, "requests_per_hour": 1000,
    "extractions_per_day": 8, "cache_mib": 20_480.0, "kept_mib": 20_480.0,
}  # fmt: skip
RELEASES = {
    "methods": ("*",), "backbones": ("*",), "mechanisms": ("sums", "dp-em", "dp-sgd", "counts"),
    "without_dp": False, "epsilon_per_run": 1.0, "epsilon_total": 4.0, "delta": 1e-5, "delta_total": 0.0,
    "smallest_class": 10, "smallest_site": 1, "exact_counts": (), "smallest_cell": 10,
    "show_evaluation": False, "largest_payload_mib": 256.0, "require_seal": False,
    "require_secure_aggregation": False, "smallest_sum": 3, "smallest_colluding": 1 / 3,
    "exact_sums_at_models": False, "exact_runs_may_differ": False, "local_epsilon": 0.0, "require_approval": 0,
    "approvers": "approvers.toml", "require_officer": False, "largest_attack_auc": 1.0,
    "smallest_nearest_ratio": 0.0,
}  # fmt: skip


def test_a_site_without_a_policy_has_the_documented_limits_and_public_data_have_none() -> None:
    assert DEFAULT.model_dump() == WORK | RELEASES
    public = PUBLIC_DATA.model_dump()
    assert {public[name] for name in WORK} == {math.inf, 10**12}
    for name, value in NO_WORK_LIMITS.items():
        assert value == (math.inf if isinstance(WORK[name], float) else UNLIMITED)
    changed = {name: public[name] for name in RELEASES if public[name] != RELEASES[name]}
    assert (changed.pop("epsilon_per_run"), changed.pop("epsilon_total")) == (1e6, 1e6)
    assert changed == {
        "mechanisms": ("*",),
        "without_dp": True,
        "smallest_sum": 2,
        "smallest_colluding": 0.0,
        "delta": 0.01,
        "smallest_class": 1,
        "exact_counts": ("evaluation", "survey"),
        "exact_sums_at_models": True,
        "exact_runs_may_differ": True,
        "smallest_cell": 1,
        "show_evaluation": True,
    }


@given(st.integers(0, 9), st.integers(-2, 13), st.booleans())
def test_a_proposal_is_for_its_rounds_and_what_comes_before_and_behind_them(
    rounds: int, number: int, proposed: bool
) -> None:
    allowed = Allowed("abcdefghij" if proposed else "", "Ada", rounds)
    last = max(1, rounds) + 1
    assert after(rounds) == last
    if not proposed or 0 <= number <= last:
        allowed.check_round(number)
        return
    words = f"proposal abcdefgh is for {last - 1} rounds, and this is round {number}"
    with pytest.raises(PolicyError, match=words):
        allowed.check_round(number)


@pytest.mark.parametrize(
    ("officer", "fine"),
    [
        ("O", True),
        ("O" * 100, True),
        ("Olga Ö.", True),
        ("", False),
        ("O" * 101, False),
        ("a\nb", False),
    ],
)
def test_an_officer_has_a_name_of_one_to_a_hundred_characters(
    tmp_path: Path, officer: str, fine: bool
) -> None:
    made = Decision("approved", officer, "id", "2026-01-01")
    if fine:
        decide(tmp_path / "new" / "state", "d", made)
        assert decisions(tmp_path / "new" / "state") == {"d": made}
        return
    with pytest.raises(ConfigError, match="must be a name of 1 to 100 characters"):
        decide(tmp_path, "d", made)
    assert decisions(tmp_path) == {}


@pytest.mark.parametrize("excess", [-1e-3, 5e-10, 2e-9, 1e-3])
@pytest.mark.parametrize("which", ["total", "run"])
def test_a_budget_is_exceeded_from_a_billionth_of_it_on(
    monkeypatch: pytest.MonkeyPatch, excess: float, which: str
) -> None:
    """Calibrated noise may give an epsilon that is larger in the last digit."""
    own = Budget(epsilon_total=4.0, delta=1e-5, epsilon_per_run=2.0)
    numbers = {"total": 4.0, "run": 2.0} | {
        which: (4.0 if which == "total" else 2.0) * (1 + excess)
    }
    monkeypatch.setattr(budget, "spent", lambda *given: numbers["total"])
    monkeypatch.setattr(budget, "composed", lambda *given: numbers["run"])
    # Noise that the fast bound does not accept.
    asked = release(0.3)
    if excess <= 1e-9:
        assert check_budget([], asked, own) == numbers["total"]
        return
    name = "epsilon-total = 4" if which == "total" else "epsilon-per-run = 2"
    with pytest.raises(BudgetError, match=name):
        check_budget([], asked, own)


def entry(each: Any, kind: str = "release") -> dict[str, Any]:
    return {"kind": kind, **asdict(each)}


@settings(max_examples=15, deadline=None)
@given(
    first=st.sampled_from([3.0, 8.0, 20.0]), later=st.lists(st.sampled_from([5.0, 9.0]), max_size=3)
)
def test_after_a_decision_gaussian_releases_compose_as_one(
    first: float, later: list[float]
) -> None:
    """The precisions of Gaussian releases add up: their epsilon is that of one Gaussian."""
    wide = Budget(epsilon_total=50.0, delta=1e-5, epsilon_per_run=50.0)
    decision = {"kind": "decision", "events": [asdict(GaussianEvent(first))], "flower_run": ""}
    ledger = [decision, *(entry(release(noise, run=str(at))) for at, noise in enumerate(later))]
    precision = sum(noise**-2 for noise in [first, *later])
    whole = epsilon_spent([GaussianEvent(precision**-0.5)], 1e-5)
    assert spent(ledger, wide) == pytest.approx(whole, rel=1e-3)
    left = runs_left(ledger, (GaussianEvent(1.0),), wide)
    most = math.floor((gaussian_precision(50.0) - precision) / 1.0)
    assert left == pytest.approx(most, abs=1)


def gaussian_precision(epsilon: float) -> float:
    """Of all Gaussian releases together whose epsilon at 1e-5 is this, by bisection."""
    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        if epsilon_spent([GaussianEvent(middle**-0.5)], 1e-5) < epsilon:
            low = middle
        else:
            high = middle
    return low


def test_a_check_log_begun_again_in_the_same_second_is_a_later_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = CheckLog(tmp_path / "check-log", "d" * 16, tmp_path / "state")
    times, found = [100.9, 100.2, 90.0, 200.5], []
    for number, now in enumerate(times):
        monkeypatch.setattr(ledger, "time", SimpleNamespace(time=lambda now=now: now))
        seen.begin(number, "a" * 64)
        found.append(seen.read())
    assert [each.opened for each in found if each] == [100, 101, 102, 200]
    assert [each.length for each in found if each] == [0, 1, 2, 3]
    assert len({each.secret for each in found if each}) == 4
    assert all(each and len(each.secret) == 64 for each in found)
    seen.record(9, "b" * 64)
    now_ = seen.read()
    assert now_ is not None
    assert found[3] is not None
    assert now_ == replace(found[3], length=9, last="b" * 64)
    assert (tmp_path / "check-log").stat().st_mode & 0o777 == 0o700
    for name in ("z", "a", "z"):
        seen.record_answer(name)
    assert (tmp_path / "check-log" / f"{'d' * 16}.answered").read_text() == "a\nz\n"


def test_a_backbone_whose_dimension_the_images_decide_is_refused_in_a_private_run() -> None:
    check_dimension(load_backbone("pixels", "", 4, "cpu"))
    with pytest.raises(ConfigError, match="'pixels' with image-size = 0"):
        check_dimension(load_backbone("pixels", "", 0, "cpu"))


def test_a_reply_has_a_receipt_if_and_only_if_the_ledger_has_grown(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    node = NodeConfig(
        site="north",
        data="safetensors",
        data_dir=str(tmp_path / "data"),
        state_dir=str(tmp_path / "state"),
        check_log_dir=str(tmp_path / "check-log"),
    )
    ledger, gate = open_ledger(node), open_gate(node, "digits", "7")
    assert ledger.check_log is not None
    for number in range(2):
        # The header is an entry of its own.
        before = gate.check_receipts("")
        assert before == 1 + number
        assert gate.new_receipt(before) == {}
        ledger.charge(release(number=number + 1), TOTAL)
        seen = ledger.check_log.read()
        assert seen is not None
        receipt = gate.new_receipt(before)
        assert receipt == {"receipt": str(seen.receipt(before + 1, seen.last))}
        assert gate.check_receipts(receipt["receipt"]) == before + 1
    older = seen.receipt(9, seen.last)
    with pytest.raises(LedgerError, match="has seen 9 entries of the ledger, which has 3"):
        gate.check_receipts(str(older))
    public = NodeConfig(site="north", state_dir=str(tmp_path / "public"))
    gate = open_gate(public, "digits", "7")
    assert (gate.check_receipts(str(older)), gate.new_receipt(0)) == (0, {})
    with pytest.raises(ConfigError, match="is public; every run begins its own ledger"):
        open_ledger(public)


def test_the_delta_of_all_releases_is_twice_that_of_a_run_unless_it_is_set() -> None:
    plain, own = Budget(4.0, 1e-5, 1.0), Budget(4.0, 1e-5, 1.0, delta_total=7e-5)
    assert plain.filter == PrivacyFilter(4.0, 1e-5, 2e-5)
    assert own.filter == PrivacyFilter(4.0, 1e-5, 7e-5)


def test_the_newest_disclosure_of_a_run_is_named(tmp_path: Path) -> None:
    node = NodeConfig(site="north", state_dir=str(tmp_path))
    assert disclosure_of(node, "run") == ""
    folder = tmp_path / DISCLOSURES
    folder.mkdir()
    for name, at in (("run-b", 5), ("run-a", 9), ("run-c", 9), ("other-d", 20)):
        (folder / f"{name}.json").write_text("{}")
        os.utime(folder / f"{name}.json", (at, at))
    (folder / "run-z.txt").write_text("")
    assert disclosure_of(node, "run") == f"{DISCLOSURES}/run-c"
    assert disclosure_of(node, "other") == f"{DISCLOSURES}/other-d"


def test_a_ledger_of_another_format_or_data_set_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "data")
    ledger.open()
    ledger.charge(release(), TOTAL)
    for changed, words in (
        ({"format": 2}, "has a format other than 1"),
        ({"dataset": "other"}, "is that of data set 'other'"),
    ):
        other = Ledger(tmp_path / words[:3].strip(), "data")
        with pytest.MonkeyPatch.context() as patch:
            header = {"kind": "header", "format": 1, "dataset": "data"} | changed
            patch.setattr(Ledger, "_header", lambda self, header=header: header)
            other.open()
        with pytest.raises(LedgerError, match=words):
            other.entries()
    assert len(ledger.entries()) == 1


def test_a_folder_of_data_has_one_name_of_sixteen_digits_by_its_kind_and_place(
    tmp_path: Path,
) -> None:
    place = str(tmp_path / "data")
    whole = hashlib.sha256(f"dicom\0{Path(place).resolve()}".encode()).hexdigest()
    assert dataset_id("dicom", place) == whole[:16]
    assert dataset_id("dicom", f"{tmp_path}/other/../data") == whole[:16]
    assert dataset_id("parquet", place) != whole[:16]
