"""Partitioners of flwr-datasets by their names, so that a simulation has the sites of a published one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.settings.partition import NamedPartitioner

LABEL, SITE = "label", "site"
"""Columns of the table that a partitioner gets: the class, and the value of the site column."""


def named_parts(
    wanted: NamedPartitioner,
    labels: Tensor,
    origin: Sequence[str] | None,
    seed: int,
    num_sites: int,
) -> list[Tensor]:
    """Distribute records as a partitioner of flwr-datasets does.

    Its arguments are those of the library. Left out, `num_partitions` is the number of sites,
    `partition_by` the class, and `seed` the run's.

    Args:
        wanted: The partitioner.
        labels: (n,) int64, in the order of the training records.
        origin: Value of the site column per record, which is the column "site"; None without one.
        seed: Of the run.
        num_sites: Number of sites.

    Returns:
        For each site indices into `labels`, in the library's order.

    Raises:
        PackageError: flwr-datasets is not installed.
        ConfigError: There is no such partitioner, or its arguments do not fit.
        DataError: It cannot distribute these records.
    """
    setting = f"partition = 'flwr:{wanted.name}'"
    with needed_for(setting):
        from flwr_datasets import partitioner as library

    kind: Any = getattr(library, wanted.name, None)
    if not (inspect.isclass(kind) and issubclass(kind, library.Partitioner)):
        known = sorted(each for each in library.__all__ if each.endswith("Partitioner"))
        raise ConfigError(f"{setting}: flwr-datasets has no such partitioner; {', '.join(known)}")
    # Of the package `datasets`, which the library needs.
    table: Any = inspect.getmodule(library.Partitioner)
    takes = inspect.signature(kind).parameters
    left_out = {"num_partitions": num_sites, "partition_by": LABEL, "seed": seed}
    arguments: dict[str, object] = {
        name: value for name, value in left_out.items() if name in takes
    }
    columns: dict[str, Sequence[object]] = {LABEL: labels.tolist(), "index": range(len(labels))}
    if origin is not None:
        columns[SITE] = list(origin)
    try:
        made: Any = kind(**{**arguments, **wanted.arguments})
        made.dataset = table.Dataset.from_dict({name: list(each) for name, each in columns.items()})
        count = made.num_partitions
        parts = [torch.tensor(made.load_partition(each)["index"]) for each in range(count)]
    except TypeError as error:
        names = ", ".join(takes)
        raise ConfigError(f"{setting}: {error}; its arguments are {names}") from None
    except (ValueError, KeyError, NotImplementedError, AttributeError) as error:
        raise DataError(
            f"{setting} cannot distribute {len(labels)} records ({error}); change its arguments or the "
            "number of sites"
        ) from None
    if count != num_sites:
        raise ConfigError(
            f"{setting} makes {count} parts, but there are {num_sites} sites; run with {count}"
        )
    return [part.to(torch.int64) for part in parts]
