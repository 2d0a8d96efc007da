"""All methods of the registry with small settings. Tests that iterate over them include a new
method without new code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fedsurrogate.common.methods import FEDPFT_CHAIN, METHODS
from fedsurrogate.common.methods.method import Method, Plan, count
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar

CLASSES = ",".join(map(str, range(10)))
SPECS: dict[str, Method] = {**METHODS, "fedpft chain": FEDPFT_CHAIN}
# Small settings, for runs of seconds; other sections have their defaults.
SMALL: dict[str, Scalar] = {
    **{"fedavg.rounds": 2, "fedavg.local-epochs": 2},
    **{"head.min-steps": 60, "head.epochs": 2, "head.max-samples": 2000, "alpha": 1.0},
    **{
        "fedlap.rounds": 1,
        "fedlap.image-steps": 20,
        "fedlap.images-per-class": 2,
        "fedlap.model": "linear",
    },
    "fedlap.trust-radius": 2.0,
    **{"dpcvae.rounds": 3, "dpcvae.synthetic": 100},
}
# For runs of about a second, which learn little.
TINY: dict[str, Scalar] = {
    **SMALL,
    **{
        "head.min-steps": 20,
        "head.epochs": 1,
        "fedavg.rounds": 1,
        "fedavg.local-epochs": 1,
        "fedlap.image-steps": 2,
    },
    **{
        "fedlap.server-steps": 3,
        "dpcvae.rounds": 2,
        "dpcvae.local-epochs": 1,
        "dpcvae.latent": 4,
        "dpcvae.synthetic": 10,
    },
}


def settings_of(spec: Method, small: dict[str, Scalar] = SMALL) -> dict[str, Scalar]:
    """Settings of a short run of a method, under privacy only if it needs that."""
    found: dict[str, Scalar] = {"method": spec.name} | small
    if spec is FEDPFT_CHAIN:
        found["fedpft.topology"] = "chain"
    if spec.needs_budget:
        found |= {
            "epsilon": 8.0,
            "delta": 1e-5,
            "classes": CLASSES,
            "fedavg.sample-rate": 1.0,
            "dpcvae.sample-rate": 1.0,
        }
    return found


def sent_numbers(run: Run, dimension: int, classes: int, records: int) -> int:
    """How many numbers one site sends in a round, by the schema of the method."""
    messages = run.plan.messages
    return count(messages.sends, messages.sizes(classes, dimension, records))


# What they do under these settings.
PLANS: dict[str, Plan] = {name: parse_run(settings_of(spec)).plan for name, spec in SPECS.items()}
# One method for each strategy, for tests of what a strategy class decides.
BY_STRATEGY: dict[str, Method] = {}
for name, plan in PLANS.items():
    BY_STRATEGY.setdefault(plan.combination.strategy, SPECS[name])


def in_family(name: str, spec: Method | None = None) -> list[pytest.MarkDecorator]:
    """Marks of a parameter that is a method: `--quick` runs one of each family, and a GAN takes
    many seconds.

    name: of the parameter. spec: the method; by default that of this name.
    """
    spec = spec or SPECS[name]
    strategy = parse_run(settings_of(spec)).plan.combination.strategy
    return [pytest.mark.slow if spec.adversarial else pytest.mark.family(strategy, name)]


def cases(methods: Mapping[str, Method]) -> list[Any]:
    """Methods by name as parameters of a test that runs them."""
    return [
        pytest.param(each, id=name, marks=in_family(name, each)) for name, each in methods.items()
    ]
