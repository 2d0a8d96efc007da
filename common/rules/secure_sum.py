"""Rules of secure sums: any method whose combination is a sum over sites becomes one whose coordinator sees only the sum."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common.privacy.accounting import gaussian_epsilon, gaussian_noise_multiplier
from common.rules.spec import Field, MethodSpec, Sizes, Summed
from common.secure_sum.fixed_point import BITS, FixedPoint
from common.secure_sum.rules import SumRules

if TYPE_CHECKING:
    from common.config.run_config import RunConfig

MECHANISM = "secure-sums"
# Strategies: one sum from which a model is learned, and one in each round of training.
ONCE, ROUNDS = "strategies.secure_sum.strategy:SecureSum", "strategies.secure_sum.rounds:SecureRounds"
# Keys, shares, signatures and revealed shares: measured in benchmarks/secure_sums.py.
MEMBER_BYTES = (175, 430)
# Settings that select which of its records a site adds. All sites must have the same.
SELECTING = ("test_fraction", "partition", "alpha", "classes_per_site", "site_column")
# Largest share of the records that test.
MOST_TESTED = 0.5
# Dimensions of a projection: this times the root of (records / noise on the second moment). Measured with 2,500 and 10,000
# images of CIFAR-10 that are in no table, and 3,143 sketches of PACS; half or twice as many cost up to a point.
DIMENSIONS = 7.5
# Without joint noise.
MOST_DIMENSIONS = 512
# Records of a site, and its change of all parameters times them.
UPDATES = (Summed("records", "1", 0), Summed("update", "P", 1))
# Class counts, class sums of features, and the second moment of all features, folded; T = d (d + 1) / 2.
MOMENTS = (Summed("counts", "C", 0), Summed("sums", "C d", 1), Summed("squares", "T", 2))


def with_secure_sum(spec: MethodSpec) -> MethodSpec:
    """The description of a method in runs with `secure-sum`. Everything generic follows from it."""
    rounds, joint = spec.kind == "rounds", bool({"sums", "counts"} & set(spec.mechanisms))
    return replace(
        spec,
        site="client_app.secure_sum.masked:masked_sum",
        strategy=spec.sum_strategy or (ROUNDS if rounds else ONCE),
        sends=lambda config: _fields(spec.summed(config)),
        first_round=None if spec.first_summed is None else (lambda config: _fields(spec.sums(config, 1))),
        receives=spec.receives if rounds or spec.counts else lambda config: (),
        symbols=lambda config, classes, d, records: {
            **spec.symbols(config, classes, d, records),
            "T": d * (d + 1) // 2,
            "1": 1,
        },
        variant=lambda config: "secure sum",
        defences=lambda config: ("none",),
        default_defence="none",
        undefended=" in a secure sum, which shows no site's part; each number of a site is only kept within its range",
        mechanisms=(MECHANISM,) if joint else spec.mechanisms,
        mechanism=(lambda config: MECHANISM) if joint else spec.mechanism,
        refusal=lambda config: spec.refusal(config) or refusal(spec, config),
        stored=False,
        introduces=True,
        member_bytes=MEMBER_BYTES,
    )


def _fields(summed: tuple[Summed, ...]) -> tuple[Field, ...]:
    return tuple(Field(each.name, each.shape, bits=BITS) for each in summed)


def refusal(spec: MethodSpec, config: RunConfig) -> str:
    """Why a run cannot be a secure sum; empty if it can."""
    if not spec.summed(config):
        return (
            f"secure-sum = true, but with these settings what method = {spec.name!r} combines is not a sum over sites; use "
            "method = 'fedpft' with fedpft.covariance = 'gram', fedpft.components = 1 and a head in closed form, 'afl' or "
            "'fedavg'"
        )
    if config.features.projection and spec.summed(config) is not MOMENTS:
        return f"features.projection = {config.features.projection!r} is for sums of class statistics; remove it"
    if config.resume:
        return f"resume = {config.resume!r}: a secure sum keeps nothing to continue from; remove resume, and start again"
    if not config.classes:
        return "secure-sum = true needs classes: which classes a site has must not be visible"
    if config.test_fraction > MOST_TESTED:
        return (
            f"test-fraction = {config.test_fraction:g}: in a secure sum at most {MOST_TESTED:g}; with few training records, "
            "only one site may have enough of a class, and the sum of that class would be its own"
        )
    if config.max_share != type(config).model_fields["max_share"].default and config.max_share:
        return f"max-share = {config.max_share:g}: a secure sum shows no site's weight; remove max-share, or set 0"
    return ""


def rules_of(config: RunConfig, members: int) -> SumRules:
    """The limits of a run's secure sum of this many sites."""
    return SumRules.of(members, config.colluding, config.dropouts, config.secure_sum_threshold)


def numbers_of(config: RunConfig, spec: MethodSpec, sites: int, round: int = 1) -> dict[str, FixedPoint]:
    """The fixed-point numbers of each statistic of a round. Under joint noise, features have norm at most one.

    Raises ConfigError.
    """
    found, joint = {}, config.mechanism == MECHANISM
    for each in spec.sums(config, round):
        bound = 1.0 if joint else float(config.secure_sum_range) ** each.degree * math.sqrt(max(1, each.degree))
        whole = not each.degree and not joint
        found[each.name] = FixedPoint.of(bound, config.secure_sum_records, sites, whole)
    return found


def dimensions_of(config: RunConfig) -> int:
    """The number of dimensions after the public projection. It depends on settings alone, never on data."""
    if config.features.dimensions:
        return config.features.dimensions
    if config.mechanism != MECHANISM:
        return MOST_DIMENSIONS
    from common.privacy.gaussian_mechanism import JOINT

    # Part of the noise that counts, if no site is lost.
    honest = max(1 - config.colluding, 0.1)
    noise = gaussian_noise_multiplier(config.epsilon, config.delta) / math.sqrt(JOINT["squares"] * honest)
    return max(1, round(DIMENSIONS * math.sqrt(config.features.records / noise)))


def shapes_of(
    config: RunConfig, spec: MethodSpec, classes: Sequence[str], dimension: int, round: int = 1
) -> dict[str, tuple[int, ...]]:
    """The shape of each statistic of a round."""
    sizes: Sizes = spec.sizes(config, len(classes), dimension, 1)
    return {each.name: tuple(sizes[symbol] for symbol in each.shape.split()) for each in spec.sums(config, round)}


def context_of(config: RunConfig, name: str) -> bytes:
    """Digest that binds keys, shares and signatures to the settings of a run and to one sum."""
    from common.config.run_config import full_digest

    # Not in the digest, because simulations and deployments differ in them; but they select each site's records.
    chosen = {key: getattr(config, key) for key in SELECTING}
    selected = json.dumps(chosen, sort_keys=True)
    return hashlib.sha256(f"{full_digest(config)}\0{name}\0{selected}".encode()).digest()


def local_epsilon(config: RunConfig, rules: SumRules) -> float:
    """Epsilon, at the run's delta, of the part of this site's own noise that always stays: if all others tell theirs.

    Of all rounds of the run together.
    """
    if config.mechanism != MECHANISM:
        return config.epsilon
    from common.privacy.claims import plan_of

    (event,) = plan_of(config)
    return gaussian_epsilon(event.noise_multiplier / math.sqrt(event.count * rules.lasting.honest), config.delta)
