"""Distributed noise of generated sums: whatever sites are lost or collude, what stays keeps the claim."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.common.privacy.gaussian_mechanism import CONTINUOUS
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, Mechanism, NoisySums
from fedsurrogate.common.secure_aggregation.protocol import (
    ROOM,
    Shapes,
    noise_of_site,
    noise_of_sum,
    site_variances,
    spare_of,
    spare_variances,
)
from fedsurrogate.common.secure_aggregation.rules import (
    FILLED,
    HALF,
    MOST_SPARED,
    FixedPoint,
    SumRules,
)


@dataclass(frozen=True)
class Joint:
    """A sum with distributed noise."""

    claim: Mechanism
    numbers: dict[str, FixedPoint]
    shapes: Shapes
    rules: SumRules

    def largest_epsilon(self, variances: dict[str, float]) -> float:
        """Epsilon of noise of these variances, in squared steps. One record changes a statistic by
        its bound, and rounding each entry by less than one step more.
        """
        events = []
        for name, variance in variances.items():
            bound = self.claim.noise[name][1]
            apart = bound / self.numbers[name].step + math.sqrt(math.prod(self.shapes[name]))
            events.append(GaussianEvent(math.sqrt(variance) / apart))
        return epsilon_spent(events, self.claim.delta)


@st.composite
def joints(draw: st.DrawFn) -> Joint:
    names = draw(st.lists(st.sampled_from(("counts", "sums", "squares")), min_size=1, unique=True))
    weights = [draw(st.floats(0.1, 1.0)) for _ in names]
    shares = {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}
    bounds = {name: draw(st.sampled_from((0.5, 1.0, 3.0))) for name in names}
    epsilon = draw(st.sampled_from((0.5, 2.0, 8.0)))
    claim = NoisySums(DISTRIBUTED_SUMS, epsilon, 1e-5, shares, bounds=bounds).mechanism()
    members = draw(st.sampled_from((2, 3, 5, 6, 7, 9, 12, MOST_SPARED + 1)))
    rules = SumRules.of(
        members, draw(st.sampled_from((0.0, 0.2))), draw(st.sampled_from((0.4, 0.2, 0.0)))
    )
    records = draw(st.sampled_from((10**5, 10**6)))
    numbers = {name: FixedPoint.of(bounds[name], records, members) for name in names}
    shapes = {name: (draw(st.integers(1, 4)), draw(st.sampled_from((1, 8)))) for name in names}
    return Joint(claim, numbers, shapes, rules)


@settings(max_examples=30)
@given(joints())
def test_the_noise_of_the_fewest_honest_sites_keeps_the_claim(distributed: Joint) -> None:
    given = (distributed.claim, distributed.numbers, distributed.shapes)
    for rules in (distributed.rules, distributed.rules.lasting):
        variances = site_variances(*given, rules)
        honest = rules.least - rules.colluding
        # Of each discrete part, so much is no noise of the continuous mechanism.
        counted = {name: honest * (each - CONTINUOUS) for name, each in variances.items()}
        assert distributed.largest_epsilon(counted) <= distributed.claim.epsilon
        # Not more than that, apart from whole numbers.
        less = {name: honest * (each - 3 * CONTINUOUS - 1) for name, each in variances.items()}
        if min(less.values()) > 0:
            assert distributed.largest_epsilon(less) > distributed.claim.epsilon * 0.99
    spare = spare_variances(*given, distributed.rules)
    lasting = site_variances(*given, distributed.rules.lasting)
    assert bool(spare) == (distributed.rules.lasting.least > distributed.rules.least)
    for name, each in spare.items():
        # Two parts of one site, each discrete.
        assert lasting[name] + each - CONTINUOUS == site_variances(*given, distributed.rules)[name]
        assert each > 0


@settings(max_examples=20)
@given(joints(), st.binary(min_size=32, max_size=32))
def test_the_part_for_lost_sites_is_the_same_on_both_sides_however_the_claim_is_written(
    distributed: Joint, seed: bytes
) -> None:
    """A claim that was read from a message may name its statistics in another order."""
    found = spare_of(
        distributed.claim, distributed.numbers, distributed.shapes, distributed.rules, seed
    )
    turned = replace(distributed.claim, noise=dict(reversed(distributed.claim.noise.items())))
    again = spare_of(turned, distributed.numbers, distributed.shapes, distributed.rules, seed)
    unlike = bytes([seed[0] ^ 1]) + seed[1:]
    other = spare_of(
        distributed.claim, distributed.numbers, distributed.shapes, distributed.rules, unlike
    )
    assert found.keys() == again.keys()
    assert all((found[name] == again[name]).all() for name in found)
    assert not found or any((found[name] != other[name]).any() for name in found)
    whole = noise_of_site(
        distributed.claim, distributed.numbers, distributed.shapes, distributed.rules, seed
    )
    assert {name: len(each) for name, each in whole.items()} == {
        name: math.prod(shape) for name, shape in distributed.shapes.items()
    }


@settings(max_examples=30)
@given(joints(), st.data())
def test_the_stated_noise_of_a_sum_is_that_of_the_parts_in_it(
    distributed: Joint, data: st.DataObject
) -> None:
    given = (distributed.claim, distributed.numbers, distributed.shapes, distributed.rules)
    summed = data.draw(st.integers(distributed.rules.least, distributed.rules.members))
    lasting, spare = site_variances(*given[:3], distributed.rules.lasting), spare_variances(*given)
    whole, less = noise_of_sum(*given, summed), noise_of_sum(*given, summed, summed)
    for name, (sigma, _) in distributed.claim.noise.items():
        for stated, left in ((whole[name], spare.get(name, 0)), (less[name], 0)):
            steps = stated / distributed.numbers[name].step
            assert steps**2 == pytest.approx(summed * (lasting[name] + left), rel=1e-9)
        assert whole[name] >= sigma
        # Parts are taken out only where no site is lost.
        assert less[name] >= sigma or summed < distributed.rules.members


@settings(max_examples=60)
@given(joints(), st.floats(1.0, 1e4))
def test_noise_without_room_in_the_modulus_is_refused(distributed: Joint, coarser: float) -> None:
    numbers = {
        name: replace(each, step=each.step / coarser) for name, each in distributed.numbers.items()
    }
    given = (distributed.claim, numbers, distributed.shapes, distributed.rules)
    room = (1 - FILLED) * HALF
    try:
        variances = site_variances(*given)
    except ConfigError:
        worst = max(
            sigma / numbers[name].step
            + sigma / bound * 1.01 * math.sqrt(math.prod(distributed.shapes[name]))
            for name, (sigma, bound) in distributed.claim.noise.items()
        )
        # The sites that may be lost or collude add as much as the others.
        parts = distributed.rules.members / distributed.rules.honest
        assert ROOM * math.sqrt(parts) * (worst + 10) > room
    else:
        assert all(
            ROOM * math.sqrt(distributed.rules.members * each) <= room
            for each in variances.values()
        )
