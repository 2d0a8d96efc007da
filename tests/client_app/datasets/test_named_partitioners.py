"""Partitioners of flwr-datasets by their names: the library's own parts are the oracle."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
from datasets import Dataset
from flwr_datasets import partitioner as library
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets import partition as module
from fedsurrogate.client_app.datasets.partition import partition
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.heads import OWN, read_partitioner

KINDS = {
    "flwr:IidPartitioner": lambda n, seed: library.IidPartitioner(n),
    "flwr:LinearPartitioner()": lambda n, seed: library.LinearPartitioner(n),
    "flwr:DirichletPartitioner(alpha=0.5, min_partition_size=0)": lambda n, seed: (
        library.DirichletPartitioner(n, "label", 0.5, min_partition_size=0, seed=seed)
    ),
    "flwr:PathologicalPartitioner(num_classes_per_partition=2, seed=5)": lambda n, seed: (
        library.PathologicalPartitioner(n, "label", 2, seed=5)
    ),
    "flwr:ShardPartitioner(num_shards_per_partition=2)": lambda n, seed: library.ShardPartitioner(
        n, "label", 2, seed=seed
    ),
}


def parts_of(text: str, labels: torch.Tensor, sites: int, seed: int = 0) -> list[list[int]]:
    """Indices of each site, as a run has them."""
    run = parse_run({"partition": text, "seed": seed})
    module._PARTS.clear()
    return [part.tolist() for part in partition(labels, None, run.settings, sites)]


@pytest.mark.parametrize("text", KINDS)
@given(seed=st.integers(0, 2**16), sites=st.integers(2, 5), classes=st.integers(3, 6))
@settings(max_examples=8, deadline=None)
def test_parts_are_those_of_the_library(text: str, seed: int, sites: int, classes: int) -> None:
    drawn = np.random.default_rng(seed).permutation(np.arange(200) % classes)
    oracle = KINDS[text](sites, seed)
    oracle.dataset = Dataset.from_dict({"label": drawn.tolist(), "at": list(range(200))})
    expected = [sorted(oracle.load_partition(each)["at"]) for each in range(sites)]
    assert parts_of(text, torch.from_numpy(drawn), sites, seed) == expected


def test_records_follow_the_site_column_where_a_partitioner_names_it() -> None:
    text = 'flwr:NaturalIdPartitioner(partition_by="site")'
    run = parse_run({"partition": text, "site-column": "hospital"})
    origin = ["north", "south", "south", "east", "north"]
    parts = partition(torch.zeros(5, dtype=torch.int64), origin, run.settings, 3)
    assert sorted(part.tolist() for part in parts) == [[0, 4], [1, 2], [3]]


@pytest.mark.parametrize("text", OWN)
def test_own_ways_name_no_partitioner(text: str) -> None:
    assert read_partitioner(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "even", "flwr:", "flwr:1", "flwr:a.b()", "flwr:A(1)", "flwr:A(**{})", "flwr:A(x=open('y'))",
        "flwr:A(x=y)", "flwr:A(x=1", "flwr:A(x=1);B()", "flwr:" + "(" * 400, "flwr:A(x='" + "y" * 600 + "')",
        "flwr:DirichletPartitioner(alpha=[0.7] * 2)", "flwr:A(x=1, x=2)",
    ],
)  # fmt: skip
def test_a_text_that_names_no_partitioner_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(ConfigError, match="such as flwr:DirichletPartitioner"):
        parse_run({"partition": text})


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ValueError):
        found = read_partitioner(f"flwr:{text}")
        assert found is not None
        assert found.name.isidentifier()


LABELS = torch.arange(60) % 3


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("flwr:NoPartitioner()", ConfigError, "IidPartitioner"),
        ("flwr:DirichletPartitioner(beta=1)", ConfigError, "beta"),
        ("flwr:DirichletPartitioner", ConfigError, "alpha"),
        ("flwr:IidPartitioner(num_partitions=4)", ConfigError, "run with 4"),
        ("flwr:DirichletPartitioner(alpha=-1.0)", DataError, "greater than zero"),
        ("flwr:PathologicalPartitioner(num_classes_per_partition=9)", DataError, "9"),
        ("flwr:NaturalIdPartitioner(partition_by='site')", DataError, "site"),
    ],
)
def test_what_the_library_cannot_do_is_one_error_that_names_it(
    text: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        parts_of(text, LABELS, 3)
