"""The descriptions of methods whose coordinator solves for a head in closed form. `common/methods.py` lists them."""

from __future__ import annotations

from dataclasses import replace

from common.rules import heads
from common.rules.secure_sum import MOMENTS
from common.rules.spec import MethodSpec

AFL = MethodSpec(
    name="afl",
    title="AFL",
    paper="He et al. 2025; Fed3R, Fanì et al. 2024",
    kind="one-shot",
    trained="fedavg",
    configured="afl",
    digest={},
    reads=("afl",),
    site="client_app.methods.sums:normal_equations",
    strategy="strategies.heads.analytic:Analytic",
    sends=lambda config: heads.NORMAL_EQUATIONS,
    receives=lambda config: (),
    result=lambda config: heads.HEAD,
    symbols=heads.triangle,
    work=heads.one_pass,
    defences=lambda config: ("none",),
    undefended=", whose second moments nothing here screens; max-share limits a site",
    stored=True,
    introduces=False,
    summed=lambda config: MOMENTS,
    site_sums="client_app.methods.sums:class_moments",
    from_sums="strategies.heads.analytic:afl_head_from_sum",
)
FEDCOF = replace(
    AFL,
    name="fedcof",
    title="FedCOF",
    paper="Goswami et al. 2025, algorithm 1",
    configured="fedcof",
    digest={"fedcof": heads.FEDCOF_KEYS},
    reads=(),
    site="client_app.methods.heads.class_means:class_means",
    strategy="strategies.heads.class_means:ClassMeans",
    sends=lambda config: heads.GROUP_MEANS,
    symbols=heads.groups,
    work=heads.group_means,
    undefended=", whose class means nothing here screens; max-share limits a site",
    summed=lambda config: (),
    site_sums="",
    from_sums="",
)
FEDCGS = replace(
    AFL,
    name="fedcgs",
    title="FedCGS",
    paper="Guan et al. 2025, global model",
    configured="fedcgs",
    reads=("fedcgs",),
    strategy="strategies.heads.analytic:GlobalStatistics",
    from_sums="strategies.heads.analytic:fedcgs_head_from_sum",
)
GH_OFL = replace(
    AFL,
    name="gh-ofl",
    title="GH-OFL",
    paper="Turazza et al. 2026, FisherMix and NB-diag",
    configured="ghofl",
    reads=("ghofl", "head"),
    site="client_app.methods.sums:gaussians",
    strategy="strategies.heads.gaussian_heads:GaussianHeads",
    sends=lambda config: heads.GAUSSIANS,
    result=lambda config: heads.HEAD if config.ghofl.head == "fishermix" else heads.DIAGONALS,
    work=heads.gaussians,
    variant=lambda config: config.ghofl.head,
    summed=lambda config: MOMENTS if config.ghofl.head == "fishermix" else (),
    from_sums="strategies.heads.gaussian_heads:gh_ofl_head_from_sum",
)

# In the order of the registry.
CLOSED_FORM = (AFL, FEDCOF, FEDCGS, GH_OFL)
