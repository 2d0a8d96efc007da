"""One hostile hospital of four or more that knows all others costs at most five points, one of three at
most ten, and no honest one is left out. benchmarks/searched_attacks.py searches for the worst.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.searched_attacks import Federation, Lie, with_lie
from fedsurrogate.common.methods import method
from fedsurrogate.common.methods.method import MOST_JUDGED
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.robustness import defence
from fedsurrogate.strategies.robustness.harm import judged, of_surrogates
from tests.hostile_sites import uneven_digits

LIES = [
    Lie("middle", 2.5, 3),
    Lie("nearest", 1.8, 3),
    Lie("nearest", 0.7, 3),
    Lie("next class", 1.8, 1),
    Lie("next class", 0.7, 10, covariance="along"),
    Lie("away", 1.0, 1, covariance="along"),
    Lie("random", 1.4, 10),
    Lie("nearest", 2.5, 3, classes="one"),
]


@cache
def federation(sites: int) -> Federation:
    parts, test = uneven_digits(0.5, 10, sites)
    return Federation(parts, test, 1, {"seed": 10})


@pytest.mark.parametrize("sites", [3, 4, 10])
@pytest.mark.parametrize("lie", LIES, ids=str)
def test_one_hostile_site_costs_a_few_points(lie: Lie, sites: int) -> None:
    loss, named = federation(sites).loss(lie, "auto")
    assert loss <= (5.0 if sites > 3 else 10.0)
    assert named <= {"z0"}


@pytest.mark.parametrize("sites", [3, 4, 10])
def test_without_a_hostile_site_nothing_changes(sites: int) -> None:
    own = federation(sites)
    accuracy, named = own.accuracy(own.good, "auto")
    assert named == set()
    assert accuracy >= own.alone - 1.0


@pytest.mark.parametrize(
    ("seed", "sites", "hostile", "lie"),
    [
        # Only the false site knows most classes of its judges: without a judge it harms nobody.
        (14, 4, 1, Lie("nearest", 0.91, 10)),
        # It has classes that few have, and so is needed; beside it the others seem to harm.
        (15, 4, 1, Lie("next class", 2.5, 10, covariance="wide")),
        # Two false sites judge, and a small honest one does not.
        (12, 10, 2, Lie("nearest", 0.91, 1)),
    ],
)
def test_no_honest_site_counts_less_for_false_ones_that_do(
    seed: int, sites: int, hostile: int, lie: Lie
) -> None:
    own = Federation(*uneven_digits(0.1, seed, sites), hostile, {"seed": seed})
    sent = [*own.good, *(with_lie(each, lie) for each in own.bad)]
    weights = judged(of_surrogates(sent, own.classes)).weights.tolist()
    assert weights[:-hostile] == [1.0] * (sites - hostile)
    assert max(weights[-hostile:]) < 0.5


@pytest.mark.parametrize(
    ("sites", "most", "measured"),
    [(10, 10, True), (10, 9, False), (3, MOST_JUDGED, True), (2, MOST_JUDGED, False)],
)
def test_of_two_sites_and_of_more_than_are_judged_each_keeps_its_weight(
    sites: int, most: int, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = federation(10)
    sent = [*own.good[: sites - 1], with_lie(own.bad[0], Lie("next class", 2.5, 3))]
    monkeypatch.setattr(method, "MOST_JUDGED", most)
    found = defence.defend_surrogates(sent, "harm", 0.0, own.classes)
    assert bool(found.effects) is measured
    assert (len(found.kept) < sites or bool(found.capped)) is measured


@pytest.mark.parametrize("given", ["auto", "none"])
def test_a_run_of_so_many_sites_says_that_none_is_judged(given: str) -> None:
    few, many = (parse_run({"defence": given}).gaps(MOST_JUDGED + more) for more in (0, 1))
    assert few == []
    assert len(many) == (given == "auto")
