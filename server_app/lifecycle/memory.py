"""Memory of a simulation: how many sites fit at the same time, and a refusal where none does."""

from __future__ import annotations

import math

import psutil

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.machine.memory import MIB, address_limit, available_memory

# Measured with the digits: proportional set sizes at their highest, rounded up.
# Flower's and Ray's processes (1.1 GiB) and this one; each site; all sites in this process.
FLOWER_MIB, SITE_MIB, LOCAL_MIB = 1450, 550, 550
# Share of the free memory that Ray reserves, as addresses only, for what its processes share.
RAY_STORE = 0.3


def fitting_sites(wanted: int) -> tuple[int, str]:
    """How many simulated sites may run at the same time under Flower's engine.

    Args:
        wanted: As many as cores and settings allow.

    Returns:
        At most `wanted`; and a remark, empty if it is `wanted`.

    Raises:
        RunError: Not even one site fits, counting the swap.
    """
    free = available_memory() / MIB
    if (fit := math.floor((free - FLOWER_MIB) / SITE_MIB)) >= wanted:
        return wanted, ""
    have = available_memory(swap=True) / MIB
    if have < FLOWER_MIB + SITE_MIB:
        raise RunError(
            f"not enough memory: {have:.0f} MiB are available, and a simulation by Flower's engine "
            f"needs about {FLOWER_MIB + SITE_MIB} MiB ({FLOWER_MIB} for its processes, {SITE_MIB} "
            "for each site at the same time); end other programs, raise the container's limit, or "
            f"use --engine local, which needs about {LOCAL_MIB} MiB"
        )
    fit = max(1, fit)
    return fit, (
        f"{free:.0f} MiB of memory are available, so {fit} of {wanted} sites run at the same time: "
        f"each needs about {SITE_MIB} MiB, beside {FLOWER_MIB} for the processes of Flower's engine"
    )


def check_local() -> None:
    """Raise RunError unless all sites fit into this process, one after the other. Memory that it
    has already counts.
    """
    have = available_memory(swap=True) / MIB + psutil.Process().memory_info().rss / MIB
    if have < LOCAL_MIB:
        raise RunError(
            f"not enough memory: {have:.0f} MiB are available, and a simulation with --engine "
            f"local needs about {LOCAL_MIB} MiB; end other programs, or raise the container's limit"
        )


def check_addresses() -> None:
    """Raise RunError if `ulimit -v` leaves Flower's engine too few addresses. Call it when torch is
    loaded.

    A process of the simulation has torch's addresses, as this one, and Ray's shared memory.
    """
    limit = address_limit()
    if limit is None:
        return
    needed = psutil.Process().memory_info().vms + RAY_STORE * available_memory() + 2**30
    if limit < needed:
        raise RunError(
            f"this shell limits the addresses of a process to {limit // MIB} MiB (`ulimit -v` = "
            f"{limit // 1024}), and Flower's engine needs about {needed / MIB:.0f} MiB here; lift "
            "it with `ulimit -v unlimited`, or use --engine local"
        )
