"""Every test begins with the same generator, so that none depends on which ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_beginning() -> None:
    torch.manual_seed(0)
