"""One Flower strategy per way to run: collection on one side, `learn` (no Flower types) on the other."""

from typing import Any

from flwr.serverapp import Grid

from common.config.run_config import RunConfig
from common.errors import RunError
from common.methods import METHODS, method_named
from common.rules.spec import load
from strategies.base.federation import Federation
from strategies.base.one_shot import OneShot


def strategy_of(config: RunConfig) -> type[Federation]:
    """The strategy of a run's method, as the registry names it."""
    strategy: type[Federation] = load(config.spec.strategy)
    return strategy


def stored_strategy(config: RunConfig) -> type[OneShot[Any]]:
    """What learns again from what sites of such a run have sent. Raises RunError for a method that keeps nothing."""
    spec = method_named(config.method)
    if not spec.stored:
        raise RunError(f"method = {config.method!r} keeps nothing that sites have sent; run it again instead")
    strategy: type[OneShot[Any]] = load(spec.strategy)
    return strategy


def __getattr__(name: str) -> type[Federation]:
    """The strategies that the registry names, such as FedPFT, FedLAP and DPCVAE, imported when they are first used."""
    for spec in METHODS.values():
        if spec.strategy.endswith(f":{name}"):
            strategy: type[Federation] = load(spec.strategy)
            return strategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Federation", "Grid", "OneShot", "stored_strategy", "strategy_of"]
