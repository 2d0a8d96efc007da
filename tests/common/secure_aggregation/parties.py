"""Sites and a coordinator of secure aggregation in memory, each step apart, so that a test can lose or
attack any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.secure_aggregation.protocol import (
    SumState,
    agree,
    begin,
    mask,
    reveal,
    share,
)
from fedsurrogate.common.secure_aggregation.rules import SumRules
from fedsurrogate.common.secure_aggregation.secrets import Dealt, Member, Words
from fedsurrogate.common.security.sealing import new_key, public_key

CONTEXT = b"a run and a sum"


@dataclass
class Party:
    """One site."""

    name: str
    private: bytes = field(default_factory=new_key)
    context: bytes = CONTEXT

    def __post_init__(self) -> None:
        self.state: SumState
        self.state, self.member = begin(self.name, self.private, self.context)

    def share(
        self,
        members: Collection[Member],
        rules: SumRules,
        smallest_sum: int = 2,
        pinned: Mapping[str, bytes] | None = None,
        public: bytes = b"",
    ) -> Dealt:
        own = public_key(self.private)
        self.state, dealt = share(
            self.state, list(members), rules, own, smallest_sum, pinned, public
        )
        return dealt

    def mask(
        self, delivered: Collection[Dealt], rules: SumRules, values: NDArray[np.int64]
    ) -> Words:
        self.state, masked = mask(self.state, list(delivered), rules, values)
        return masked

    def agree(self, summed: Collection[str], rules: SumRules) -> bytes:
        self.state, signature = agree(self.state, summed, rules, self.private)
        return signature

    def reveal(
        self, signatures: Mapping[str, bytes], rules: SumRules
    ) -> dict[str, dict[str, bytes]]:
        self.state, found = reveal(self.state, signatures, rules)
        return found


def values_of(sites: Collection[str], count: int = 50) -> dict[str, NDArray[np.int64]]:
    """A known vector for every site."""
    rng = np.random.default_rng(3)
    return {site: rng.integers(-(10**6), 10**6, count) for site in sites}
