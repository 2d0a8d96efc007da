"""What benchmarks share: results go on, seeds share data, works take turns, samples may be missing."""

import doctest
import importlib
import pkgutil

import pytest

from benchmarks import harness
from benchmarks.harness import federation
from fedsurrogate.common.run import parse_run

MODULES = [f"benchmarks.harness.{each.name}" for each in pkgutil.iter_modules(harness.__path__)]
SMALL = {"partition": "iid", "head.min-steps": 10, "head.epochs": 1}


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_harness_run(name: str) -> None:
    assert not doctest.testmod(importlib.import_module(name)).failed


def test_a_row_is_a_run_with_its_own_settings_and_none_is_the_head_on_all_records() -> None:
    rows = {"all": None, "diag": {"fedpft.covariance": "diag"}, "local": {"method": "local"}}
    measured = federation.run_rows(
        SMALL, rows, 2, lambda seed: federation.load_seed(SMALL, 2, seed)
    )
    assert {name: len(each) for name, each in measured.items()} == dict.fromkeys(rows, 2)
    for seed in range(2):
        data = federation.load_seed(SMALL, 2, seed)
        run = parse_run({**SMALL, "seed": seed, "fedpft.covariance": "diag"})
        alone = federation.federate(run, data)
        assert (measured["diag"][seed].accuracy, measured["diag"][seed].bytes) == (
            alone.accuracy,
            alone.bytes,
        )
        assert measured["all"][seed].bytes == 2 * data.sites[0].train.features.shape[1] * sum(
            data.sizes
        )
