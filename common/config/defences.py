"""Which defence against hostile sites a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.run_config import RunConfig


def resolved(config: RunConfig) -> str:
    """What "auto" stands for: the method's default where it is defined, else "none"."""
    if config.defence != "auto":
        return config.defence
    default = config.spec.default_defence
    return default if default in config.spec.defences(config) else "none"


def refusal(config: RunConfig) -> str:
    """Why a defence is not defined for a method, and what is; empty where it is."""
    spec = config.spec
    allowed = ("auto", *spec.defences(config))
    if config.defence in allowed:
        return ""
    why = spec.undefended
    if config.mechanism in ("dp-em", "theorem-4.1"):
        why = why or f" under {config.mechanism}, which does not state its noise"
    use = " or ".join(map(repr, allowed))
    return f"defence = {config.defence!r} is not defined for method = {spec.name!r}{why}; use {use}"
