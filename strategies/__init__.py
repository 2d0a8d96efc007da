"""Flower strategies, one per way to run. Each separates message collection from `learn`, which has
no Flower types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import RunError

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedsurrogate.common.methods.method import Plan
    from fedsurrogate.common.run import Run

    from .base.federation import Federation
    from .base.one_shot import OneShot

# Imported on first use, as the registry of methods is: the mathematics of the methods also runs on
# a machine without Flower and without pydantic, which the settings need.
LAZY = {
    "Grid": "flwr.serverapp:Grid",
    "Federation": "fedsurrogate.strategies.base.federation:Federation",
    "OneShot": "fedsurrogate.strategies.base.one_shot:OneShot",
}


def strategy_of(plan: Plan) -> type[Federation]:
    """The strategy class that a run's plan names."""
    from fedsurrogate.common.methods.method import load

    strategy: type[Federation] = load(plan.combination.strategy)
    return strategy


def stored_strategy(config: Run) -> type[OneShot[Any]]:
    """The strategy class that learns again from stored replies.

    Args:
        config: of the run whose replies are stored.

    Raises:
        RunError: for a method that stores none.
    """
    from fedsurrogate.common.methods.method import load

    usual = config.plan.combination
    if config.plan.kind == "chain":
        # A chain's surrogates are learned from again as those of a star.
        usual = config.method.usual.combination
    if not usual.stored:
        raise RunError(
            f"method = {config.settings.method!r} stores no replies to learn from again; start a "
            "new run instead"
        )
    strategy: type[OneShot[Any]] = load(usual.strategy)
    return strategy


def __getattr__(name: str) -> type[Any]:
    """Import a strategy of the registry, such as FedPFT, FedLAP or DPCVAE, or a base class, on its
    first use.
    """
    from fedsurrogate.common.methods import METHODS
    from fedsurrogate.common.methods.method import load

    if name in LAZY:
        imported: type[Any] = load(LAZY[name])
        return imported
    for method in METHODS.values():
        target = method.usual.combination.strategy
        if target.endswith(f":{name}"):
            strategy: type[Federation] = load(target)
            return strategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Federation", "Grid", "OneShot", "stored_strategy", "strategy_of"]
