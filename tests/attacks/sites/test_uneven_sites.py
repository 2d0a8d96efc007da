"""Two hostile sites of ten that hold unequal shares of every class cost the model at most five
points.
"""

from __future__ import annotations

from functools import cache

import pytest

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.strategies.fedpft.strategy import learn
from tests.hostile_sites import ATTACKS, Data, surrogate_of, uneven_digits

ALPHA, SEED, SITES = 0.5, 0, 10
CLASSES = tuple(map(str, range(10)))
RUN = parse_run(
    {"head.min-steps": 150, "head.epochs": 1, "fedpft.covariance": "diag", "seed": SEED}
)


@cache
def partition() -> tuple[list[Data], Data]:
    return uneven_digits(ALPHA, SEED, SITES)


@cache
def sent(site: int, attack: str = "") -> AnySurrogate:
    return surrogate_of(
        partition()[0][site], CLASSES, "f" * 16, str(site), RUN, ATTACKS.get(attack)
    )


def learned(surrogates: list[AnySurrogate]) -> tuple[float, list[str]]:
    """Accuracy on the test set, and who was suspected."""
    features, labels = partition()[1]
    found = learn(surrogates, RUN, "cpu", CLASSES)
    right = found.model.accuracy(features, CLASSES, labels)[0] / len(labels)
    return right, sorted(suspect.site for suspect in found.defended.suspects)


@pytest.mark.parametrize("attack", ATTACKS)
def test_two_hostile_sites_cost_at_most_five_points(attack: str) -> None:
    rest = [sent(site) for site in range(2, SITES)]
    alone, nobody = learned(rest)
    among, suspects = learned([sent(0, attack), sent(1, attack), *rest])
    assert nobody == []
    assert among > alone - 0.05
    assert set(suspects) <= {"0", "1"}, "no honest site is accused"
