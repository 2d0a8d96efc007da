"""Methods whose coordinator solves for a head in closed form."""

from __future__ import annotations

from dataclasses import replace

from common.limits import LARGEST_COUNT
from common.methods.heads import HEAD
from common.methods.method import Combination, Defences, Field, Messages, Method, Plan, Sizes, Work
from common.methods.secure_sum import MOMENTS
from common.settings import Settings

# Records and sums of features by class, and second moment around the class means, of which least squares needs no more;
# T = d (d + 1) / 2.
NORMAL_EQUATIONS = (Field("counts", "C", 0, LARGEST_COUNT), Field("sums", "C d"), Field("squares", "T"))
# The same, with the variance of every dimension in each class.
GAUSSIANS = (*NORMAL_EQUATIONS, Field("variances", "C d", 0))
# Quadratic discriminants with a diagonal covariance of each class.
DIAGONALS = (Field("means", "C d"), Field("whiteners", "C d"), Field("bias", "C", bits=64))
# Records and means of the groups of each class, of which there are g.
GROUP_MEANS = (Field("counts", "C g", 0, LARGEST_COUNT), Field("means", "C g d"))
FEDCOF_KEYS = ("groups", "samples_per_group")


def _triangle(classes: int, dimension: int, records: int) -> Sizes:
    """T numbers of a symmetric matrix."""
    return {"T": dimension * (dimension + 1) // 2}


def _one_pass(classes: int, dimension: int) -> Work:
    """Sums over all records, and the second moment."""
    return Work(passes=1, numbers=dimension * (dimension + classes))


def afl_plan(settings: Settings) -> Plan:
    """The plan of AFL: normal equations once, least squares at the coordinator."""
    return Plan(
        kind="one-shot",
        messages=Messages(NORMAL_EQUATIONS, (), HEAD, symbols=_triangle, introduces=False),
        combination=Combination(
            site="client_app.methods.sums:normal_equations",
            strategy="strategies.heads.analytic:Analytic",
            stored=True,
            sums=MOMENTS,
            site_sums="client_app.methods.sums:class_moments",
            from_sums="strategies.heads.analytic:afl_head_from_sum",
        ),
        work=_one_pass,
        defences=Defences(reason=", whose second moments nothing here screens; max-share limits a site"),
    )


def fedcgs_plan(settings: Settings) -> Plan:
    """The plan of FedCGS: AFL's statistics, another head."""
    own = afl_plan(settings)
    combination = replace(
        own.combination,
        strategy="strategies.heads.analytic:GlobalStatistics",
        from_sums="strategies.heads.analytic:fedcgs_head_from_sum",
    )
    return replace(own, combination=combination)


def fedcof_plan(settings: Settings) -> Plan:
    """The plan of FedCOF: means of groups of records."""
    groups = settings.fedcof.groups

    def work(classes: int, dimension: int) -> Work:
        return Work(passes=1, numbers=classes * groups * dimension, components=groups)

    def symbols(classes: int, dimension: int, records: int) -> Sizes:
        # A message leaves out the zeros of missing groups.
        return {"g": groups}

    return Plan(
        kind="one-shot",
        messages=Messages(GROUP_MEANS, (), HEAD, symbols=symbols, introduces=False),
        combination=Combination(
            site="client_app.methods.heads.class_means:class_means",
            strategy="strategies.heads.class_means:ClassMeans",
            stored=True,
        ),
        work=work,
        defences=Defences(reason=", whose class means nothing here screens; max-share limits a site"),
    )


def gh_ofl_plan(settings: Settings) -> Plan:
    """The plan of GH-OFL: Gaussians of classes, of which only FisherMix needs no more than sums."""
    own, head = afl_plan(settings), settings.ghofl.head
    mixed = head == "fishermix"
    combination = replace(
        own.combination,
        site="client_app.methods.sums:gaussians",
        strategy="strategies.heads.gaussian_heads:GaussianHeads",
        from_sums="strategies.heads.gaussian_heads:gh_ofl_head_from_sum",
        sums=MOMENTS if mixed else (),
    )
    messages = replace(own.messages, sends=GAUSSIANS, result=HEAD if mixed else DIAGONALS)

    def work(classes: int, dimension: int) -> Work:
        return Work(passes=1, numbers=dimension * (dimension + 2 * classes))

    return replace(own, messages=messages, combination=combination, work=work, variant=head)


AFL = Method(
    name="afl",
    title="AFL",
    paper="He et al. 2025; Fed3R, Fanì et al. 2024",
    plan=afl_plan,
    reads=("afl",),
    shown="afl",
)
FEDCOF = Method(
    name="fedcof",
    title="FedCOF",
    paper="Goswami et al. 2025, algorithm 1",
    plan=fedcof_plan,
    digest={"fedcof": FEDCOF_KEYS},
    shown="fedcof",
)
FEDCGS = Method(
    name="fedcgs",
    title="FedCGS",
    paper="Guan et al. 2025, global model",
    plan=fedcgs_plan,
    reads=("fedcgs",),
    shown="fedcgs",
)
GH_OFL = Method(
    name="gh-ofl",
    title="GH-OFL",
    paper="Turazza et al. 2026, FisherMix and NB-diag",
    plan=gh_ofl_plan,
    reads=("ghofl", "head"),
    shown="ghofl",
)

# In the order of the registry.
CLOSED_FORM = (AFL, FEDCOF, FEDCGS, GH_OFL)
