"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module

import pytest
import torch

import fedsurrogate as fs
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import load
from tests.imports import modules

WITH_EXAMPLES = sorted(name for name, path in modules().items() if ">>> " in path.read_text())
# Public types and functions that a reader meets first: each has an example.
FIRST_MET = {
    "fedsurrogate.common.methods.sums.class_sums_plan",
    "fedsurrogate.common.privacy.accounting.epsilon_spent",
    "fedsurrogate.common.privacy.gaussian_mechanism.clip",
    "fedsurrogate.common.privacy.mechanism.Mechanism",
    "fedsurrogate.common.run.Run",
    "fedsurrogate.common.settings.settings.Settings",
    "fedsurrogate.strategies.closed_form.statistics.Statistics",
    "fedsurrogate._surrogate.fit",
    "fedsurrogate._surrogate.learn",
}


def examples(module: str) -> list[doctest.DocTest]:
    """The docstrings of a module that have examples."""
    return [each for each in doctest.DocTestFinder().find(import_module(module)) if each.examples]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_give_what_they_show(module: str) -> None:
    # Each begins anew, and none changes what another test draws.
    with torch.random.fork_rng():
        for each in examples(module):
            printed: list[str] = []
            outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
                each, out=printed.append
            )
            assert not outcome.failed, "".join(printed)


def test_every_public_function_and_every_strategy_has_an_example() -> None:
    public = [getattr(fs, name) for name in fs.__all__]
    functions = [each for each in public if inspect.isfunction(each)]
    classes = [each for each in public if inspect.isclass(each) and not issubclass(each, Exception)]
    strategies = {load(method.usual.combination.strategy) for method in METHODS.values()}
    assert len(functions) > 10
    assert len(strategies) > 7
    # A model of a signed file needs the file: tutorials make it.
    wanted = [*functions, *(set(classes) - {fs.ImageModel}), *strategies]
    without = [each.__name__ for each in wanted if ">>> " not in (each.__doc__ or "")]
    assert not without


@pytest.mark.parametrize("name", sorted(FIRST_MET))
def test_what_a_reader_meets_first_has_an_example(name: str) -> None:
    module = name.rpartition(".")[0]
    assert name in {each.name for each in examples(module)}
