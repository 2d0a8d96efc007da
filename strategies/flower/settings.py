"""Settings that a strategy accepts: a parsed configuration, Flower's flat run-config, or none."""

from __future__ import annotations

from collections.abc import Mapping

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.flat import Scalar

Settings = Run | Mapping[str, Scalar] | None


def settings_of(strategy: type, given: Settings) -> Run:
    """The configuration of a run with a strategy.

    Args:
        strategy: its class.
        given: a parsed configuration, Flower's flat run-config, or None. Without `method`, the
            settings are for the first method in the registry that the strategy runs.

    Raises:
        ConfigError: for invalid settings, or a method that another strategy runs.
    """
    if isinstance(given, Run):
        config = given
    else:
        own = [
            name
            for name, method in METHODS.items()
            if issubclass(strategy, load(method.usual.combination.strategy))
        ]
        config = parse_run({**({"method": own[0]} if own else {}), **(given or {})})
    runs: type = load(config.plan.combination.strategy)
    # A chain's surrogates are learned from again as those of a star.
    again: type = load(config.method.usual.combination.strategy)
    if not issubclass(strategy, (runs, again) if config.plan.kind == "chain" else runs):
        raise ConfigError(
            f"method = {config.settings.method!r} is run by {runs.__name__}, not by "
            f"{strategy.__name__}"
        )
    return config
