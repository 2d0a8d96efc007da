"""What every strategy of the registry does before the first request: how long it waits, what it records,
what it refuses, and that nothing happens where nothing was asked; and the order of a chain.
"""

from __future__ import annotations

import json
import math
import random
from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import Info
from fedsurrogate.strategies.base.chain import STATE, Chain, Walk
from fedsurrogate.strategies.base.identifications import Group
from fedsurrogate.strategies.base.outcome import (
    DOWNSTREAM,
    DOWNSTREAM_LIMITS,
    Site,
    downstream_in,
    numbers_in,
    seconds_in,
    share_in,
    whole_number,
)
from fedsurrogate.strategies.fedpft.strategy import FedPFTChain
from tests.strategies.base.test_courses_of_a_run import Kept

few = settings(max_examples=60, deadline=None)


@few
@given(
    st.lists(st.sampled_from(["s1", "s2", "s3", "s10", "s20"]), min_size=1, unique=True),
    st.lists(st.sampled_from(["s1", "s2", "s3", "s10", "other"]), max_size=5, unique=True),
    st.sets(st.sampled_from(["s1", "s2", "s3"])),
    st.integers(0, 99),
)
def test_a_chain_goes_in_the_order_of_the_settings_or_of_the_seed(
    there: list[str], named: list[str], away: set[str], seed: int
) -> None:
    """`away` did connect, but does not fit together with the others."""
    config = parse_run({"fedpft.topology": "chain", "fedpft.order": ",".join(named), "seed": seed})
    recorder = Kept()
    chain = FedPFTChain(config, recorder)
    chain.outcome.sites = {node: Site(name) for node, name in enumerate(there)}
    group = Group(nodes={name: node for node, name in enumerate(there) if name not in away})
    fitting = sorted(group.nodes, key=lambda name: int(name[1:]))
    if not named:
        random.Random(seed).shuffle(fitting)
        assert chain._order(group) == fitting
        assert recorder.events == []
        return
    if not set(named) & set(there):
        with pytest.raises(RunError) as caught:
            chain._order(group)
        assert str(caught.value) == (
            "fedpft.order names none of the connected sites; use these names: "
            + ", ".join(sorted(there))
        )
        return
    assert chain._order(group) == named
    left = [name for name in fitting if name not in named]
    assert recorder.events == [
        {"event": "left-out", "site": name, "reason": "not in fedpft.order"} for name in left
    ]
    reasons = {site.name: site.reason for site in chain.outcome.sites.values()}
    assert [name for name in fitting if reasons[name] == "not in fedpft.order"] == left


@few
@given(
    relay=st.binary(max_size=3),
    done=st.integers(0, 3),
    fault=st.sampled_from(["", "", "run", "text", "form", "missing"]),
)
def test_a_resumed_chain_goes_on_with_its_relay_or_says_what_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, relay: bytes, done: int, fault: str
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    config = parse_run({"fedpft.topology": "chain", "resume": str(folder)})
    names = ["a", "b", "c", "d"]
    walk = Walk(names, names[:done], run="other" if fault == "run" else config.digest)
    walk.relay = b64encode(relay).decode()
    text = {"text": "{", "form": '{"x": 1}'}.get(fault, json.dumps(vars(walk)))
    if fault != "missing":
        (Path(folder) / STATE).write_text(text)
    recorder = Kept()
    chain: Chain = FedPFTChain(config, recorder)
    chain.outcome.sites = {node: Site(name) for node, name in enumerate(names)}
    group = Group(nodes={name: node for node, name in enumerate(names) if name != "a"})
    if fault:
        with pytest.raises(RunError) as caught:
            chain._begin(group)
        start = f"resume = {str(folder)!r}"
        assert (
            str(caught.value)
            == {
                "run": f"{start} is of a run with other settings, or of another version",
                "text": f"{start}: {STATE} is damaged (JSONDecodeError)",
                "form": f"{start}: {STATE} is damaged (TypeError)",
                "missing": f"{start}: {STATE} cannot be read (FileNotFoundError); name the folder of "
                "an earlier run",
            }[fault]
        )
        return
    found, current = chain._begin(group)
    assert current == (relay or None)
    assert found.done == names[:done]
    assert recorder.events[0] == {"event": "resumed", "hops": done}
    fates = {site.name: (site.fate, site.reason) for site in chain.outcome.sites.values()}
    for name in names[:done]:
        assert (fates[name] == ("used", "")) == (name in group.nodes)
    if not done:
        assert found.skipped == ["a"]


def test_reported_numbers_count_at_their_limits_and_not_beyond() -> None:
    for value, wanted in ((0, 0), (2**40 - 1, 2**40 - 1), (2**40, 0), (-1, 0), (3.0, 0), ("3", 0)):
        assert whole_number({"n": value}, "n") == wanted
    assert whole_number({}, "n") == 0
    for number, share, seconds in (
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        (math.nextafter(1, 2), None, math.nextafter(1, 2)),
        (math.nextafter(0, -1), None, None),
        (math.inf, None, None),
        (math.nan, None, None),
        (1, None, None),
    ):
        info: Info = {"x": number, "x-seconds": number}
        assert share_in(info, "x") == share
        assert seconds_in(info, "x") == seconds
    assert share_in({}, "x") is None
    assert seconds_in({"x": 1.0}, "x") is None
    for listed, counts in (([1, 2.5], True), ([], True), ([1, math.inf], False), ([1, "2"], False)):
        assert numbers_in({"x": listed}, "x") == (listed if counts else [])  # type: ignore[dict-item]
    assert numbers_in({"x": 3}, "x") == numbers_in({}, "x") == []


@pytest.mark.parametrize("name", sorted(DOWNSTREAM_LIMITS))
def test_scores_of_a_generator_count_up_to_their_limit(name: str) -> None:
    limit = 4.0 if name in ("sliced", "sinkhorn") else 1.0
    for value, counts in (
        (0.0, True), (limit, True), (math.nextafter(limit, 9), False), (math.nextafter(0, -1), False),
        (math.nan, False), (1, False), ("0.5", False),
    ):  # fmt: skip
        found = downstream_in({DOWNSTREAM + name: value, "sent": 0.5})
        assert found == ({name: value} if counts else {})
