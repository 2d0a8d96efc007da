"""Exact sums of one site, begun, signed, opened and forgotten in any order: all of them that are not
forgotten are over one set of sites, with the same settings, and over unchanged records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import PolicyError, StateError
from tests.grid import NodeConfig, open_new


@dataclass(frozen=True)
class Step:
    """A step of a sum.

    Attributes:
        kind: what happens.
        name: of the sum.
        sites: keys in its list.
        settings: digests of what is added, by what they are about.
        records: digests of the records, by kind.
        fails: whether the release fails before its vector leaves.
    """

    kind: str
    name: str
    sites: frozenset[bytes]
    settings: dict[str, str]
    records: dict[str, str]
    fails: bool


ALL = frozenset({b"north", b"south", b"west"})
ABOUT = st.dictionaries(st.sampled_from(["training", "held-out"]), st.sampled_from("112"))
STEPS = st.builds(
    Step,
    kind=st.sampled_from(["fix", "fix", "sign", "open", "open", "forget"]),
    name=st.sampled_from("xy"),
    sites=st.sampled_from([ALL, ALL, ALL - {b"west"}, ALL - {b"south"}, ALL | {b"east"}]),
    settings=ABOUT,
    records=ABOUT,
    fails=st.sampled_from([False, False, True]),
)


@dataclass
class Memory:
    """What a site must remember: the sites, the sum that fixed them until it is opened, and all
    settings and records so far.
    """

    sites: frozenset[bytes] | None = None
    open: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    records: dict[str, str] = field(default_factory=dict)

    def allows_list(self, step: Step) -> bool:
        """Whether the sites of a list may be in a sum."""
        assert self.sites is not None
        fewer = self.open == step.name and step.sites <= self.sites
        return fewer or step.sites == self.sites


def differ(before: dict[str, str], now: dict[str, str]) -> bool:
    return any(before[what] != now[what] for what in before.keys() & now.keys())


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=8))
def test_sums_that_are_remembered_are_over_the_same_sites_settings_and_records(
    tmp_path_factory: pytest.TempPathFactory, course: list[Step]
) -> None:
    folder = tmp_path_factory.mktemp("site")
    own: NodeConfig = {
        "site": "n",
        "state-dir": str(folder / "new" / "state"),
        "data": "parquet",
        "data-dir": str(folder),
        "check-log-dir": str(folder / "check-log"),
    }
    node = parse_node_config(own)
    open_new(own)
    memory = Memory()
    for step in course:
        given_ = (node, step.name, sorted(step.sites))
        if step.kind == "forget":
            assert (secure_aggregation.forget(node) is None) == (memory.sites is None)
            memory = Memory()
        elif step.kind != "fix":
            act = (
                secure_aggregation.check_summed
                if step.kind == "sign"
                else secure_aggregation.settle
            )
            if memory.sites is None:
                with pytest.raises(StateError, match="forgotten"):
                    act(*given_)
            elif not memory.allows_list(step):
                with pytest.raises(PolicyError, match="with other sites"):
                    act(*given_)
            else:
                act(*given_)
                if step.kind == "open":
                    memory.sites, memory.open = step.sites, ""
        else:
            other = differ(memory.settings, step.settings)
            changed = differ(memory.records, step.records)
            why = secure_aggregation.why_changed(node, step.settings, step.records)
            assert bool(why) == (changed and not other)
            fixing = secure_aggregation.fixing(*given_, step.settings, step.records)
            if memory.sites not in (None, step.sites) or other:
                with pytest.raises(PolicyError), fixing:
                    pass
            elif changed:
                with pytest.raises(StateError), fixing:
                    pass
            elif step.fails:
                with pytest.raises(ValueError, match="full"), fixing:
                    raise ValueError("full")
            else:
                with fixing:
                    pass
                memory.open = "" if memory.sites else step.name
                memory.sites = step.sites
                memory.settings |= step.settings
                memory.records |= step.records


def test_records_of_other_settings_are_refused_for_the_settings_and_not_random(
    tmp_path: Path,
) -> None:
    """What is remembered of several sums is all of it, each kind by itself."""
    node = parse_node_config({"site": "north", "state-dir": str(tmp_path)})
    with secure_aggregation.fixing(node, "x", ALL, {"numbers": "n"}, {"training": "r"}):
        pass
    with secure_aggregation.fixing(node, "y", ALL, {"training": "s"}, {"held-out": "h"}):
        pass
    (file,) = (tmp_path / "sums").glob("*.json")
    content = json.loads(file.read_text())
    assert content["records"] == {"training": "r", "held-out": "h"}
    assert content["settings"] == {"numbers": "n", "training": "s"}
    assert content["sum"] == ""
    assert "data have changed" in secure_aggregation.why_changed(
        node, {"numbers": "n"}, {"training": "2"}
    )
    assert secure_aggregation.why_changed(node, {"numbers": "2"}, {"training": "2"}) == ""
    assert secure_aggregation.why_changed(node, {"numbers": "n"}, {"training": "r"}) == ""


@pytest.mark.parametrize(("records", "known"), [("old", True), ("", False)])
def test_a_record_of_an_earlier_version_is_of_training_records(
    tmp_path: Path, records: str, known: bool
) -> None:
    node = parse_node_config({"site": "north", "state-dir": str(tmp_path)})
    with secure_aggregation.fixing(node, "x", ALL, {}, {}):
        pass
    (file,) = (tmp_path / "sums").glob("*.json")
    content = json.loads(file.read_text())
    del content["settings"]
    file.write_text(json.dumps(content | {"records": records}))
    assert bool(secure_aggregation.why_changed(node, {}, {"training": "new"})) == known
    assert secure_aggregation.why_changed(node, {}, {"training": records or "new"}) == ""
    assert secure_aggregation.why_changed(node, {}, {"held-out": "new"}) == ""
