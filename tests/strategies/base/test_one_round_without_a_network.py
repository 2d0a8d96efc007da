"""Surrogates of a round in one frame, and those that overflow there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.fedpft.strategy import FedPFT
from tests.strategies.base.test_courses_of_a_run import Kept

SETTINGS = {"method": "fedpft", "deadline": 50.0, "quorum": 0.5}


def sent(site: str, frame: bytes = b"", x: float = 1.0, print_: str = "f") -> Any:
    own = Header("fedpft", "r", site, print_, ("a",), frame)
    return SimpleNamespace(
        header=own, claim=None, dimension=1, tables={"x": torch.tensor([x]), "name": "text"}
    )


class Toy(FedPFT):
    """Surrogates that are moved to another frame by a mark."""

    def moved(self, sent: Any, frame: bytes) -> Any:
        return SimpleNamespace(**vars(sent) | {"moved": frame})


def toy(**more: Any) -> tuple[Toy, Kept]:
    recorder = Kept()
    return Toy(SETTINGS | more, recorder), recorder


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
