"""Which defence against hostile sites is defined for which method, and which is the default."""

from __future__ import annotations

ALL = ("none", "median", "trimmed", "screen")


def possible(method: str, topology: str, mechanism: str) -> tuple[str, ...]:
    """What `defence` can be for a method, beside "auto"."""
    if method in ("fedlap", "kd", "local") or (method == "fedpft" and topology == "chain"):
        return ("none",)
    if method in ("ensemble", "fedkt", "dsfl"):
        # Probabilities and votes have no median of parameters; of sparse updates it would be zero nearly everywhere.
        return ("none", "screen")
    if mechanism in ("dp-em", "theorem-4.1"):
        # How noisy these mixtures are is not stated, so nobody can say what is beyond chance.
        return ("none", "median", "trimmed")
    return ALL


def resolved(defence: str, method: str, topology: str, mechanism: str) -> str:
    """What "auto" stands for: "screen" for the mixtures and noisy sums of fedpft, else "none"."""
    if defence != "auto":
        return defence
    return "screen" if method == "fedpft" and "screen" in possible(method, topology, mechanism) else "none"


def refusal(defence: str, method: str, topology: str, mechanism: str) -> str:
    """Why a defence is not defined there, and what is; empty where it is."""
    allowed = ("auto", *possible(method, topology, mechanism))
    if defence in allowed:
        return ""
    why = {
        "fedlap": ", whose synthetic images nothing here screens; max-share and fedlap.rule limit a site",
        "kd": ", a chain in which each site builds on the one before",
        "local": ", which combines nothing",
    }
    chain = " in a chain, where each site builds on the one before" if topology == "chain" else ""
    private = f" under {mechanism}, which does not state its noise" if mechanism in ("dp-em", "theorem-4.1") else ""
    text = why.get(method, chain or private)
    return f"defence = {defence!r} is not defined for method = {method!r}{text}; use {' or '.join(map(repr, allowed))}"
