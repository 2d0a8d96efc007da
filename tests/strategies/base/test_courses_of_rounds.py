"""A run in rounds over sites that introduce themselves, or with another backbone, or keep silent
for some time: who is asked for what, who counts, and what state goes on.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError, largest_parameter
from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE, LocalGrid
from fedsurrogate.strategies.base.outcome import NO_REPLY
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import Updates
from tests.strategies.base.test_collecting import with_clock
from tests.strategies.base.test_courses_of_a_run import Kept

ROUNDS, CLASSES, D = 3, ("a", "b"), 4
# What a site does when it is asked to introduce itself, and in each round.
HELLOS = st.sampled_from(
    ["well", "other backbone", "other dimension", "broken", "refused", "silent"]
)
TRAINS = st.lists(
    st.sampled_from(["well", "well", "well", "refused", "broken", "silent"]),
    min_size=ROUNDS,
    max_size=ROUNDS,
)
# Three that fit, of which the first always replies, and any two others.
COURSES = st.tuples(
    st.lists(st.tuples(st.just("well"), TRAINS), min_size=2, max_size=2),
    st.lists(st.tuples(HELLOS, TRAINS), max_size=2),
).map(lambda parts: [("well", ["well"] * ROUNDS), *parts[0], *parts[1]])


class Sites(LocalGrid):
    """Sites that follow their courses. A site that is silent at first introduces itself later."""

    def __init__(self, run: Run, courses: list[tuple[str, list[str]]]) -> None:
        self._run, self._courses, self._mute = run, courses, set[str]()
        self.hellos: list[int] = []
        self.trained: dict[int, list[int]] = {}
        super().__init__(self._follow, [{}] * len(courses))

    def _follow(self, message: Message, context: Context) -> Message:
        number, kind = context.node_id - FIRST_NODE, message.metadata.message_type
        hello, trains = self._courses[number]
        info: dict[str, Any] = {"status": "ok", "site": f"s{number}"}
        payload, _ = from_record(message.content, 2**20)
        sent: bytes | None = None
        if kind.endswith("hello"):
            how = "well" if hello == "silent" and number in self.hellos else hello
            self.hellos.append(number)
            info |= {
                "fingerprint": ("0" if how == "other backbone" else "f") * 16,
                "dimension": D + 1 if how == "other dimension" else D,
                "classes": "[1]" if how == "broken" else '["a", "b"]',
            }
        elif kind == "train":
            assert payload is not None
            model = unpack_parameters(payload)
            self.trained.setdefault(number, []).append(model.round)
            how = trains[model.round - 1]
            moved = {name: torch.ones_like(t) * 2**-number for name, t in model.tensors.items()}
            header = replace(model.header, site=f"s{number}")
            update = Parameters(header, model.round, moved, number + 1)
            sent = b"no update" if how == "broken" else pack_parameters(update)
        else:
            how = "well"
            info |= {"correct": 1, "tested": 2}
        if how == "silent":
            self._mute.add(message.metadata.message_id)
        if how == "refused":
            info, sent = {"status": "policy", "site": f"s{number}"}, None
        if sent is not None:
            info["bytes"] = len(sent)
        return Message(to_record(sent, info), reply_to=message)

    def _may_arrive(self, message_id: str) -> bool:
        return message_id not in self._mute


@settings(max_examples=20)
@given(courses=COURSES)
def test_who_does_not_fit_is_never_asked_to_train_and_all_others_are_in_each_round(
    courses: list[tuple[str, list[str]]],
) -> None:
    run = parse_run(
        {
            "method": "fedavg", "fedavg.model": "linear", "fedavg.rounds": ROUNDS, "quorum": 0.1,
            "deadline": 1.0, "defence": "none", "max-share": 0.0, "classes": "a,b",
        }
    )  # fmt: skip
    kept, grid = Kept(), Sites(run, courses)
    strategy = Updates(run, kept)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        with_clock(patch)
        strategy.run(grid)
    every = range(1, ROUNDS + 1)
    for k, (hello, trains) in enumerate(courses):
        site = strategy.outcome.sites[FIRST_NODE + k]
        # A refusal or a broken identification may be mended; another backbone is not.
        other = hello.startswith("other")
        assert grid.trained.get(k, []) == ([] if other else list(every)), hello
        assert site.barred == other
        if other:
            assert (site.fate, bool(site.reason)) == ("rejected", True)
        elif trains[-1] == "well":
            assert (site.fate, site.reason) == ("used", "")
        else:
            assert site.fate == ("dropped" if trains[-1] == "silent" else "rejected")
        # Only who has not replied under its name is asked for it again.
        assert grid.hellos.count(k) == 1 + (hello == "silent"), hello
    dropped = [each for each in kept.events if each["event"] == "dropped" and "round" not in each]
    assert [each["reason"] for each in dropped] == [NO_REPLY] * sum(
        hello == "silent" for hello, _ in courses
    )
    used = [each["used"] for each in kept.events if each["event"] == "round"]
    assert used == [
        sum(not h.startswith("other") and trains[at] == "well" for h, trains in courses)
        for at in range(ROUNDS)
    ]


STATES = st.dictionaries(
    st.text("abcé.", min_size=1, max_size=4), st.integers(0, 6), min_size=1, max_size=3
)


@settings(max_examples=15)
@given(STATES, STATES | st.just({}), st.integers(0, 99), st.text("s.é", min_size=1, max_size=3))
def test_a_checkpoint_has_the_whole_state_and_a_changed_one_is_refused(
    model: dict[str, int], memory: dict[str, int], number: int, site: str
) -> None:
    generator = torch.Generator().manual_seed(number)
    model_tensors, memory_tensors = (
        {name: torch.randn(size, 2, generator=generator) for name, size in shapes.items()}
        for shapes in (model, memory)
    )
    config = parse_run({"method": "fedavg"})
    state = Training(
        config, CLASSES, "f" * 16, D, model_tensors, memory_tensors, number, number + 1, "abc",
        [{"round": number, "sites": [site]}], {site: number},
    )  # fmt: skip
    content = state.save()
    again = Training.load(config, content, "training")
    for one, two in ((state.model, again.model), (state.memory, again.memory)):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert replace(again, model={}, memory={}) == replace(state, model={}, memory={})
    assert again.header() == Header("fedavg", config.digest, "coordinator", "f" * 16, CLASSES)
    with pytest.raises(RunError, match="other settings"):
        Training.load(parse_run({"method": "fedavg", "seed": 7}), content, "training")
    for wrong in (
        content[:-1],
        content[1:],
        content[:8],
        b"",
        content.replace(b"fingerprint", b"another one"),
    ):
        with pytest.raises(RunError, match="training is not a valid checkpoint"):
            Training.load(config, wrong, "training")


@settings(max_examples=60)
@given(
    part=st.sampled_from(["weight", "bias", "control", "memory"]),
    value=st.sampled_from([0.9, 0.998, 0.9995, 1.0, 1.1, -0.998, -0.9995, math.inf, math.nan]),
    private=st.booleans(),
)
def test_a_model_is_sent_only_if_every_site_takes_each_number_of_it(
    part: str, value: float, private: bool
) -> None:
    """Also after the rounding to 16 bits. What stays at the coordinator is only finite."""
    budget = {"method": "dp-fedavg", "epsilon": 2.0, "delta": 1e-5, "classes": "a,b"}
    run = parse_run(budget if private else {"method": "scaffold"})
    state = Training.begin(run, CLASSES, "f" * 16, D)
    assert state.unsendable() == ""
    number = value * largest_parameter(private)
    tensors = {name: tensor.clone() for name, tensor in state.model.items()}
    names = {"control": CONTROL + "weight", "memory": "momentum.weight"}
    name = names.get(part, part)
    odd = (tensors if part in tensors else {name: torch.zeros(2, D)})[name]
    odd.view(-1)[-1] = number
    memory = {} if part in tensors else {name: odd}
    why = replace(state, model=tensors, memory=memory).unsendable()
    if not math.isfinite(value):
        assert why == f"{name} is not finite"
    elif part != "memory" and abs(value) * 1.001 >= 1:
        assert why.startswith(f"{name} has a number beyond")
    else:
        assert why == ""
