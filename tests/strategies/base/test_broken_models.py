"""The model before it is sent: whatever some sites reply, sites accept the next model, the run goes
on, and only those that break it are left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import LARGEST_NUMBER, LARGEST_PRIVATE
from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import Updates, with_memory
from tests.strategies.base.test_courses_of_a_run import Kept

few = settings(max_examples=40, deadline=None)
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "classes": "a,b"}


def begun(method: str, count: int) -> tuple[Updates, Training, Kept]:
    private = PRIVATE if method.startswith("dp-") else {}
    events, config = Kept(), parse_run({"method": method} | private)
    strategy = Updates(config, events)
    strategy.outcome.sites = {node: Site(str(node), "used", node=node) for node in range(count)}
    training = with_memory(Training.begin(config, ("a", "b"), "f" * 16, 3))
    return strategy, training, events


@few
@given(
    method=st.sampled_from(["fedavg", "fedyogi", "scaffold", "dp-fedavg"]),
    count=st.integers(1, 7),
    breaking=st.integers(0, 7),
    sign=st.sampled_from([-1.0, 1.0]),
    in_control=st.booleans(),
    rounds=st.integers(1, 3),
)
def test_every_model_that_is_sent_is_one_that_sites_accept(
    method: str, count: int, breaking: int, sign: float, in_control: bool, rounds: int
) -> None:
    strategy, training, events = begun(method, count)
    private = method.startswith("dp-")
    # The same rounds without the replies that break the model.
    without, twin, _ = begun(method, count)
    largest = (LARGEST_PRIVATE if private else LARGEST_NUMBER) * 20
    bad = {str(site) for site in range(min(breaking, count))}
    for number in range(1, rounds + 1):
        before = {name: tensor.clone() for name, tensor in training.model.items()}
        replies = []
        for site in range(count):
            name = str(site)
            tensors = {
                key: torch.full(
                    shape,
                    sign * largest
                    if name in bad
                    and key.startswith(CONTROL) is (in_control and method == "scaffold")
                    else 0.01,
                )
                for key, shape in training.shapes().items()
            }
            records = 0 if private else 10
            replies.append(
                Parameters(replace(training.header(), site=name), number, tensors, records)
            )
        strategy._absorbed(training, replies)
        without._absorbed(twin, [each for each in replies if each.header.site not in bad])
        assert training.unsendable() == ""
        assert training.round == number
        named = {site.name for site in strategy.outcome.sites.values() if site.suspect}
        if not bad:
            assert named == set()
        elif 2 * len(bad) < count and method != "fedyogi":
            assert named == bad
            assert all(training.confirmed[str(s)] == number for s in range(len(bad), count))
            assert not set(training.confirmed) & bad
            # Nothing of a reply that was left out stays, in the aggregator's memory neither.
            assert (training.model.keys(), training.memory.keys()) == (
                twin.model.keys(),
                twin.memory.keys(),
            )
            for name, tensor in {**training.model, **training.memory}.items():
                assert torch.equal(tensor, {**twin.model, **twin.memory}[name])
        elif method != "fedyogi":
            # Nobody knows who is wrong: the model stays.
            assert named == set()
            assert "model-kept" in [each["event"] for each in events.events]
            assert all(bool((training.model[key] == before[key]).all()) for key in before)
