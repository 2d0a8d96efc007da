"""Which nodes take part under which name, and what the coordinator remembers of them: properties
over generated courses of connections, tables, receipts and identifications.
"""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import MOST_CLASSES, RunError, SurrogateError
from fedsurrogate.common.security.registrations import (
    Registration,
    read_table,
    write_table,
)
from fedsurrogate.strategies.base.identifications import (
    Identification,
    identification,
    misfits,
    settle,
)
from fedsurrogate.strategies.base.outcome import (
    NOT_REGISTERED,
    Outcome,
    Registered,
    Site,
    admit,
    check_name,
)
from tests.strategies.base.test_collecting import Events

SAME_FOLDER = [HealthCheck.function_scoped_fixture]
NODES, NAMES = st.integers(1, 5), st.sampled_from(["north", "south", "west"])
TABLES = st.dictionaries(NAMES, NODES).filter(lambda table: len(set(table.values())) == len(table))
COURSES = st.lists(st.tuples(st.lists(NODES, unique=True), TABLES), min_size=1, max_size=6)


@settings(max_examples=100)
@given(COURSES)
def test_only_the_nodes_of_the_table_take_part_and_under_its_names(
    course: list[tuple[list[int], dict[str, int]]],
) -> None:
    outcome, recorder = Outcome(), Events()
    sent: Counter[str] = Counter()
    for number, (nodes, table) in enumerate(course):
        names, before = {node: name for name, node in table.items()}, set(outcome.absent)
        outsiders = {n for n, site in outcome.sites.items() if site.reason == NOT_REGISTERED}
        recorder.seen.clear()
        admitted = admit(outcome, recorder, nodes, names, number)  # type: ignore[arg-type]
        assert admitted == [node for node in nodes if node in names]
        for node in admitted:
            site = outcome.sites[node]
            assert (site.name, site.registered, site.barred, site.node) == (
                names[node], True, False, node,
            )  # fmt: skip
            site.bytes_up += 5
            sent[site.name] += 5
            assert site.bytes_up == sent[site.name], "costs move along"
        for node in set(nodes) - names.keys():
            site = outcome.sites[node]
            assert (site.fate, site.barred, site.registered) == ("rejected", True, False)
            assert site.reason == NOT_REGISTERED
            events = [each["site"] for each in recorder.seen if each["event"] == "rejected"]
            assert node in outsiders or events.count(site.name) == 1
        registered = [site.name for site in outcome.sites.values() if site.registered]
        assert len(registered) == len(set(registered)), "a site is one node"
        there = {site.name for site in outcome.sites.values()}
        assert outcome.absent == sorted(table.keys() - there)
        new = [each["site"] for each in recorder.seen if each["event"] == "absent"]
        assert new == [name for name in outcome.absent if name not in before]
        assert all(each["round"] == number for each in recorder.seen)
        sent = Counter({site.name: site.bytes_up for site in outcome.sites.values()})


@given(st.lists(NODES, unique=True))
def test_without_a_table_every_node_takes_part_without_a_name(nodes: list[int]) -> None:
    outcome, recorder = Outcome(), Events()
    assert admit(outcome, recorder, nodes, None) == nodes  # type: ignore[arg-type]
    assert {node: site.name for node, site in outcome.sites.items()} == {
        node: f"node {node}" for node in nodes
    }
    assert not recorder.seen
    assert not any(site.registered or site.barred for site in outcome.sites.values())


@settings(max_examples=20, suppress_health_check=SAME_FOLDER)
@given(table=TABLES)
def test_a_table_is_read_as_it_was_written(tmp_path: Path, table: dict[str, int]) -> None:
    file = tmp_path / "registered.json"
    written = {name: Registration(f"key {name}", node) for name, node in table.items()}
    write_table(file, written)
    assert read_table(file) == written
    assert Registered(file).names() == {node: name for name, node in table.items()}
    assert Registered.here({"FEDSURROGATE_REGISTERED": str(file)}) == Registered(file)
    assert Registered.here({}) is None


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "site": st.sampled_from(["north", "south", "", 1]),
            "status": st.sampled_from(["ok", "policy", "OK"]),
        },
    )
)
def test_a_registered_site_has_the_name_of_its_key(info: dict[str, Any]) -> None:
    site = Site("north", registered=True)
    if "site" not in info and info.get("status") != "ok":
        check_name(site, info)
        assert not site.heard
    elif info.get("site") == "north":
        check_name(site, info)
        assert site.heard
    else:
        with pytest.raises(SurrogateError, match="registered as 'north'"):
            check_name(site, info)
        assert not site.heard


PRINTS = st.sampled_from(["a" * 16, "b" * 16, "c" * 16])
IDENTIFIED = st.dictionaries(
    st.integers(1, 8),
    st.tuples(PRINTS, st.sampled_from([4, 8]), st.lists(st.sampled_from("xyz"), unique=True)),
    max_size=8,
)


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),
    st.integers(-14, 14),
    st.sampled_from([-3600.0, -1e-6, 0.0, 1e-6, 3600.0]),
)
def test_a_key_ends_at_its_time_in_any_zone(moment: datetime, hours: int, later: float) -> None:
    zoned = moment.replace(tzinfo=timezone(timedelta(hours=hours)))
    now = (zoned + timedelta(seconds=later)).astimezone(UTC)
    assert Registration("key", 1, zoned.isoformat()).expired(now) == (later >= 0)
    assert not Registration("key", 1).expired(now)
    with pytest.raises(ValueError, match="zone"):
        Registration("key", 1, moment.isoformat())


