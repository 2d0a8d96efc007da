"""One model from heads of sites with different classes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded

CLASSES = ("a", "b", "c")


def head(
    site: str, classes: tuple[str, ...], weight: Tensor, bias: Tensor, records: int
) -> Parameters:
    tensors = {
        "weight": weight,
        "bias": bias,
        "mean": torch.zeros(weight.shape[1]),
        "deviation": torch.ones(weight.shape[1]),
    }
    return Parameters(Header("average", "r", site, "f", classes), 1, tensors, records)


def model(method: str, *heads: Parameters) -> object:
    run = parse_run({"method": method, "head.min-steps": 600, "head.learning-rate": 0.05})
    return load(run.plan.combination.learn)(list(heads), CLASSES, run.settings, run.defence)


@pytest.mark.parametrize("method", ["ensemble", "average"])
def test_a_head_of_zeros_from_a_site_with_one_class_is_read(method: str) -> None:
    """Zeros are left out of a message, so it has far fewer bytes than numbers."""
    run = parse_run({"method": method})
    zeros = head("3", ("b",), torch.zeros(1, 2048), torch.zeros(1), 30)
    tensors = {name: zeros.tensors[name] for name in ("weight", "bias")}
    header = replace(zeros.header, method=method, run=run.digest)
    payload = pack_parameters(replace(zeros, header=header, tensors=tensors))
    sent = stored_strategy(run)(run, Unrecorded()).unpack(payload)
    assert len(payload) < sent.tensors["weight"].numel() == 2048


@pytest.mark.parametrize("method", ["fedbe", "fedkt"])
def test_a_distilled_head_says_what_its_teachers_say(method: str) -> None:
    weight = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0]])
    teachers = [head(str(i), CLASSES, weight + 0.1 * i, torch.zeros(3), 20) for i in range(3)]
    found = model(method, *teachers)
    assert isinstance(found, Head)
    x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    agreed = found.predict(x) == (x @ (weight + 0.1).T).argmax(1)
    assert float(agreed.float().mean()) > 0.9
