"""What a relay of a chain must be, and what a site that fails does to it, without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.strategies.base.identifications import Group
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.fedpft import strategy as module
from fedsurrogate.strategies.fedpft.strategy import FedPFTChain
from tests.strategies.base.test_courses_of_a_run import Kept

CHAIN = {"method": "fedpft", "fedpft.topology": "chain", "classes": "a,b"}
PRIVATE = {"epsilon": 4.0, "delta": 1e-5}


def begun(**more: Any) -> FedPFTChain:
    strategy = FedPFTChain(CHAIN | more, Kept())
    strategy.outcome.sites = {at: Site(f"s{at}", "used", "") for at in range(3)}
    return strategy


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    ("relay", "payload", "fine"),
    [
        (b"", b"x", (True, True)), (b"x", b"xy", (False, True)), (b"x", b"y", (True, False)),
        (b"xy", b"xyz", (False, True)), (b"xy", b"yxz", (False, False)), (b"xy", b"xy", (False, False)),
        (b"xy", b"xyzx", (False, False)), (b"", b"", (False, False)), (b"", b"xy", (False, False)),
    ],
)  # fmt: skip
def test_a_relay_has_one_surrogate_more_or_without_noise_one(
    monkeypatch: pytest.MonkeyPatch, private: bool, relay: bytes, payload: bytes, fine: Any
) -> None:
    strategy, checked = begun(**(PRIVATE if private else {})), list[Any]()
    place: Any = object()
    monkeypatch.setattr(module, "unpack_relay", lambda content: [bytes([each]) for each in content])
    monkeypatch.setattr(
        module,
        "unpack_surrogate",
        lambda each: SimpleNamespace(name=each, counts=[2, 3], dimension=4, claim=b"claim " + each),
    )
    monkeypatch.setattr(
        module, "check_surrogate", lambda each, given: checked.append((each.name, given))
    )
    monkeypatch.setattr(module, "check_stated", lambda claim, own: checked.append((claim, own)))
    group: Any = object()
    if not fine[private]:
        with pytest.raises(
            SurrogateError, match="earlier sites in the chain message are not as they were"
        ):
            strategy.last_reply(payload, relay or None, place, group)
        return
    found: Any = strategy.last_reply(payload, relay or None, place, group)
    assert found.name == payload[-1:]
    claim = strategy.config.mechanism_for("record", strategy.config.plan.subtracted(4))
    each = [bytes([part]) for part in payload]
    assert checked == [pair for one in each for pair in ((one, place), (b"claim " + one, claim))]
    limit = 5 * len(payload)
    for most in (limit, limit - 1):
        own = begun(**{"head.max-samples": most} | (PRIVATE if private else {}))
        if most < limit:
            reason = (
                f"the chain message represents {limit} records, above head.max-samples = {most}"
            )
            with pytest.raises(SurrogateError, match=reason):
                own.last_reply(payload, relay or None, place, group)
        else:
            own.last_reply(payload, relay or None, place, group)


@pytest.mark.parametrize("failed", [[], ["s0"]])
@pytest.mark.parametrize("left", [1, 2])
def test_where_a_second_site_fails_or_none_is_left_the_last_sealed_relay_may_be_at_fault(
    monkeypatch: pytest.MonkeyPatch, failed: list[str], left: int
) -> None:
    strategy, fault, asked = begun(**{"fedpft.seal": True}), SurrogateError("no relay"), list[Any]()
    strategy._failed, strategy._earlier = list(failed), (b"older", "s9", "k9", 1)
    walk: Any = SimpleNamespace(left=["s1", "s2"][:left], hop=4, skipped=["s5"])
    strategy._group, strategy._relay = Group(nodes={"s1": 1}), b"old"
    monkeypatch.setattr(strategy, "_answer", lambda *given: fault)
    monkeypatch.setattr(
        strategy, "_without_last", lambda walk, *given: asked.append(given) or fault
    )
    strategy._hop(walk, [])
    assert asked == ([(fault,)] if failed or left == 1 else [])
    assert (walk.skipped, strategy._failed) == (["s5", "s1"], [*failed, "s1"])
    assert (strategy.outcome.sites[1].fate, strategy._relay) == ("rejected", b"old")
