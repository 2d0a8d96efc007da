"""What a defence has done to a site is recorded once, in all its numbers; and weights of replies by their
records."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.outcome import Defended, Site, Suspect
from fedsurrogate.strategies.fedavg import Updates
from fedsurrogate.strategies.pooling.site_weights import shares_kept
from fedsurrogate.strategies.robustness.defence import (
    bounded_heads,
    bounded_updates,
    cap_records,
    defend_heads,
    defend_updates,
    screen_updates,
)
from tests.strategies.base.test_courses_of_a_run import Kept

few = settings(max_examples=40, deadline=None)
NAMES = ["s0", "s1", "s2"]


@few
@given(
    st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.floats(0.01, 0.99)),
    st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.floats(0.01, 0.99)),
    st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
    st.none() | st.integers(1, 9),
    st.floats(1, 40),
)
def test_what_a_defence_did_is_recorded(
    capped: dict[str, float],
    bounded: dict[str, float],
    suspects: list[str],
    number: int | None,
    score: float,
) -> None:
    recorder = Kept()
    strategy = Updates({"method": "fedavg"}, recorder)
    strategy.outcome.sites = {at: Site(name, "used", "") for at, name in enumerate(NAMES)}
    for at, site in enumerate(strategy.outcome.sites.values()):
        site.bytes_up = 10 * at
    found = [Suspect(name, "far", score, f"why {name}") for name in suspects]
    defended = Defended(["reply"], capped, found, bounded)
    strategy._apply_defence(defended, number)
    wanted: list[dict[str, Any]] = [
        {"event": "capped", "site": name, "kept": round(share, 6), "round": number}
        for name, share in capped.items()
        if name in NAMES
    ]
    if bounded:
        kept = {name: float(f"{share:.3g}") for name, share in bounded.items()}
        wanted.append({"event": "bounded", "kept": kept, "round": number})
    for name in suspects:
        at = NAMES.index(name)
        wanted += [
            {"event": "suspect", "site": name, "kind": "far", "score": round(score, 3),
             "reason": f"why {name}", "round": number},
            {"event": "rejected", "site": name, "reason": f"suspect: why {name}", "bytes": 10 * at,
             "round": number},
        ]  # fmt: skip
    assert recorder.events == wanted
    for site in strategy.outcome.sites.values():
        assert site.kept_share == capped.get(site.name, 1.0)
        assert site.suspect == (f"why {site.name}" if site.name in suspects else "")
        fate = ("rejected", f"suspect: why {site.name}") if site.name in suspects else ("used", "")
        assert (site.fate, site.reason) == fate
    # In the next round with the same caps nothing is said again of them.
    recorder.events.clear()
    strategy._apply_defence(Defended([], capped), 5)
    assert recorder.events == []


def update(site: int, records: int, heads: bool = False, far: float = 1.0) -> Parameters:
    draw = torch.Generator().manual_seed(site)
    tensors = {
        "weight": far * (torch.ones(2, 3) + 0.1 * torch.randn(2, 3, generator=draw)),
        "bias": far * torch.randn(2, generator=draw) / 5,
    }
    classes = ("a", "b") if heads else ()
    return Parameters(Header("fedavg", "r", f"s{site}", "f", classes), 1, tensors, records)


@few
@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([1.0, 1.0, 40.0, -1.0])), min_size=1, max_size=6),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from(["none", "screen"]),
    st.booleans(),
)  # fmt: skip
@example([(400, 1.0), (20, 1.0), (30, 1.0), (25, 1.0)], 3.0, "none", False)
@example([(400, 1.0), (20, 1.0), (30, 40.0), (25, 1.0)], 1.0, "screen", True)
def test_updates_and_heads_are_screened_capped_and_bounded_in_this_order(
    sites: list[tuple[int, float]], most: float, rule: str, heads: bool
) -> None:
    sent = [update(at, records, heads, far) for at, (records, far) in enumerate(sites)]
    found = defend_heads(sent, rule, most) if heads else defend_updates(sent, rule, most, 0.5)
    suspects = screen_updates(sent) if rule == "screen" else []
    names = {each.site for each in suspects}
    left = [each for each in sent if each.header.site not in names]
    shares = shares_kept([[float(max(1, each.records))] for each in left], most)
    numbers = [
        max(1, round(each.records * share)) if share < 1 else each.records
        for each, share in zip(left, shares, strict=True)
    ]
    plain = cap_records(left, most)
    assert [each.records for each in plain.kept] == numbers
    capped = {each.header.site: s for each, s in zip(left, shares, strict=True) if s < 1}
    assert plain.capped == capped
    if rule == "screen" and most:
        # With the screen no site weighs more than the usual one.
        equal = shares_kept([[float(max(1, each))] for each in numbers], 1.0)
        numbers = [
            max(1, round(n * share)) if share < 1 else n
            for n, share in zip(numbers, equal, strict=True)
        ]
    assert [each.records for each in found.kept] == numbers
    assert found.capped == capped
    assert [(each.site, each.kind) for each in found.suspects] == [
        (each.site, each.kind) for each in suspects
    ]
    wanted, shares_of = bounded_heads(left) if heads else bounded_updates(left, 0.5)
    assert found.bounded == shares_of
    for ours, theirs in zip(found.kept, wanted, strict=True):
        for name, tensor in theirs.tensors.items():
            torch.testing.assert_close(ours.tensors[name], tensor)