@settings(max_examples=100)
@given(IDENTIFIED, st.sampled_from(["", "a" * 16, "d" * 16]), st.sampled_from([(), ("z", "x")]))
def test_the_largest_group_with_one_backbone_takes_part(
    sites: dict[int, Any], fingerprint: str, wanted: tuple[str, ...]
) -> None:
    identified = {
        node: Identification(f"s{node}", kind, dimension, tuple(classes), f"{node}", False)
        for node, (kind, dimension, classes) in sites.items()
    }
    fitting = Counter(
        (kind, dimension) for kind, dimension, _ in sites.values() if kind == (fingerprint or kind)
    )
    if list(fitting.values()).count(max(fitting.values(), default=0)) > 1:
        with pytest.raises(RunError) as found:
            settle(identified, wanted, fingerprint)
        for node, (kind, dimension, _) in sites.items():
            fits = (kind, dimension) in fitting
            assert (f"s{node}" in str(found.value)) == fits, "all kinds and sites are named"
            assert not fits or f"{kind} of dimension {dimension}" in str(found.value)
        return
    group, others = settle(identified, wanted, fingerprint)
    assert set(group.nodes.values()) | others.keys() == sites.keys()
    assert not set(group.nodes.values()) & others.keys()
    if not fitting:
        assert not group.nodes
        return
    assert len(group.nodes) == max(fitting.values())
    assert fitting[group.fingerprint, group.dimension] == len(group.nodes)
    members = {
        node for node, each in sites.items() if each[:2] == (group.fingerprint, group.dimension)
    }
    assert group.nodes == {f"s{node}": node for node in members}
    assert group.keys == {f"s{node}": f"{node}" for node in members}
    every = {name for node in members for name in sites[node][2]}
    assert group.classes == (wanted or tuple(sorted(every)))
    backwards = dict(reversed(identified.items()))
    assert settle(backwards, wanted, fingerprint) == (group, others)
    if len(fitting) == 1:
        assert settle(identified, wanted, fingerprint, private=True) == (group, others)
    else:
        with pytest.raises(RunError, match="nothing is charged"):
            settle(identified, wanted, fingerprint, private=True)


KINDS = st.tuples(st.sampled_from("ab"), st.sampled_from([4, 8]), st.sampled_from([("x",), ("y",)]))


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from("abcdefgh"), KINDS, max_size=8))
def test_surrogates_of_the_most_common_kind_fit(kinds: dict[str, Any]) -> None:
    counts = Counter(kinds.values())
    if list(counts.values()).count(max(counts.values(), default=0)) > 1:
        with pytest.raises(RunError, match="who is wrong cannot be told"):
            misfits(kinds)
        return
    unfit = misfits(kinds)
    fitting = {kind for name, kind in kinds.items() if name not in unfit}
    assert fitting == {kind for kind, _ in counts.most_common(1)}
    for name, reason in unfit.items():
        (kind,) = fitting
        text = ("fingerprint", "dimension", "classes")
        assert text[next(i for i in range(3) if kinds[name][i] != kind[i])] in reason
    assert misfits(dict(reversed(kinds.items()))) == unfit, "whoever answers first"


GOOD: dict[str, Any] = {"fingerprint": "f" * 16, "dimension": 8, "classes": '["a", "b"]'}


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprint": None}, {"fingerprint": ""}, {"dimension": 0}, {"dimension": -1}, {"dimension": 2**24 + 1},
        {"dimension": "8"}, {"classes": "[1]"}, {"classes": "{}"}, {"classes": "["}, {"classes": "[" * 10_000},
        {"classes": json.dumps(["a"] * (MOST_CLASSES + 1))}, {"key": 1}, {"key": "A"}, {"key": "a" * 1025},
    ],
)  # fmt: skip
def test_an_identification_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    many = tuple(f"c{number}" for number in range(MOST_CLASSES))
    assert identification("north", GOOD | {"classes": json.dumps(many)}).classes == many
    for right in ({}, {"dimension": 2**24}, {"key": "a" * 1024}, {"simulated": True}):
        made = identification("north", GOOD | right)
        assert made == Identification(
            "north", "f" * 16, right.get("dimension", 8), ("a", "b"), right.get("key", ""),
            "simulated" in right,
        )  # fmt: skip
    with pytest.raises(SurrogateError, match="identification has"):
        identification("north", GOOD | wrong)


def test_a_site_that_stays_keeps_all_that_is_known_of_it() -> None:
    outcome, recorder = Outcome(), Events()
    assert admit(outcome, recorder, [1, 2], {1: "a", 2: "b"}) == [1, 2]
    site = outcome.sites[1]
    site.heard, site.records, site.bytes_up = True, 9, 40
    assert admit(outcome, recorder, [1, 2], {1: "a", 2: "b"}, 3) == [1, 2]
    assert outcome.sites[1] is site
    # With another key it begins again, but for the bytes that were sent.
    admit(outcome, recorder, [5], {5: "a"}, 4)
    again = outcome.sites[5]
    assert (again.name, again.registered, again.node) == ("a", True, 5)
    assert (again.heard, again.records, again.bytes_up) == (False, 0, 40)
    assert 1 not in outcome.sites
