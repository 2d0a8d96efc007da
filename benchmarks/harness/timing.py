"""Seconds of pieces of work that are run in turn, and memory of this process."""

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Work = Callable[[], Any]
Clock = Callable[[], float]


def peak() -> float:
    """Largest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def in_turn(
    works: Mapping[str, Work], repeats: int, warm: int = 0, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each piece of work. Each repeat runs all, so that drift of the machine meets all.

    Args:
        works: pieces of work, by name.
        repeats: how often each is timed.
        warm: repeats before these, which are not timed.
        clock: wall time, or `time.process_time` where other processes share the machine.

    Returns:
        `repeats` seconds for each name.

    Example:
        >>> [len(seconds) for seconds in in_turn({"one": list, "two": dict}, repeats=3).values()]
        [3, 3]
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + warm):
        for name, work in works.items():
            started = clock()
            work()
            seconds = clock() - started
            if repeat >= warm:
                times[name].append(seconds)
    return times


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of two pieces of work in the same turn.

    Example:
        >>> ratio([2.0, 6.0, 4.0], [1.0, 2.0, 1.0])
        3.0
    """
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def paired(
    ours: Work,
    theirs: Work,
    repeats: int = 3,
    clock: Clock = time.perf_counter,
) -> tuple[float, float, float]:
    """Median seconds of both, run in turn, and the median of the ratios theirs / ours.

    Args:
        ours: our piece of work.
        theirs: the peer's.
        repeats: how often each is timed.
        clock: wall time, or `time.process_time` where other processes share the machine.
    """
    times = in_turn({"ours": ours, "theirs": theirs}, repeats, clock=clock)
    mine, peer = times.values()
    return statistics.median(mine), statistics.median(peer), ratio(peer, mine)
