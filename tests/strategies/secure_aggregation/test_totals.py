"""What secure aggregation says of itself: all numbers of the total, how far rounding moves them, the facts of a
run, and whom disputes leave out.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.records import DISPUTED
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.secure_aggregation.steps import Dispute, disputes_in, left_out, why
from fedsurrogate.strategies.secure_aggregation.strategy import TOTAL_FILE, SecureAggregation
from tests.strategies.base.test_courses_of_a_run import Kept

CLASSES, D = ("a", "b"), 3
SETTINGS: dict[str, Any] = {
    "fedpft.covariance": "gram",
    "secure-aggregation": True,
    "classes": "a,b",
}


def prepared(members: int, pinned: dict[str, bool], **more: Any) -> SecureAggregation:
    """A coordinator that has all masked vectors of some sites."""
    run = parse_run(SETTINGS | more)
    strategy = SecureAggregation(run, Kept())
    strategy._shapes = shapes_of(run.plan, len(CLASSES), D, 1)
    strategy._numbers = numbers_of(run.plan, run.settings, members, 1)
    strategy._rules = rules_of(run.settings, members)
    strategy._header = Header("fedpft", run.digest, "coordinator", "f" * 16, CLASSES)
    strategy._claims, strategy._spares = dict.fromkeys(pinned), {}
    strategy._pinned = pinned
    strategy.outcome.sites = {at: Site(f"s{at}", "used", "") for at in range(members)}
    return strategy


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 6),
    st.integers(0, 1),
    st.integers(0, 9999),
    st.sampled_from([0.0, 0.2, 0.35]),
    st.integers(0, 6),
)
def test_a_total_has_the_numbers_of_all_sites_and_says_how_they_were_summed(
    members: int, lost: int, seed: int, colluding: float, unpinned: int
) -> None:
    there = members - lost
    names = [f"s{at}" for at in range(there)]
    pinned = {name: at != unpinned for at, name in enumerate(names)}
    more = {"colluding": colluding, "dropouts": 0.34, "quorum": 0.5}
    strategy = prepared(members, pinned, **more)
    draw, numbers, wanted = np.random.default_rng(seed), [], {}
    for name, shape in strategy._shapes.items():
        whole = draw.integers(0, 50, shape)
        if name == "withheld":
            whole = np.zeros(shape, dtype=np.int64)
        numbers.append(whole.flatten())
        wanted[name] = strategy._numbers[name].step * torch.from_numpy(whole).double()
    total, facts = strategy._total(names, words(np.concatenate(numbers)))
    assert list(total.tensors) == [name for name in strategy._shapes if name != "withheld"]
    for name, tensor in total.tensors.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-12, atol=0)
    assert total.header == strategy._header
    assert (total.claim, dict(total.sigmas)) == (None, {})
    steps = {name: strategy._numbers[name].step for name in total.tensors}
    assert total.rounding == {name: there * step / 2 for name, step in steps.items()}
    for name, step in steps.items():
        assert total.usual_rounding[name] == pytest.approx(math.sqrt(there / 12) * step)
    assert total.usual_rounding.keys() == steps.keys()
    together = math.floor(colluding * members + 1e-9)
    threshold = (members + together) // 2 + 1
    assert facts == {
        "secure-aggregation-of": there,
        "members": members,
        "colluding": together,
        "least": max(members - math.floor(0.34 * members + 1e-9), threshold),
        "keys": "pinned by every site" if all(pinned.values()) else "sent by the coordinator",
    }
    assert isinstance(strategy.recorder, Kept)
    assert list(strategy.recorder.surrogates) == [f"file {TOTAL_FILE}"]


@pytest.mark.parametrize("withheld", [0, 1])
def test_a_sum_that_a_site_has_withheld_is_refused(withheld: int) -> None:
    strategy = prepared(3, {"s0": True, "s1": True, "s2": True})
    assert "withheld" in strategy._shapes
    numbers = [
        np.full(math.prod(shape), withheld if name == "withheld" else 1)
        for name, shape in strategy._shapes.items()
    ]
    vector = words(np.concatenate(numbers))
    if not withheld:
        assert strategy._total(["s0", "s1", "s2"], vector)[1]["secure-aggregation-of"] == 3
        return
    with pytest.raises(
        RunError, match="a site has withheld the secure aggregation, which is random now"
    ):
        strategy._total(["s0", "s1", "s2"], vector)


NAMES = ["a", "b", "c", "d"]
DISPUTES = st.lists(
    st.builds(
        Dispute,
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
        st.sampled_from(["keys", "shares"]),
    ).filter(lambda each: each.by != each.about),
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(DISPUTES)
def test_without_those_that_are_left_out_no_dispute_is_left(disputes: list[Dispute]) -> None:
    out = left_out(disputes)
    assert all(out & {each.by, each.about} for each in disputes)
    pairs = {frozenset((each.by, each.about)) for each in disputes}
    if not pairs:
        assert out == set()
    # Never more than one of each pair that has nothing to do with other pairs.
    alone = [pair for pair in pairs if all(pair == other or not pair & other for other in pairs)]
    for pair in alone:
        assert len(out & pair) == 1
        complaining = {each.by for each in disputes if each.by in pair}
        assert out & pair <= complaining
        if len(complaining) == 2:
            assert out & pair == {max(pair)}
    # Whoever is in all of them is the only one.
    common = set(NAMES).intersection(*pairs) if pairs else set()
    if len(pairs) > 1 and len(common) == 1:
        assert out == common
    fewest = next(
        size
        for size in range(len(NAMES) + 1)
        if any(all(set(some) & pair for pair in pairs) for some in combinations(NAMES, size))
    )
    assert len(out) <= fewest + 1


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.none() | st.integers() | st.lists(st.integers(-2, 6) | st.text(max_size=1), max_size=6),
    st.sampled_from(["keys", "shares"]),
)
def test_a_refusal_names_other_sites_of_the_sum_by_their_places(
    by: str, places: Any, what: Any
) -> None:
    found = disputes_in({DISPUTED: places}, by, set(NAMES), what)
    wanted = set()
    if isinstance(places, list) and len(places) <= 4:
        wanted = {
            Dispute(by, NAMES[at], what)
            for at in places
            if isinstance(at, int) and 0 <= at < 4 and NAMES[at] != by
        }
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "colluding", "reasons"),
    [
        (
            "a",
            1,
            "it says that the key of 'b' is not the one in its peers; `site offline key` prints the line "
            "that the file of peers needs; it says that it cannot use the shares of 'b', 'c'; either "
            "side may be at fault: the shares were false, or the report is",
        ),
        (
            "b",
            1,
            "by their own report it is not in the peers of 'a'; `site offline key` prints the line that the "
            "file of peers needs; its shares cannot be used, by the report of 'a', 'd'; more sites "
            "than may collude (1) report it, so its shares were false",
        ),
        (
            "b",
            2,
            "by their own report it is not in the peers of 'a'; `site offline key` prints the line that the "
            "file of peers needs; its shares cannot be used, by the report of 'a', 'd'; either side "
            "may be at fault: the shares were false, or the report is",
        ),
        (
            "b",
            0,
            "by their own report it is not in the peers of 'a'; `site offline key` prints the line that the "
            "file of peers needs; its shares cannot be used, by the report of 'a', 'd'; either side "
            "may be at fault: the shares were false, or the report is",
        ),
        (
            "c",
            1,
            "its shares cannot be used, by the report of 'a'; either side may be at fault: the "
            "shares were false, or the report is",
        ),
        ("z", 1, ""),
    ],
)
def test_what_is_known_of_a_dispute_is_told_whole(name: str, colluding: int, reasons: str) -> None:
    disputes = [
        Dispute("a", "b", "keys"),
        Dispute("a", "c", "shares"),
        Dispute("a", "b", "shares"),
        Dispute("d", "b", "shares"),
    ]
    assert why(name, disputes, colluding) == reasons
