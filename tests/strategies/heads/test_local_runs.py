"""Sites that train alone: who is asked for what, and what their accuracies are together."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE, LocalGrid
from fedsurrogate.strategies.heads import Local
from tests.strategies.base.test_collecting import with_clock
from tests.strategies.base.test_courses_of_a_run import Kept

COURSES = st.lists(
    st.tuples(
        st.sampled_from(["well", "well", "well", "refused"]),
        st.sampled_from(["well", "well", "untrue", "refused"]),
        st.sampled_from([0.25, 1.0, 1.5]),
    ),
    min_size=1,
    max_size=4,
)


class Sites(LocalGrid):
    """Sites that follow their courses: with an identification, an evaluation and a comparison."""

    def __init__(self, courses: list[tuple[str, str, float]], simulated: bool) -> None:
        self._courses, self._simulated = courses, simulated
        self.asked: list[tuple[str, int, bytes | None, dict[str, Any]]] = []
        super().__init__(self._follow, [{}] * len(courses))

    def _follow(self, message: Message, context: Context) -> Message:
        number, kind = context.node_id - FIRST_NODE, message.metadata.message_type
        hello, judges, share = self._courses[number]
        payload, asked = from_record(message.content, 2**20)
        self.asked.append((kind.rpartition(".")[2], number, payload, dict(asked)))
        info: dict[str, Any] = {"status": "ok", "site": f"s{number}"}
        if kind.endswith("hello"):
            info |= {"fingerprint": "f" * 16, "dimension": 3, "classes": '["a"]'}
            info |= {"simulated": self._simulated, "status": "ok" if hello == "well" else "policy"}
        elif kind == "evaluate":
            info["status"] = "policy" if judges == "refused" else "ok"
            info |= {"correct": 12 if judges == "untrue" else number, "tested": 10}
        else:
            info["accuracy.model"] = share
        return Message(to_record(None, info), reply_to=message)


@settings(max_examples=25, deadline=None)
@given(COURSES, st.booleans())
def test_accuracies_are_those_of_all_test_records_and_in_a_simulation_their_mean(
    courses: list[tuple[str, str, float]], simulated: bool
) -> None:
    fitting = [at for at, (hello, *_) in enumerate(courses) if hello == "well"]
    with pytest.MonkeyPatch.context() as patch:
        with_clock(patch)
        run = parse_run({"method": "local", "quorum": 0.1, "deadline": 5.0})
        grid, recorder = Sites(courses, simulated), Kept()
        strategy = Local(run, recorder)
        if not fitting:
            with pytest.raises(RunError, match="quorum missed"):
                strategy.run(grid)
            return
        accuracy = strategy.run(grid)
        asked = list(grid.asked)
        messages = list(strategy.configure_evaluate(2, ArrayRecord(), ConfigRecord(), grid))
    assert grid.asked == asked, "sites identify themselves once"
    assert [m.metadata.dst_node_id - FIRST_NODE for m in messages] == fitting
    everyone = list(range(len(courses)))
    wanted = [("hello", at) for at in everyone] + [("evaluate", at) for at in fitting]
    wanted += [("compare", at) for at in fitting] if simulated else []
    assert [(kind, at) for kind, at, *_ in asked] == wanted
    for kind, _, payload, info in asked:
        assert payload is None
        if kind != "compare":
            assert info["run"] == run.digest
        else:
            assert info["brief"] is True
    judged = [at for at in fitting if courses[at][1] == "well"]
    if judged:
        assert accuracy == pytest.approx(sum(judged) / (10 * len(judged)))
    else:
        assert accuracy is None
    shares = [courses[at][2] for at in fitting if courses[at][2] <= 1] if simulated else []
    assert strategy.outcome.accuracy == (
        {"model": pytest.approx(sum(shares) / len(shares))} if shares else {}
    )
    assert strategy.aggregate_train(1, []) == (None, None)
    assert list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)) == []
    assert recorder.events[0] == {"event": "configured", "method": "local"}
    used = {site.name for site in strategy.outcome.sites.values() if site.fate == "used"}
    assert used == {f"s{at}" for at in fitting}
    assert all(site.reason == "" for site in strategy.outcome.sites.values() if site.fate == "used")
