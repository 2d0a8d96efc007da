"""How records are distributed to simulated sites: a way of our own, or a partitioner of flwr-datasets by
its name.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

OWN = ("iid", "dirichlet", "classes", "column")
PREFIX = "flwr:"
LONGEST = 500
FORM = (
    "one of iid, dirichlet, classes and column, or a partitioner of flwr-datasets, such as "
    "flwr:DirichletPartitioner(alpha=0.3, min_partition_size=5)"
)


@dataclass(frozen=True)
class NamedPartitioner:
    """A partitioner of flwr-datasets.

    Attributes:
        name: Of its class.
        arguments: By name; those that a person gives.
    """

    name: str
    arguments: Mapping[str, object]


def read_partitioner(text: str) -> NamedPartitioner | None:
    """The partitioner of flwr-datasets that a setting names.

    Args:
        text: A way of `OWN`, or `PREFIX` and a name, with or without arguments in brackets. Values are
            numbers, texts, truth values, and lists of them.

    Returns:
        The partitioner; None for a way of our own.

    Raises:
        ValueError: For any other text.

    Example:
        >>> read_partitioner("flwr:DirichletPartitioner(alpha=0.3)")
        NamedPartitioner(name='DirichletPartitioner', arguments={'alpha': 0.3})
    """
    if text in OWN:
        return None
    try:
        if not text.startswith(PREFIX) or len(text) > LONGEST:
            raise ValueError
        named = ast.parse(text.removeprefix(PREFIX).strip(), mode="eval").body
        call = named if isinstance(named, ast.Call) else ast.Call(named, [], [])
        if not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        if any(each.arg is None for each in call.keywords) or len(arguments) < len(call.keywords):
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"must be {FORM}") from None
    return NamedPartitioner(call.func.id, arguments)


def _checked(text: str) -> str:
    read_partitioner(text)
    return text


Partition = Annotated[str, AfterValidator(_checked)]
