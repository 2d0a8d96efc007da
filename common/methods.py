"""The registry of methods: each method has one description here. No other module compares names of methods.

A new method needs one `MethodSpec` here or in its family's file in `common/rules/`, one section of settings in
`common/config/sections/`, one function at the site and, if no existing strategy fits, one class in `strategies/`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.rules import fedpft, heads, training
from common.rules.closed_form import CLOSED_FORM
from common.rules.counting import COUNTS
from common.rules.generators import GENERATORS
from common.rules.secure_sum import UPDATES, with_secure_sum
from common.rules.spec import ALL_DEFENCES, MethodSpec
from common.rules.synthetic_records import SYNTHETIC_RECORDS

if TYPE_CHECKING:
    from common.config.run_config import RunConfig

# No median of parameters: probabilities and votes have none, and for sparse updates it would be zero almost everywhere.
NO_MEDIAN = ("none", "screen")

FEDPFT = MethodSpec(
    name="fedpft",
    title="FedPFT",
    paper="Beitollahi et al. 2024, algorithm 1",
    kind="one-shot",
    trained="fedavg",
    configured="fedpft",
    digest={"fedpft": fedpft.FEDPFT_KEYS},
    reads=("head",),
    site="client_app.methods.fedpft.surrogate:fedpft_surrogate",
    strategy="strategies.fedpft.strategy:FedPFT",
    sends=fedpft.sends,
    parsed=fedpft.parsed,
    receives=fedpft.receives,
    result=fedpft.result,
    symbols=fedpft.symbols,
    work=fedpft.work,
    variant=fedpft.variant,
    head=fedpft.head,
    defences=fedpft.defences,
    default_defence="screen",
    mechanisms=("sums", "dp-em", "theorem-4.1"),
    mechanism=fedpft.mechanism,
    refusal=fedpft.refusal,
    makes_surrogates=True,
    stored=True,
    introduces=False,
    summed=fedpft.summed,
    all_classes=fedpft.all_classes,
    samples=True,
    site_sums="client_app.methods.sums:class_moments",
    from_sums="strategies.fedpft.strategy:fedpft_head_from_sum",
)
# method = "fedpft" with fedpft.topology = "chain".
FEDPFT_CHAIN = replace(
    FEDPFT,
    paper="Beitollahi et al. 2024, section 4.2",
    kind="chain",
    site="client_app.methods.fedpft.chain:extend_chain",
    strategy="strategies.fedpft.chain:FedPFTChain",
    receives=fedpft.sends,
    work=fedpft.chain_work,
    defences=lambda config: ("none",),
    default_defence="none",
    undefended=" in a chain, where each site builds on the previous one",
    mechanisms=("sums",),
    refusal=fedpft.chain_refusal,
    allows=frozenset({"order", "seal"}),
    result=lambda config: () if config.fedpft.seal else fedpft.result(config),
    introduces=True,
)
KD = MethodSpec(
    name="kd",
    title="Knowledge distillation",
    paper="Hinton et al. 2015; a head passed from site to site, as in FedPFT's comparison",
    kind="chain",
    trained="fedavg",
    configured="fedpft",
    digest={"head": heads.HEAD_KEYS, "baseline": heads.BASELINE_KEYS},
    site="client_app.methods.heads.distillation:distil_chain",
    strategy="strategies.heads.head_chain:HeadChain",
    sends=lambda config: heads.HEAD,
    receives=lambda config: heads.HEAD,
    result=lambda config: heads.HEAD,
    symbols=heads.symbols,
    work=heads.chain_work,
    defences=lambda config: ("none",),
    undefended=", a chain in which each site builds on the previous one",
    allows=frozenset({"order"}),
)
# Baselines that FedPFT is compared with. First, methods whose sites train a head on their own records and send it once.
AVERAGE = MethodSpec(
    name="average",
    title="The average of heads",
    paper="one round of FedAvg",
    kind="one-shot",
    trained="fedavg",
    configured="baseline",
    digest={"head": heads.HEAD_KEYS, "baseline": heads.BASELINE_KEYS},
    site="client_app.methods.heads.local_head:own_head",
    strategy="strategies.heads.strategy:Heads",
    sends=lambda config: heads.HEAD,
    receives=lambda config: (),
    result=lambda config: heads.HEAD,
    symbols=heads.symbols,
    work=heads.work,
    defences=lambda config: ALL_DEFENCES,
    stored=True,
    introduces=False,
)
ENSEMBLE = replace(
    AVERAGE,
    name="ensemble",
    title="The ensemble of heads",
    paper="Guha et al. 2019",
    result=lambda config: heads.HEADS,
    defences=lambda config: NO_MEDIAN,
)
FEDBE = replace(AVERAGE, name="fedbe", title="FedBE", paper="Chen & Chao 2021", sends=lambda config: heads.HEAD_AND_FEATURES)
FEDKT = replace(
    FEDBE,
    name="fedkt",
    title="FedKT",
    paper="Li et al. 2021",
    site="client_app.methods.heads.local_head:student_head",
    work=heads.work_of_teachers,
    defences=lambda config: NO_MEDIAN,
)
LOCAL = replace(
    AVERAGE,
    name="local",
    title="Training alone",
    paper="no federation",
    kind="alone",
    stored=False,
    introduces=True,
    strategy="strategies.heads.local:Local",
    evaluate="client_app.methods.evaluation:own_model",
    personal="client_app.methods.heads.local_head:local_head",
    tested="the site's own head, trained alone",
    sends=lambda config: (),
    result=lambda config: (),
    defences=lambda config: ("none",),
    undefended=", which combines nothing",
)
# Methods that train one model in rounds.
FEDAVG = MethodSpec(
    name="fedavg",
    title="FedAvg",
    paper="McMahan et al. 2017",
    kind="rounds",
    trained="fedavg",
    configured="fedavg",
    digest={"fedavg": training.FEDAVG_KEYS, "baseline": heads.BASELINE_KEYS},
    site="client_app.methods.fedavg.update:update",
    strategy="strategies.fedavg.strategy:Updates",
    sends=lambda config: training.MODEL,
    receives=lambda config: training.MODEL,
    result=lambda config: training.MODEL,
    symbols=training.symbols,
    work=training.work,
    variant=training.variant,
    defences=lambda config: ALL_DEFENCES,
    summed=lambda config: UPDATES,
    site_sums="client_app.methods.fedavg.update:weighted_update",
    from_sums="strategies.fedavg.from_sums:absorb_total",
)
FEDPROX = replace(FEDAVG, name="fedprox", title="FedProx", paper="Li et al. 2020", proximal=True)
FEDYOGI = replace(FEDAVG, name="fedyogi", title="FedYogi", paper="Reddi et al. 2021")
FEDSGD = replace(FEDAVG, name="fedsgd", title="FedSGD", paper="McMahan et al. 2017")
DP_FEDAVG = replace(
    FEDAVG,
    name="dp-fedavg",
    title="DP-FedAvg",
    paper="Abadi et al. 2016, in rounds of FedAvg",
    mechanisms=("dp-sgd",),
    mechanism=training.dp_fedavg_mechanism,
    summed=training.dp_fedavg_summed,
    needs_budget=True,
    refusal=training.no_augmentation,
    packages=training.dp_sgd_packages,
)
DP_FEDPROX = replace(
    DP_FEDAVG,
    name="dp-fedprox",
    title="DP-FedProx",
    mechanism=lambda config: "dp-sgd",
    summed=lambda config: UPDATES,
    proximal=True,
)
# What follows combines more than a weighted sum of updates.
UNSUMMED = replace(FEDAVG, summed=lambda config: (), site_sums="", from_sums="")
SCAFFOLD = replace(
    UNSUMMED,
    name="scaffold",
    title="SCAFFOLD",
    paper="Karimireddy et al. 2020, algorithm 1",
    sends=lambda config: training.MODEL_AND_CONTROL,
    receives=lambda config: training.MODEL_AND_CONTROL,
    refusal=training.no_momentum,
)
DSFL = replace(
    UNSUMMED,
    name="dsfl",
    title="DSFL",
    paper="sparse updates, as in FedPFT's comparison",
    sends=lambda config: training.SPARSE_UPDATE,
    parsed=lambda config: training.MODEL,
    defences=lambda config: NO_MEDIAN,
    refusal=training.linear_only,
)
FEDLAMBDA = replace(
    UNSUMMED,
    name="fedlambda",
    title="FedLambda",
    paper="a local head mixed with FedAvg's, as in DP-CVAE's comparison",
    reads=("head",),
    evaluate="client_app.methods.fedavg.personalization:personal",
    tested="the model of the run, mixed with one of the site's own records",
    refusal=training.linear_only,
)
KNN_PER = replace(FEDLAMBDA, name="knn-per", title="kNN-Per", paper="Marfoq et al. 2022")
FEDREP = replace(
    UNSUMMED,
    name="fedrep",
    title="FedRep",
    paper="Collins et al. 2021, algorithm 1",
    reads=("head",),
    network="mlp",
    site="client_app.methods.fedavg.representation:update_body",
    strategy="strategies.fedavg.representation:Representation",
    evaluate="client_app.methods.evaluation:own_model",
    personal="client_app.methods.fedavg.representation:own_network",
    tested="the site's own head on the shared representation",
    sends=lambda config: training.BODY,
    receives=lambda config: training.BODY,
    refusal=training.body_only,
    signs=False,
)

METHODS: dict[str, MethodSpec] = {
    spec.name: spec
    for spec in (
        *(FEDPFT, *SYNTHETIC_RECORDS, KD, *GENERATORS, LOCAL, ENSEMBLE, AVERAGE, FEDBE, FEDKT, *CLOSED_FORM),
        *(FEDAVG, FEDPROX, FEDYOGI, FEDSGD, SCAFFOLD, DSFL, DP_FEDAVG, DP_FEDPROX, FEDLAMBDA, KNN_PER, FEDREP),
    )
}

# Methods whose combination is a sum, and counts, in runs with `secure-sum`.
SECURE_SUMS = {name: with_secure_sum(spec) for name, spec in METHODS.items() if spec.from_sums}
SECURE_COUNTS = {name: with_secure_sum(spec) for name, spec in COUNTS.items()}


def spec_of(config: RunConfig) -> MethodSpec:
    """The description of a run's method. Raises ConfigError for a name that is not in the registry."""
    spec = method_named(config.method)
    if config.counting.kind in COUNTS:
        return (SECURE_COUNTS if config.secure_sum else COUNTS)[config.counting.kind]
    if config.secure_sum and spec.from_sums:
        return SECURE_SUMS[spec.name]
    return FEDPFT_CHAIN if spec is FEDPFT and config.fedpft.topology == "chain" else spec


def method_named(name: str) -> MethodSpec:
    """The description of a method. Raises ConfigError with a list of all methods."""
    if name not in METHODS:
        raise ConfigError(f"method = {name[:40]!r}: {known()}")
    return METHODS[name]


def known() -> str:
    """The list of method names for an error message."""
    *names, last = map(repr, METHODS)
    return f"must be {', '.join(names)} or {last}"
