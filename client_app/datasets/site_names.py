"""Names of simulated sites that the run's data name: hospitals in a column."""

from __future__ import annotations

from collections.abc import Mapping

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.run import kept_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.wire.tensors import is_name

from ..node_config import NodeConfig
from .dataset import DataSource, load_all

# Of the last runs, by Flower's number: each request would read the data for them.
_NAMES: dict[str, tuple[str, ...]] = {}
MOST_KEPT = 4


def named_site(node: NodeConfig, run_config: Mapping[str, Scalar], flower_run: str) -> str:
    """The name that the data give a simulated site; empty where they give none.

    Args:
        node: the site's settings.
        run_config: the run's settings, flat.
        flower_run: id of the run.
    """
    by_column = run_config.get("partition") == "column"
    if node.site or node.data or node.num_partitions < 2 or not by_column:
        return ""
    if flower_run not in _NAMES:
        if len(_NAMES) >= MOST_KEPT:
            _NAMES.clear()
        try:
            _NAMES[flower_run] = _names(run_config)
        except FedSurrogateError:
            # What is wrong with the data is said where they are used.
            return ""
    names = _NAMES[flower_run]
    return names[node.partition_id] if len(names) == node.num_partitions else ""


def _names(run_config: Mapping[str, Scalar]) -> tuple[str, ...]:
    """In the order in which sites are numbered."""
    run = kept_run(run_config)
    dataset, *others = load_all(DataSource.of_run(run.settings, run.target), run.settings.seed)
    if others or dataset.origin is None:
        return ()
    pairs = zip(dataset.origin, dataset.is_train.tolist(), strict=True)
    names = tuple(sorted({name for name, trains in pairs if trains}))
    return names if all(map(is_name, names)) else ()
