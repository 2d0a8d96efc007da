"""Methods whose coordinator solves for a head in closed form."""

from __future__ import annotations

from dataclasses import replace

from fedsurrogate.common.limits import LARGEST_COUNT
from fedsurrogate.common.methods.class_sums import class_sums_plan
from fedsurrogate.common.methods.coded_sums import coded_sums_plan, refused
from fedsurrogate.common.methods.heads import HEAD
from fedsurrogate.common.methods.method import (
    Combination,
    Defences,
    Field,
    Messages,
    Method,
    Plan,
    Sizes,
    Work,
)
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.target import Target

# Quadratic discriminants with a diagonal covariance of each class.
DIAGONALS = (Field("means", "C d"), Field("whiteners", "C d"), Field("bias", "C", bits=64))
# Records and means of the groups of each class, of which g have records; a parsed message has G of
# them.
GROUP_MEANS = (Field("counts", "C g", 0, LARGEST_COUNT), Field("means", "C g d"))
PARSED_MEANS = (Field("counts", "C G", 0, LARGEST_COUNT), Field("means", "C G d"))


def afl_plan(settings: Settings) -> Plan:
    """The plan of AFL: normal equations once, least squares at the coordinator."""
    own = class_sums_plan(
        settings,
        "fedsurrogate.strategies.heads.analytic:afl_model",
        squares=True,
        options={"shrinkage": settings.afl.ridge},
    )
    return _run_by(own, "fedsurrogate.strategies.heads.analytic:Analytic")


def fedcgs_plan(settings: Settings) -> Plan:
    """The plan of FedCGS: AFL's statistics, another head."""
    own = class_sums_plan(
        settings,
        "fedsurrogate.strategies.heads.analytic:fedcgs_model",
        squares=True,
        options={"shrinkage": settings.fedcgs.ridge},
    )
    return _run_by(own, "fedsurrogate.strategies.heads.analytic:GlobalStatistics")


def gh_ofl_plan(settings: Settings) -> Plan:
    """The plan of GH-OFL: Gaussians of classes, of which only FisherMix needs no more than sums."""
    head = settings.ghofl.head
    mixed = {"seed": settings.seed, "max_samples": settings.head.max_samples}
    own = class_sums_plan(
        settings,
        "fedsurrogate.strategies.heads.gaussian_heads:"
        + ("fisher_mix" if head == "fishermix" else "nb_diag"),
        squares=True,
        variances=True,
        options=mixed if head == "fishermix" else {},
    )
    own = _run_by(
        replace(own, variant=head), "fedsurrogate.strategies.heads.gaussian_heads:GaussianHeads"
    )
    if head == "fishermix":
        return own
    messages = replace(own.messages, result=DIAGONALS)
    return replace(own, messages=messages, combination=replace(own.combination, sums=()))


def _run_by(plan: Plan, strategy: str) -> Plan:
    return replace(plan, combination=replace(plan.combination, strategy=strategy))


def fedcof_plan(settings: Settings) -> Plan:
    """The plan of FedCOF: means of groups of records."""
    groups = settings.fedcof.groups

    def work(classes: int, dimension: int) -> Work:
        return Work(passes=1, numbers=classes * groups * dimension, components=groups)

    def symbols(classes: int, dimension: int, records: int) -> Sizes:
        # A class with few records has fewer groups, and a message leaves out the zeros of missing
        # ones.
        most = records // max(1, classes) // settings.fedcof.samples_per_group
        return {"g": max(1, min(groups, most))}

    return Plan(
        kind="one-shot",
        messages=Messages(
            GROUP_MEANS, (), HEAD, parsed=PARSED_MEANS, symbols=symbols, introduces=False
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.heads.class_means:class_means",
            strategy="fedsurrogate.strategies.heads.class_means:ClassMeans",
            stored=True,
        ),
        work=work,
        defences=Defences(
            reason=", whose class means show no harm; max-share limits a site",
            gap="class means without a second moment: nothing tells a false mean from an odd one; where "
            "sites hold few classes, one hostile site of four can take half of the accuracy",
        ),
    )


def afl_coded_plan(settings: Settings, target: Target) -> Plan:
    """The plan of AFL for another target: least squares of the code, which times have none of."""
    own = coded_sums_plan(settings, target, None)
    learn = replace(
        own.combination,
        learn="fedsurrogate.strategies.targets.learning:ridged",
        options={"ridge": settings.afl.ridge},
    )
    why = (
        ""
        if not target.divides
        else (f"target = {target.name!r} is no least squares; use method = 'fedpft'")
    )
    return refused(replace(own, combination=learn), why)


AFL = Method(
    name="afl",
    title="AFL",
    paper="He et al. 2025; Fed3R, Fanì et al. 2024",
    plan=afl_plan,
    coded=afl_coded_plan,
    learns=("afl",),
    shown="afl",
)
FEDCOF = Method(
    name="fedcof",
    title="FedCOF",
    paper="Goswami et al. 2025, algorithm 1",
    plan=fedcof_plan,
    reads=("fedcof",),
    shown="fedcof",
)
FEDCGS = Method(
    name="fedcgs",
    title="FedCGS",
    paper="Guan et al. 2025, global model",
    plan=fedcgs_plan,
    learns=("fedcgs",),
    shown="fedcgs",
)
GH_OFL = Method(
    name="gh-ofl",
    title="GH-OFL",
    paper="Turazza et al. 2026, FisherMix and NB-diag",
    plan=gh_ofl_plan,
    learns=("ghofl", "head"),
    shown="ghofl",
)

# In the order of the registry.
CLOSED_FORM = (AFL, FEDCOF, FEDCGS, GH_OFL)
