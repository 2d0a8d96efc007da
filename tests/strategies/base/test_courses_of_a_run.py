"""A run of one round over sites that reply, refuse, send nonsense or keep silent, in every mixture:
who is used, what is recorded, what is learned, and what is reported of the evaluation.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import pack_surrogate, to_record
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE, LocalGrid
from fedsurrogate.strategies.base.collection import has_quorum
from fedsurrogate.strategies.base.federation import HELLO
from fedsurrogate.strategies.base.outcome import NO_REPLY, Outcome, Site
from fedsurrogate.strategies.fedpft.strategy import FedPFT
from tests.strategies.base.test_collecting import with_clock

SMALL = {
    "fedpft.covariance": "diag", "head.min-steps": 5, "head.epochs": 1, "head.max-samples": 40, "defence": "none",
    "max-share": 1000.0, "deadline": 5.0,
}  # fmt: skip
SENDS = (
    "well", "well", "well", "refused", "raises", "empty", "broken", "other run", "other sender",
    "other backbone", "silent",
)  # fmt: skip


@dataclass(frozen=True)
class Course:
    """What one site does: with the request for a surrogate, and with that for an evaluation."""

    sends: str
    judges: str = "well"
    correct: int = 0
    tested: int = 0


COURSES = st.lists(
    st.builds(
        Course,
        sends=st.sampled_from(SENDS),
        judges=st.sampled_from(["well", "well", "refused", "raises", "silent", "untrue"]),
        correct=st.integers(0, 5),
        tested=st.integers(5, 9) | st.just(0),
    ),
    min_size=1,
    max_size=5,
)


@dataclass
class Kept:
    """A recorder in memory."""

    events: list[dict[str, Any]] = field(default_factory=list)
    surrogates: dict[str, bytes] = field(default_factory=dict)

    def event(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, **fields})

    def surrogate(self, site: str, payload: bytes) -> Any:
        self.surrogates[site] = payload
        return lambda: payload

    def keep(self, name: str, content: bytes) -> None:
        self.surrogates[f"file {name}"] = content

    def discard(self, site: str) -> None:
        del self.surrogates[site]

    def of(self, event: str) -> list[str]:
        return [str(each.get("site")) for each in self.events if each["event"] == event]


def payload(run: str, number: int, how: str) -> bytes:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(12, 4, generator=generator), torch.arange(12) % 2
    table = fit(x + 2 * y[:, None], y, 2, MixtureSettings("diag"), torch.Generator())
    run = "0" * 16 if how == "other run" else run
    name = "another" if how == "other sender" else f"s{number}"
    print_ = f"backbone {number}" if how == "other backbone" else "backbone"
    return pack_surrogate(Surrogate(Header("fedpft", run, name, print_, ("a", "b")), table))


class Sites(LocalGrid):
    """Sites that follow their courses."""

    def __init__(self, run: str, courses: list[Course]) -> None:
        self._digest, self._courses, self._mute = run, courses, set[str]()
        super().__init__(self._follow, [{}] * len(courses))

    def _follow(self, message: Message, context: Context) -> Message:
        number = context.node_id - FIRST_NODE
        course, asked = self._courses[number], message.metadata.message_type == "train"
        identified = message.metadata.message_type == HELLO
        how = course.sends if asked or identified else course.judges
        if how == "silent":
            self._mute.add(message.metadata.message_id)
        if how == "raises":
            raise ValueError("a fault")
        info: dict[str, Any] = {
            "status": "policy" if how == "refused" else "ok",
            "site": f"s{number}",
        }
        sent = None
        if asked and how not in ("refused", "empty"):
            sent = b"no surrogate" if how == "broken" else payload(self._digest, number, how)
            info |= {"bytes": len(sent), "fit-seconds": fit_seconds(number)}
        elif identified and how in ("well", "other backbone"):
            own = f"backbone {number}" if how == "other backbone" else "backbone"
            info |= {"fingerprint": own, "dimension": 4, "classes": '["a", "b"]'}
        elif not asked:
            more = course.tested + 1 if how == "untrue" else min(course.correct, course.tested)
            info |= {"correct": more, "tested": course.tested}
        return Message(to_record(sent, info), reply_to=message)

    def _may_arrive(self, message_id: str) -> bool:
        return message_id not in self._mute


def fit_seconds(number: int) -> float:
    """How long a site says that it took; the slowest is neither the first nor the last to reply."""
    return 1.0 + 3 * number % 4


def not_signed(outcome: Outcome) -> SignedModel:
    raise ValueError("no key")


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(courses=COURSES, quorum=st.sampled_from([0.1, 0.5, 1.0]))
def test_every_site_has_one_fate_and_only_the_used_ones_count(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    courses: list[Course],
    quorum: float,
) -> None:
    with_clock(monkeypatch)
    folder = str(tmp_path_factory.mktemp("runs"))
    run = parse_run(SMALL | {"quorum": quorum, "output-dir": folder})
    kept = Kept()
    strategy = FedPFT(run, kept)  # type: ignore[arg-type]
    strategy.signer = not_signed
    sends = {f"s{number}": course.sends for number, course in enumerate(courses)}
    well = [name for name, how in sends.items() if how == "well"]
    others = [name for name, how in sends.items() if how == "other backbone"]
    # The most common backbone wins; alone against another, none does.
    unclear = len(others) > 0 and len(well) <= 1 and len(well + others) > 1
    grid = Sites(run.digest, courses)
    try:
        accuracy = strategy.run(grid)
    except RunError as error:
        tied = "who is wrong cannot be told" in str(error)
        assert tied == unclear or not tied
        assert tied or not has_quorum(strategy.outcome.count("used"), len(courses), 0, quorum)
        return
    fates = {site.name: site for site in strategy.outcome.sites.values()}
    used = [name for name, site in fates.items() if site.fate == "used"]
    assert not unclear
    assert used == (well or others)
    assert has_quorum(len(used), len(courses), 0, quorum)
    assert sorted(name for name in kept.surrogates if not name.startswith("file")) == sorted(used)
    silent = [name for name, how in sends.items() if how == "silent"]
    assert len(kept.of("dropped")) == len(silent)
    assert len(kept.of("rejected")) == len(courses) - len(used) - len(silent)
    assert sorted(kept.of("replied")) == sorted(well + others)
    slowest = max(fit_seconds(int(name[1:])) for name in well + others)
    assert strategy.outcome.seconds["fit"] == slowest
    assert next(e for e in kept.events if e["event"] == "invited")["sites"] == len(courses)
    for number, course in enumerate(courses):
        site = strategy.outcome.sites[FIRST_NODE + number]
        assert site.bytes_down > 0
        assert (site.bytes_up > 0) == (course.sends not in ("silent", "raises"))
        if course.sends == "silent":
            assert (site.fate, site.reason) == ("dropped", NO_REPLY)
        elif site.fate != "used":
            assert site.fate == "rejected"
            assert site.reason
    judged = [courses[int(name[1:])] for name in used]
    right = [each for each in judged if each.judges == "well"]
    tested = sum(each.tested for each in right)
    correct = sum(min(each.correct, each.tested) for each in right)
    assert accuracy == (correct / tested if tested else None)
    assert len(kept.of("evaluated")) == sum(each.tested > 0 for each in right)
    assert len(kept.of("evaluation-failed")) == len(judged) - len(right)
    # A model that cannot be signed is still evaluated.
    unsigned = [each["reason"] for each in kept.events if each["event"] == "model-not-signed"]
    assert unsigned == ["no key"]
    # What was learned is what is learned again from what was kept, in any order.
    again = FedPFT(run, Kept())  # type: ignore[arg-type]
    stored = [(name, (name, kept.surrogates[name])) for name in reversed(used)]
    again.learn_from(stored)
    assert strategy.outcome.model is not None
    assert again.outcome.model is not None
    assert pack_classifier(again.outcome.model) == pack_classifier(strategy.outcome.model)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["used", "dropped", "rejected"]), st.booleans())))
def test_a_run_is_a_simulation_only_if_every_used_site_says_so(
    tmp_path: Path, sites: list[tuple[Any, bool]]
) -> None:
    """One site alone could lie, and would be shown the whole model and asked for all test records."""
    strategy = FedPFT(parse_run(SMALL | {"output-dir": str(tmp_path)}), Kept())  # type: ignore[arg-type]
    for node, (fate, simulated) in enumerate(sites):
        strategy.outcome.sites[node] = Site(f"s{node}", fate, simulated=simulated)
    used = [simulated for fate, simulated in sites if fate == "used"]
    assert strategy._simulated() == (len(used) > 0 and False not in used)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sends=st.lists(
        st.sampled_from(["refused", "raises", "empty", "other backbone", "silent"]), max_size=3
    )
)
def test_every_site_that_is_asked_for_its_identification_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch, sends: list[str]
) -> None:
    with_clock(monkeypatch)
    run, kept = parse_run(SMALL | {"quorum": 0.1}), Kept()
    strategy = FedPFT(run, kept)  # type: ignore[arg-type]
    # Two of one backbone are more than any other backbone has.
    every = ["well", *sends, "well"]
    group = strategy.identify(Sites(run.digest, [Course(how) for how in every]), 5.0)
    assert list(group.nodes.values()) == [FIRST_NODE, FIRST_NODE + len(sends) + 1]
    assert len(kept.of("dropped")) == sends.count("silent")
    assert len(kept.of("identified")) == sends.count("other backbone") + 2
    assert len(kept.of("rejected")) == len(sends) - sends.count("silent")
    fates = [site.fate for site in strategy.outcome.sites.values()]
    assert fates.count("rejected") == len(kept.of("rejected"))
