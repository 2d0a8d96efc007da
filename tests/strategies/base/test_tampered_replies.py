"""A site's reply is checked before learning: a wrong reply is refused with the reason, and deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.wire.records import INFO, PAYLOAD
from fedsurrogate.common.wire.tensors import pack, unpack
from tests.grid import (
    FAST,
    FIRST_NODE,
    SECRET,
    Fault,
    InProcessGrid,
    events_of,
    files_with,
    metrics_of,
    outcome,
    run_federation,
    sites,
    surrogates_of,
    with_each,
)

Change = Callable[[pb.Surrogate], None]
SHORT = {"deadline": 0.15}
DIAG = FAST | {"fedpft.covariance": "diag", "fedpft.components": 2, "partition": "iid"}
DIGITS = ",".join(map(str, range(10)))


def edit(change: Change) -> Fault:
    """A site that changes its surrogate before it sends it."""

    def rewrite(payload: bytes) -> bytes:
        message = pb.Surrogate.FromString(payload)
        change(message)
        return message.SerializeToString(deterministic=True)

    return Fault(payload=rewrite)


def info(**fields: Any) -> Fault:
    """A site that changes the numbers sent with its surrogate."""

    def rewrite(record: RecordDict) -> None:
        record[INFO] = ConfigRecord(
            dict(record.config_records[INFO]) | {k.replace("_", "-"): v for k, v in fields.items()}
        )

    return Fault(reply=rewrite)


def halves(field: str, *values: float) -> Change:
    """Overwrite the first numbers of a table."""

    def change(message: pb.Surrogate) -> None:
        table = getattr(message.mixtures, field)
        table.data = np.array(values, dtype="<f2").tobytes() + table.data[2 * len(values) :]

    return change


def narrow(message: pb.Surrogate) -> None:
    """A consistent surrogate of one dimension fewer."""
    for name, table in (
        ("means", message.mixtures.means),
        ("variances", message.mixtures.spread[0]),
    ):
        values = unpack(table, name, tuple(table.shape))
        table.CopyFrom(pack(values[:, :-1], logarithm=table.logarithm))


def header(**fields: str) -> Change:
    def change(message: pb.Surrogate) -> None:
        for name, value in fields.items():
            setattr(message.header, name, value)

    return change


# What no surrogate may hold is in tests/common/wire/test_validation.py and test_records.py, and forged
# replies of any form are in test_hostile_replies.py.
TAMPERED: dict[str, tuple[Fault, str]] = {
    "dimension": (edit(narrow), "features of dimension 63; the other sites have 64"),
    "another site": (edit(header(site="0")), "names another site as its sender"),
    "noise": (Fault(payload=lambda payload: b"\xff" * 500), "500 bytes that are not a valid surrogate"),
    "no payload": (Fault(reply=lambda record: record.pop(PAYLOAD)), "a reply without a surrogate"),
    "no info": (Fault(reply=lambda record: record.pop(INFO)), "announced"),
    "unknown code": (info(status="see /mnt/" + SECRET), "the site failed; its own log says why"),
    "uncountable": (info(extra=[]), "cannot be counted"),
    "traversal": (info(site="../../" + SECRET), "names another site as its sender"),
}  # fmt: skip


def test_a_tampered_reply_is_refused_with_the_reason(tmp_path: Path) -> None:
    """All in one run, with three honest sites."""
    grid = with_each(fault for fault, _ in TAMPERED.values())
    folder = run_federation(tmp_path, grid, report=True, classes=DIGITS, quorum=0.05, **DIAG)
    found = {
        event["site"]: event["reason"]
        for event in events_of(folder)
        if event["event"] == "rejected"
    }
    for number, (case, (_, reason)) in enumerate(TAMPERED.items()):
        nameless = case in ("no info", "uncountable", "traversal")
        said = found[f"node {FIRST_NODE + 3 + number}" if nameless else f"faulty-{number}"]
        assert reason in said, case
        assert "\n" not in said, case
    metrics = metrics_of(folder)
    everyone = {"invited": 3 + len(TAMPERED), "used": 3, "rejected": len(TAMPERED), "dropped": 0}
    assert (metrics["status"], metrics["sites"]) == ("ok", everyone)
    assert set(surrogates_of(folder)) == {"0.pb", "1.pb", "2.pb"}, (
        "refit would learn from what was refused"
    )
    assert not files_with(SECRET, folder)
    assert set(grid.asked("evaluate")) == {0, 1, 2}


def test_a_payload_larger_than_the_run_allows_is_refused_unread(tmp_path: Path) -> None:
    fault = Fault(payload=lambda payload: b"\0" * (2**20 + 1))
    folder = run_federation(
        tmp_path, InProcessGrid(sites(3), {1: fault}), max_payload_mib=1, **DIAG
    )
    assert "at most 1048576 are allowed" in outcome(folder, "node 1002", "rejected")


def test_a_late_surrogate_passes_the_same_checks(tmp_path: Path) -> None:
    changes = [narrow, header(fingerprint="f" * 64), header(site="2"), halves("means", np.nan)]
    grid = with_each(Fault(late="evaluate", payload=edit(each).payload) for each in changes)
    folder = run_federation(tmp_path, grid, quorum=0.3, **DIAG, **SHORT)
    assert set(surrogates_of(folder)) == {"0.pb", "1.pb", "2.pb"}
    assert metrics_of(folder)["sites"] == {"invited": 7, "used": 3, "rejected": 4, "dropped": 0}


def test_a_refused_site_does_not_block_its_name(tmp_path: Path) -> None:
    nodes = sites(3, site="clinic")
    nodes[0]["site"], nodes[2]["site"] = "north", "clinic"
    grid = InProcessGrid(nodes, {1: edit(halves("means", np.nan)), 2: Fault(pulls=3)})
    folder = run_federation(tmp_path, grid, **FAST)
    assert set(surrogates_of(folder)) == {"north.pb", "clinic.pb"}
    assert set(metrics_of(folder)["bytes"]["up_per_site"]) == {"north", "clinic", "node 1002"}
