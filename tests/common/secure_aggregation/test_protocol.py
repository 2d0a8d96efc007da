"""Secure aggregation in memory: exact sums, lost sites, and every message that a lying coordinator could
change.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.secure_aggregation.rules import FixedPoint, SumRules
from fedsurrogate.common.secure_aggregation.secrets import Member, words
from tests.common.secure_aggregation.parties import parties, run, values_of


def rules_of(
    members: int, colluding: float = 0.0, dropouts: float = 0.4, threshold: int = 0
) -> SumRules:
    return SumRules.of(members, colluding, dropouts, threshold)


def total_of(values: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
    return words(sum(values[name] for name in names))


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 8), st.data())
def test_the_sum_is_exact_whoever_is_lost(count: int, data: st.DataObject) -> None:
    sites, rules = parties(count), rules_of(count)
    names = list(sites)
    lost = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=count - rules.least))
    there = [name for name in names if name not in lost]
    silent = data.draw(
        st.lists(st.sampled_from(there), unique=True, max_size=len(there) - rules.threshold)
    )
    values = values_of(names)
    total, masked = run(sites, values, rules, lost, silent)
    assert (total == total_of(values, there)).all()
    assert not any(
        (masked[name] == words(values[name])).any() for name in there if len(values[name]) < 100
    )


def test_masked_vectors_look_random() -> None:
    """Of zeros, so that every bit comes from masks: half of all bits are set, at every position."""
    sites = parties(4)
    zeros = {name: np.zeros(4000, dtype=np.int64) for name in sites}
    total, masked = run(sites, zeros, rules_of(4))
    assert not total.any()
    for vector in masked.values():
        shares = np.unpackbits(vector.view(np.uint8).reshape(-1, 4), axis=1).mean(0)
        assert (abs(shares - 0.5) < 0.05).all()


@pytest.mark.parametrize(
    ("rules", "smallest", "message"),
    [
        (rules_of(1), 1, "2 to"),
        (rules_of(2), 3, "smallest-sum = 3"),
        (rules_of(5, dropouts=0.5, threshold=3), 4, "smallest-sum = 4"),
        (SumRules(5, 1, 3, 5), 3, "secure-aggregation-threshold = 3"),
        (SumRules(4, 0, 2, 4), 3, "secure-aggregation-threshold = 2"),
        (SumRules(4, 0, 5, 5), 3, "only 4"),
    ],
)
def test_rules_that_do_not_protect_are_refused(
    rules: SumRules, smallest: int, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        rules.check(smallest)


def test_numbers_are_not_rounded_in_single_precision() -> None:
    fixed, value = FixedPoint(3e-9, 2**31), torch.tensor([1.1])
    assert fixed.encode(value).tolist() == [round(float(value) / 3e-9)]


def test_a_sum_of_one_site_is_refused_by_default_and_one_as_small_as_allowed_is_not() -> None:
    with pytest.raises(PolicyError, match="smallest-sum = 2"):
        SumRules(3, 0, 2, 1).check()
    rules_of(3, dropouts=0.0).check(3)


def keys(length: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=length, max_size=length)


MEMBERS = st.builds(
    Member, st.sampled_from(["north", "ö st"]), keys(64), keys(32), keys(32), keys(64)
)


@given(MEMBERS, MEMBERS, st.sampled_from(["site", "public", "masking", "sharing", "signature"]))
def test_a_signature_covers_every_key_and_the_name(one: Member, other: Member, part: str) -> None:
    changed = replace(one, **{part: getattr(other, part)})
    same = part == "signature" or changed == one
    assert (changed.content == one.content) == same
    assert one.content == one.public + one.masking + one.sharing + one.site.encode()
