"""Descriptions of the methods whose sites send synthetic records: FedLAP, and those that it is compared with."""

from __future__ import annotations

from dataclasses import replace

from common.rules import training
from common.rules.spec import MethodSpec

FEDLAP = MethodSpec(
    name="fedlap",
    title="FedLAP",
    paper="Wang et al. 2024, algorithms 1 to 3",
    kind="rounds",
    trained="fedlap",
    configured="fedlap",
    digest={"fedlap": training.FEDLAP_KEYS},
    site="client_app.methods.fedlap.approximation:approximate",
    strategy="strategies.fedlap.strategy:FedLAP",
    sends=lambda config: training.IMAGES,
    parsed=lambda config: training.LABELLED,
    receives=lambda config: training.MODEL,
    result=lambda config: training.MODEL,
    symbols=training.fedlap_symbols,
    work=training.fedlap_work,
    variant=training.variant,
    defences=lambda config: ("none",),
    undefended=": there is no screen for its synthetic images; max-share and fedlap.rule limit a site",
    mechanisms=("dp-sgd",),
    refusal=training.fedlap_refusal,
    makes_surrogates=True,
    unit_features=True,
)
# Methods that FedLAP is compared with: they send synthetic records too, but no radius.
DSC = replace(
    FEDLAP,
    name="dsc",
    title="DSC",
    paper="Zhao et al. 2021, dataset condensation by gradient matching",
    site="client_app.methods.fedlap.comparators:dsc",
    undefended=": there is no screen for its synthetic images; max-share limits a site",
    mechanisms=(),
    refusal=training.by_class_refusal,
)
FEDDM = replace(
    DSC,
    name="feddm",
    title="FedDM",
    paper="Xiong et al. 2023, distribution matching in each class",
    site="client_app.methods.fedlap.comparators:feddm",
)
PSG = replace(
    DSC,
    name="psg",
    title="PSG",
    paper="Chen et al. 2022, private set generation",
    site="client_app.methods.fedlap.comparators:psg",
    mechanisms=("dp-sgd",),
    needs_budget=True,
    refusal=training.fedlap_refusal,
)

# In the order of the registry.
SYNTHETIC_RECORDS = (FEDLAP, DSC, FEDDM, PSG)
