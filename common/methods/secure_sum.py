"""Any method whose combination is a sum over sites, as one whose coordinator sees only the sum."""

from __future__ import annotations

from dataclasses import replace

from fedsurrogate.common.methods.method import Combination, Defences, Plan, Sizes, fields_of
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.common.secure_sum.fixed_point import BITS
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.terms import Term

# Strategies: one sum from which a model is learned, and one in each round of training.
ONCE, ROUNDS = (
    "fedsurrogate.strategies.secure_sum.strategy:SecureSum",
    "fedsurrogate.strategies.secure_sum.rounds:SecureRounds",
)
# Keys, shares, signatures and revealed shares: measured in benchmarks/secure_sums.py.
MEMBER_BYTES = (175, 430)
# Largest share of the records that test.
MOST_TESTED = 0.5
# Records of a site, and its change of all parameters times them.
UPDATES = (Term("records", "1", 0), Term("update", "P", 1))
# In a sum without noise, zero at every site that lets the sum be opened. A refusal would show
# something about the data of the site that refuses; see client_app/governance/uncharged.py.
WITHHELD = Term("withheld", "1", 0)


def with_secure_sum(name: str, plan: Plan, settings: Settings) -> Plan:
    """The plan of a method in a run with `secure-sum`. Everything generic follows from it.

    Args:
        name: of the method, for errors.
        plan: of the same run without the sum.
        settings: of the run.
    """
    rounds, combination, messages = plan.kind == "rounds", plan.combination, plan.messages
    continues = rounds and plan.mechanism_name == JOINT_SUMS
    refusal = plan.refusal or _refusal(name, combination.sums, settings, continues)
    if not settings.epsilon:
        combination = _can_be_withheld(combination)

    def symbols(classes: int, dimension: int, records: int) -> Sizes:
        more = {"T": dimension * (dimension + 1) // 2, "1": 1}
        return {**messages.symbols(classes, dimension, records), **more}

    return replace(
        plan,
        messages=replace(
            messages,
            sends=fields_of(combination.sums, bits=BITS),
            first=None if messages.first is None else fields_of(combination.sums_in(1), bits=BITS),
            receives=messages.receives if rounds or plan.counts else (),
            symbols=symbols,
            introduces=True,
            member_bytes=MEMBER_BYTES,
        ),
        combination=replace(
            combination,
            site="fedsurrogate.client_app.secure_sum.masked:masked_sum",
            strategy=combination.sum_strategy or (ROUNDS if rounds else ONCE),
            stored=False,
        ),
        defences=Defences(
            reason=" in a secure sum, which shows no site's part; each number of a site is only "
            "kept within its range",
            gap="a secure sum shows no site's part: one hostile site can spoil the model, and "
            "nothing names it; sites keep only each of their own numbers within a range",
        ),
        refusal=refusal,
        variant="secure sum",
    )


def _can_be_withheld(combination: Combination) -> Combination:
    first = combination.first_sums
    return replace(
        combination,
        sums=(*combination.sums, WITHHELD),
        first_sums=None if first is None else (*first, WITHHELD),
    )


def _refusal(name: str, sums: tuple[Term, ...], settings: Settings, continues: bool) -> str:
    """Why a run cannot be a secure sum; empty if it can. continues: whether it keeps its rounds."""
    if not sums:
        return (
            f"secure-sum = true, but with these settings what method = {name!r} combines is not a "
            "sum over sites; use method = 'fedpft' with fedpft.covariance = 'gram', "
            "fedpft.components = 1, fedpft.topology = 'star', fedpft.privacy = 'auto' and a head "
            "in closed form (head.solver = 'auto', 'lda' or 'ridge'), or 'fedavg'"
        )
    file = settings.features.given_projection
    if file and "sums" not in {each.name for each in sums}:
        return f"features.projection = {file!r} is for sums of class statistics; remove it"
    if settings.resume and not continues:
        return (
            f"resume = {settings.resume!r}: a secure sum without joint noise in rounds keeps nothing "
            "to continue from; remove resume, and start again"
        )
    if not settings.classes:
        return "secure-sum = true needs classes: which classes a site has must not be visible"
    if settings.test_fraction > MOST_TESTED:
        return (
            f"test-fraction = {settings.test_fraction:g}: in a secure sum at most {MOST_TESTED:g}; "
            "with few training records, only one site may have enough of a class, and the sum of "
            "that class would be its own"
        )
    if settings.max_share and settings.max_share != Settings.model_fields["max_share"].default:
        return (
            f"max-share = {settings.max_share:g}: a secure sum shows no site's weight; remove "
            "max-share, or set 0"
        )
    return ""
