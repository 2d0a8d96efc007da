"""One model from heads of sites with different classes."""

import pytest
import torch

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded


@pytest.mark.parametrize("method", ["ensemble", "average"])
def test_a_head_of_zeros_from_a_site_with_one_class_is_read(method: str) -> None:
    """Zeros are left out of a message, so it has far fewer bytes than numbers."""
    run = parse_run({"method": method})
    header = Header(method, run.digest, "3", "f", ("b",))
    tensors = {"weight": torch.zeros(1, 2048), "bias": torch.zeros(1)}
    payload = pack_parameters(Parameters(header, 1, tensors, 30))
    sent = stored_strategy(run)(run, Unrecorded()).unpack(payload)
    assert len(payload) < sent.tensors["weight"].numel() == 2048
