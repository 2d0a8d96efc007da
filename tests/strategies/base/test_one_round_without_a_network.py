"""A run of one round whose parts are pretended: what is asked of a surrogate and in which order, frames,
names, late replies, and what is learned from stored ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.records import pack_public_mean
from fedsurrogate.strategies.base import one_shot
from fedsurrogate.strategies.base.one_shot import Learned
from fedsurrogate.strategies.base.outcome import Defended, Site, Suspect
from fedsurrogate.strategies.fedpft.strategy import FedPFT
from tests.strategies.base.test_courses_of_a_run import Kept

CENTRE = torch.ones(3)
SETTINGS = {"method": "fedpft", "deadline": 50.0, "quorum": 0.5}


def sent(site: str, frame: bytes = b"", x: float = 1.0, print_: str = "f") -> Any:
    own = Header("fedpft", "r", site, print_, ("a",), frame)
    return SimpleNamespace(header=own, claim=None, tables={"x": torch.tensor([x]), "name": "text"})


class Toy(FedPFT):
    """Surrogates of three columns; a payload is the name of its sender."""

    suspects: tuple[Suspect, ...] = ()

    def parse(self, payload: bytes) -> Any:
        if payload == b"broken":
            raise SurrogateError("no surrogate")
        return sent(payload.decode())

    def check(self, sent: Any) -> None:
        self.calls.append(("check", sent.header.site))

    def dimension(self, sent: Any) -> int:
        return 3

    def records(self, sent: Any) -> int:
        return 7

    def facts(self, sent: Any) -> dict[str, object]:
        return {"fact": 1}

    def moved(self, sent: Any, frame: bytes) -> Any:
        return SimpleNamespace(**vars(sent) | {"moved": frame})

    def learn(self, sent: Any, classes: Any) -> Learned:
        self.calls.append(("learn", [each.header.site for each in sent], classes))
        model: Any = SimpleNamespace(
            header=Header("fedpft", "r", "c", "f", ("a", "b")), dimension=3
        )
        return Learned(model, Defended(sent, {}, list(self.suspects)), "source", {"solver": "x"})  # type: ignore[arg-type]

    def defend(self, sent: Any, classes: Any) -> Any:
        raise NotImplementedError

    def restricted(self, sent: Any, classes: Any) -> Any:
        raise NotImplementedError

    @property
    def calls(self) -> list[Any]:
        return self.__dict__.setdefault("asked", [])

    def kept(self, sent: Any, stored: Any) -> Any:
        return sent

    def shared_classes(self, sent: Any) -> tuple[str, ...]:
        return ()


def toy(**more: Any) -> tuple[Toy, Kept]:
    recorder = Kept()
    return Toy(SETTINGS | more, recorder, "cpu", CENTRE), recorder


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "check_reply", lambda *given: None)
    monkeypatch.setattr(one_shot, "check_stated", lambda *given: None)


def test_surrogates_are_in_one_frame_and_those_that_overflow_are_rejected() -> None:
    strategy, recorder = toy()
    wide, far = (Frame(torch.tensor([x]), torch.tensor([1.0])).packed() for x in (1.0, 9.0))
    given_ = [sent("s10", wide), sent("s9", far), sent("s8", wide), sent("s1", wide, torch.inf)]
    for at, each in enumerate(given_):
        strategy._received[at] = each
        strategy.outcome.sites[at] = Site(each.header.site, "used", "")
        recorder.surrogates[each.header.site] = b""
    found = strategy._usable()
    assert [each.header.site for each in found] == ["s8", "s9", "s10"]
    assert [getattr(each, "moved", None) for each in found] == [None, wide, None]
    assert recorder.of("rejected") == ["s1"]
    assert (
        strategy.outcome.sites[3].reason == "columns of scales that the other sites' are far from"
    )
    assert sorted(recorder.surrogates) == ["s10", "s8", "s9"]


@pytest.mark.usefixtures("unchecked")
@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.sampled_from(["s0", "s1", "s2", "broken", SurrogateError("not signed")]),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_of_stored_surrogates_the_first_valid_one_of_each_site_counts(
    sources: list[Any], suspect: bool
) -> None:
    strategy, recorder = toy(quorum=0.01)
    strategy.suspects = (Suspect("s1", "far", 2.0, "lies"),) if suspect and "s1" in sources else ()
    stored = [
        (f"file{at}", each if isinstance(each, SurrogateError) else (each, each.encode()))
        for at, each in enumerate(sources)
    ]
    valid = [each for each in ("s0", "s1", "s2") if each in sources]
    left = [each for each in valid if not (suspect and each == "s1")]
    if not left:
        with pytest.raises(RunError):
            strategy.learn_from(stored)
        return
    strategy.learn_from(stored)
    reasons, taken = [], set()
    for at, each in enumerate(sources):
        site = strategy.outcome.sites[at + 1]
        if isinstance(each, SurrogateError):
            reasons.append((f"file{at}", "not signed"))
        elif each == "broken":
            reasons.append(("broken", "no surrogate"))
        elif each in taken:
            reasons.append((f"file{at}", f"a second surrogate of site {each!r}"))
        else:
            taken.add(each)
            assert (site.name, site.bytes_up, site.records, site.late) == (each, 2, 7, False)
    events = [e for e in recorder.events if e["event"] == "rejected"]
    lies = [("s1", "suspect: lies")] if suspect and "s1" in valid else []
    assert [(e["site"], e["reason"]) for e in events] == reasons + lies
    assert recorder.surrogates["file centre.pb"] == pack_public_mean(CENTRE)
    assert strategy.calls[-1] == ("learn", valid, strategy.config.settings.classes)
    assert (strategy.outcome.learned, strategy.outcome.learning) == ("source", {"solver": "x"})
    last = recorder.events[-1]
    assert (last["event"], last["solver"], last["classes"]) == ("learned", "x", 2)
    assert last["seconds"] == strategy.outcome.seconds["learn"]
    assert recorder.events[1] == {"event": "invited", "sites": len(sources)}
    replied = [e for e in recorder.events if e["event"] == "replied"]
    assert [(e["site"], e["fact"], e["payload"]) for e in replied] == [
        (each, 1, 2) for each in sorted(taken, key=sources.index)
    ]


class Held(list[int]):
    """Receipts of a site whose last node was the second."""

    def __init__(self, nodes: Sequence[int] = (2,)) -> None:
        super().__init__(nodes)

    def has_node(self, node: int) -> bool:
        return node in self

    def show(self, *given: Any) -> None:
        """Nothing is added."""


def test_too_few_surrogates_of_one_scale_end_the_run() -> None:
    strategy, _ = toy(quorum=0.6)
    for at, x in enumerate((1.0, torch.inf, 2.0)):
        strategy._received[at] = sent(f"s{at}", x=x)
        strategy.outcome.sites[at] = Site(f"s{at}", "used", "")
        strategy.recorder.surrogate(f"s{at}", b"")
    assert len(strategy._usable()) == 2
    strategy._received[0] = sent("s0", x=torch.nan)
    with pytest.raises(RunError, match="columns of scales that the other sites' are far from"):
        strategy._usable()
