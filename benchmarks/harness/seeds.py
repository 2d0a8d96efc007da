"""Rows of a table measured over seeds, and their mean and scatter."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich.progress import track

Data = TypeVar("Data")
Row = TypeVar("Row")
Result = TypeVar("Result")


def over_seeds(
    seeds: int,
    load: Callable[[int], Data],
    rows: Mapping[str, Row] | Callable[[Data], Mapping[str, Row]],
    measure: Callable[[int, Data, Row], Result],
) -> dict[str, list[Result]]:
    """Measure every row at every seed; the rows of a seed share its data.

    Args:
        seeds: how many, from zero.
        load: the data of a seed.
        rows: what is measured, such as settings, by the row's name; or a function of a seed's
            data that gives it.
        measure: the result of a seed, its data and a row.

    Returns:
        Results in the order of the seeds, by the row's name.

    Example:
        >>> rows = {"plus": 1, "minus": -1}
        >>> over_seeds(2, lambda seed: 10 * seed, rows, lambda seed, data, row: data + row)
        ... # doctest: +ELLIPSIS
        seed 0 ...
        {'plus': [1, 11], 'minus': [-1, 9]}
    """
    results: dict[str, list[Result]] = defaultdict(list)
    for seed in range(seeds):
        data = load(seed)
        named = rows(data) if callable(rows) else rows
        for name, row in track(named.items(), description=f"seed {seed}"):
            results[name].append(measure(seed, data, row))
    return dict(results)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation as a table cell.

    Example:
        >>> mean_and_deviation([70.0, 72.0])
        '71.00 ± 1.00'
    """
    return f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}"


def frontier_row(
    name: str,
    accuracies: Sequence[float],
    oracle: float,
    sizes: Sequence[float],
    scale: float = 1.0,
) -> tuple[Any, ...]:
    """A row of accuracy against bytes.

    Args:
        name: of the row.
        accuracies: one for each seed, in percent, or a share with `scale` 100.
        oracle: the accuracy of a head on all real features, in the same unit.
        sizes: bytes that all sites send, one for each seed.
        scale: what the accuracies are multiplied with.

    Returns:
        Name, mean and standard deviation of the accuracy in percent, mean difference to the oracle
        in points, MB.

    Example:
        >>> frontier_row("diag", [0.70, 0.72], 0.75, [1e6, 2e6], scale=100)
        ('diag', 71.0, 1.0, -4.0, 1.5)
    """
    middle = statistics.mean(accuracies)
    return (
        name,
        round(scale * middle, 2),
        round(scale * statistics.pstdev(accuracies), 2),
        round(scale * (middle - oracle), 2),
        round(statistics.mean(sizes) / 1e6, 3),
    )
