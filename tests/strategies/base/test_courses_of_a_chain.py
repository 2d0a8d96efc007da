"""A chain over sites that pass on a head, refuse, send nonsense or keep silent: who has which turn with
which relay, what is recorded, and what is left at the end.
"""

from __future__ import annotations

import json
import random
from base64 import b64decode
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE, LocalGrid
from fedsurrogate.strategies.base.chain import RELAY, STATE
from fedsurrogate.strategies.base.outcome import NO_REPLY
from fedsurrogate.strategies.heads import HeadChain
from tests.strategies.base.test_collecting import with_clock
from tests.strategies.base.test_courses_of_a_run import Kept

CLASSES, D = ("a", "b"), 3
COURSES = st.lists(
    st.sampled_from(
        ["well", "well", "well", "refused", "broken", "other sender", "silent", "empty"]
    ),
    min_size=1,
    max_size=5,
)


def head_of(run: str, number: int, how: str) -> bytes:
    draw = torch.Generator().manual_seed(number)
    name = "another" if how == "other sender" else f"s{number}"
    tensors = {"weight": torch.randn(2, D, generator=draw), "bias": torch.randn(2, generator=draw)}
    return pack_parameters(Parameters(Header("kd", run, name, "f" * 16, CLASSES), 1, tensors, 9))


class Sites(LocalGrid):
    """Sites that follow their courses, and remember what they were asked."""

    def __init__(self, run: str, courses: list[str]) -> None:
        self._digest, self._courses, self._mute = run, courses, set[str]()
        self.asked: list[tuple[int, bytes | None, dict[str, Any]]] = []
        super().__init__(self._follow, [{}] * len(courses))

    def _follow(self, message: Message, context: Context) -> Message:
        number, kind = context.node_id - FIRST_NODE, message.metadata.message_type
        how, info = self._courses[number], {"status": "ok", "site": f"s{number}"}
        payload, asked = from_record(message.content, 2**20)
        sent: bytes | None = None
        more: dict[str, Any] = {}
        if kind.endswith("hello"):
            more = {"fingerprint": "f" * 16, "dimension": D, "classes": '["a", "b"]', "key": "ab"}
        elif kind == "train":
            self.asked.append((number, payload, dict(asked)))
            if how == "silent":
                self._mute.add(message.metadata.message_id)
            if how == "refused":
                info["status"] = "policy"
            elif how != "empty":
                sent = b"no head" if how == "broken" else head_of(self._digest, number, how)
                more = {
                    "bytes": len(sent),
                    "accuracy.model": number / 8,
                    "fit-seconds": 2.0 + number,
                    "simulated": number % 2 == 0,
                }
        else:
            more = {"correct": number, "tested": 10}
        return Message(to_record(sent, info | more), reply_to=message)

    def _may_arrive(self, message_id: str) -> bool:
        return message_id not in self._mute


@settings(max_examples=25, deadline=None)
@given(COURSES, st.integers(0, 20), st.sampled_from([0.1, 0.6]))
def test_each_site_has_its_turn_with_the_last_relay_that_was_accepted(
    courses: list[str], seed: int, quorum: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with_clock(patch)
        run = parse_run({"method": "kd", "seed": seed, "quorum": quorum, "deadline": 5.0})
        grid, recorder = Sites(run.digest, courses), Kept()
        strategy = HeadChain(run, recorder)
        order = [f"s{number}" for number in range(len(courses))]
        random.Random(seed).shuffle(order)
        done = [name for name in order if courses[int(name[1:])] == "well"]
        needed = max(1, -(-int(10 * quorum * len(courses)) // 10))
        if len(done) < needed:
            with pytest.raises(RunError, match=f"quorum missed: {len(done)} of {len(courses)} sit"):
                strategy.run(grid)
            assert strategy.outcome.model is None
            accuracy = None
        else:
            accuracy = strategy.run(grid)
    assert [f"s{number}" for number, *_ in grid.asked] == order
    relay: bytes | None = None
    lineages = set()
    for hop, (number, payload, info) in enumerate(grid.asked, 1):
        assert payload == relay
        assert (info["hop"], info["run"]) == (hop, run.digest)
        assert json.loads(str(info["classes"])) == list(CLASSES)
        assert info.get("bytes") == (None if relay is None else len(relay))
        lineages.add(info["lineage"])
        if courses[number] == "well":
            relay = head_of(run.digest, number, "well")
    assert len(lineages) == 1
    sites = {site.name: site for site in strategy.outcome.sites.values()}
    for name in order:
        how = courses[int(name[1:])]
        fates = {"well": "used", "silent": "dropped"}
        assert sites[name].fate == fates.get(how, "rejected"), how
        assert sites[name].simulated == (how == "well" and int(name[1:]) % 2 == 0)
    assert recorder.of("rejected") == [
        name for name in order if courses[int(name[1:])] not in ("well", "silent")
    ]
    silent = [name for name in order if courses[int(name[1:])] == "silent"]
    assert [each for each in recorder.events if each["event"] == "dropped"] == [
        {"event": "dropped", "site": name, "reason": f"skipped in the chain: {NO_REPLY}"}
        for name in silent
    ]
    hops = [{key: value for key, value in each.items() if key != "seconds"} for each in strategy.outcome.hops]  # fmt: skip
    size = len(head_of(run.digest, 0, "well"))
    assert [each["site"] for each in hops] == done
    for each in hops:
        assert each["accuracy"] == int(str(each["site"])[1:]) / 8
        assert abs(int(each["bytes"]) - size) < 20
    for event in recorder.events:
        if event["event"] == "replied":
            number = int(event["site"][1:])
            assert event["hop"] == order.index(event["site"]) + 1
            assert (event["accuracy"], event["seconds"]) == (number / 8, 2.0 + number)
            assert event["payload"] == len(head_of(run.digest, number, "well"))
    state = json.loads(recorder.surrogates[f"file {STATE}"])
    assert (state["order"], state["done"]) == (order, done)
    assert state["skipped"] == [name for name in order if name not in done]
    assert b64decode(state["relay"]) == recorder.surrogates[f"file {RELAY}"] == (relay or b"")
    assert state["sender"] == (done[-1] if done else "")
    assert state["sent_hop"] == (order.index(done[-1]) + 1 if done else 0)
    if len(done) < needed:
        return
    model = strategy.outcome.model
    assert isinstance(model, Head)
    assert model.header.site == done[-1]
    assert strategy.outcome.accuracy["last_site"] == int(done[-1][1:]) / 8
    assert accuracy == pytest.approx(sum(int(name[1:]) for name in done) / (10 * len(done)))
    assert strategy.aggregate_train(9, []) == (None, None)
