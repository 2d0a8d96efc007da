"""Receipts of sites against a plain table, over orders of runs, nodes and ledgers; and what is not kept."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.security.registrations import Receipt
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.strategies.base import outcome
from fedsurrogate.strategies.base.outcome import Receipts, stored_receipts
from tests.strategies.base.test_courses_of_a_run import Kept


def receipt(ledger: int, length: int = 1) -> Receipt:
    return Receipt(f"{ledger:032x}", 1000 + ledger, length, f"{length:064x}")


SENDS = st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 3), st.integers(1, 4))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SENDS, st.booleans()), max_size=8))
def test_the_longest_receipt_of_each_ledger_is_shown_to_its_site_in_the_order_of_the_last_ones(
    steps: list[tuple[tuple[str, int, int, int], bool]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output, kept = f"{folder}/runs", Kept()
        found = Receipts(output, "", kept)
        assert not found
        table: dict[str, dict[int, Receipt]] = {}
        nodes: dict[str, int] = {}
        for (name, node, ledger, length), again in steps:
            found.take(name, node, str(receipt(ledger, length)))
            own = table.setdefault(name, {})
            before = own.pop(ledger, receipt(ledger, length))
            own[ledger] = max(before, receipt(ledger, length), key=lambda each: each.length)
            nodes[name] = node
            if again:
                found = Receipts(output, "", kept)
            assert found
            for each in (1, 2, 3, 9):
                assert found.has_node(each) == (each in nodes.values())
            for other in "ab":
                mine = [str(each) for each in table.get(other, {}).values()]
                assert found.of(other) == found.of(other, 9) == ",".join(mine)
                # A node's last site is the same one, whatever name it has now.
                for at in (1, 2, 3):
                    known = [n for n in "ab" if n != other and nodes.get(n) == at and n in table]
                    more = [str(r) for n in known for r in table[n].values()]
                    assert sorted(found.of(other, at).split(",")) == sorted([*more, *mine] or [""])
            content = json.loads((Path(output) / "receipts" / f"{name}.json").read_text())
            assert content == {"node": node, "receipts": [str(each) for each in own.values()]}
        assert kept.events == []
        texts = {name: ",".join(map(str, own.values())) for name, own in table.items()}
        assert stored_receipts(output) == texts


def test_the_last_32_ledgers_of_a_site_are_kept(tmp_path: Path) -> None:
    found = Receipts(str(tmp_path), "", Kept())
    for ledger in range(33):
        found.take("a", 1, str(receipt(ledger)))
    wanted = ",".join(str(receipt(ledger)) for ledger in range(1, 33))
    assert found.of("a") == wanted
    assert stored_receipts(str(tmp_path)) == {"a": wanted}
    # Of a node with two names: those of the name that it has now come last.
    found.take("b", 1, str(receipt(99)))
    assert found.of("b", 1) == ",".join([*wanted.split(",")[1:], str(receipt(99))])
    (file,) = (tmp_path / "receipts").glob("a.json")
    content = json.loads(file.read_text())
    content["receipts"] += [str(receipt(50))]
    file.write_text(json.dumps(content))
    assert stored_receipts(str(tmp_path))["a"] == wanted
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_message_has_the_receipts_of_its_reader_only(tmp_path: Path) -> None:
    found = Receipts(str(tmp_path), "", Kept())
    record = RecordDict({INFO: ConfigRecord({"x": 1})})
    found.show(record, "a", 1)
    assert dict(record.config_records[INFO]) == {"x": 1}
    found.take("a", 1, str(receipt(4)))
    found.take("b", 2, None)
    found.take("../b", 2, str(receipt(5)))
    found.show(record, "b", 2)
    assert dict(record.config_records[INFO]) == {"x": 1}
    found.show(record, "a", 2)
    assert dict(record.config_records[INFO]) == {"x": 1, "receipts": str(receipt(4))}
    assert list(stored_receipts(str(tmp_path))) == ["a"]
    with pytest.raises(SurrogateError, match="a receipt that cannot be read"):
        found.take("b", 2, "no receipt")
    assert not found.has_node(2)


def test_receipts_of_a_run_that_is_continued_count_with_the_own_ones(tmp_path: Path) -> None:
    for folder, ledger, node in (("here", 1, 5), ("there", 2, 6)):
        Receipts(str(tmp_path / folder), "", Kept()).take("a", node, str(receipt(ledger, 3)))
    Receipts(str(tmp_path / "there"), "", Kept()).take("a", 6, str(receipt(1, 9)))
    found = Receipts(str(tmp_path / "here"), str(tmp_path / "there" / "run-1"), Kept())
    assert sorted(found.of("a").split(",")) == sorted([str(receipt(1, 9)), str(receipt(2, 3))])
    assert (found.has_node(5), found.has_node(6)) == (True, False)
    # What another process has written meanwhile is kept.
    Receipts(str(tmp_path / "here"), "", Kept()).take("a", 5, str(receipt(7)))
    found.take("a", 5, str(receipt(8)))
    stored = stored_receipts(str(tmp_path / "here"))["a"].split(",")
    assert set(stored) == {str(receipt(*each)) for each in ((1, 9), (2, 3), (7, 1), (8, 1))}


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]", b"3", b"{}", 9000 * b"[", *(
    json.dumps(each).encode() for each in (
        {"node": True, "receipts": []}, {"node": "1", "receipts": []}, {"node": 1}, {"node": 1, "receipts": 3},
        {"node": 1, "receipts": ["x"]}, {"node": 1, "receipts": {"a": 1}},
    )
)])  # fmt: skip
def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path, content: bytes) -> None:
    Receipts(str(tmp_path), "", Kept()).take("b", 1, str(receipt(1)))
    (tmp_path / "receipts" / "a.json").write_bytes(content)
    (tmp_path / "receipts" / "c.json").mkdir()
    assert stored_receipts(str(tmp_path)) == {"b": str(receipt(1))}
    assert Receipts(str(tmp_path), "", Kept()).of("b") == str(receipt(1))


def test_what_is_not_kept_is_an_event_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    found = Receipts(str(tmp_path), "", kept)

    def full(*given: Any, **more: Any) -> None:
        raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "replace_file", full)
        found.take("a", 1, str(receipt(1)))
    event: dict[str, Any] = {"event": "receipt-not-kept", "site": "a", "reason": "PermissionError"}
    assert kept.events == [event]
    assert found.of("a") == str(receipt(1))
    monkeypatch.setattr(outcome, "MOST_SITES", 2)
    for name in ("b", "c", "b"):
        found.take(name, 2, str(receipt(2)))
    event |= {"site": "c", "reason": "the limit of 2 sites is reached"}
    assert kept.events[1:] == [event]
    assert (found.of("c"), list(stored_receipts(str(tmp_path)))) == ("", ["b"])
