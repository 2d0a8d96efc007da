"""Every test begins with the same generator, so that none depends on which ran before it; the longest lie far apart."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_beginning() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the tests that take minutes over the others: processes that run the suite together each get some."""
    long = [item for item in items if item.path.name == "test_long_deployment.py"]
    if len(long) == len(items):
        return
    items[:] = [item for item in items if item not in long]
    for number, item in enumerate(long):
        items.insert(number * len(items) // len(long), item)
