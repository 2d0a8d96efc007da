"""Aggregation of updates into a model, compared with values computed by hand, to float precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.fedavg import aggregate, fresh_memory
from fedsurrogate.strategies.pooling.site_weights import robust_mean

HEADER = Header("fedavg", "r", "s", "f", ("a", "b"))


def update(records: int, **tensors: Tensor) -> Parameters:
    return Parameters(
        HEADER, 1, {name.replace("_", "."): tensor for name, tensor in tensors.items()}, records
    )


def run(method: str, **settings: Any) -> Any:
    return parse_run({"method": method} | settings)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedsgd", "dsfl", "fedlambda"])
def test_the_model_moves_by_the_mean_weighed_by_records(method: str) -> None:
    model = {"w": torch.tensor([1.0, 2.0])}
    updates = [update(30, w=torch.tensor([1.0, 0.0])), update(10, w=torch.tensor([0.0, 4.0]))]
    new, memory = aggregate(run(method), model, updates, {}, 2)
    assert torch.allclose(new["w"], torch.tensor([1.75, 3.0]))
    assert new["w"].dtype == torch.float32
    assert memory == {}


def test_private_updates_weigh_alike() -> None:
    new, _ = aggregate(
        run("fedavg"),
        {"w": torch.zeros(1)},
        [update(0, w=torch.ones(1)), update(0, w=3 * torch.ones(1))],
        {},
        2,
    )
    assert float(new["w"]) == 2


def test_many_small_updates_do_not_lose_their_mean() -> None:
    """In half precision, thirty times a thirtieth gives 0.997."""
    new, _ = aggregate(
        run("fedavg"),
        {"w": torch.ones(1)},
        [update(1, w=torch.full((1,), 1e-4)) for _ in range(30)],
        {},
        30,
    )
    assert float(new["w"]) == pytest.approx(1.0001, abs=1e-6)


def test_fedyogi_takes_the_steps_computed_by_hand() -> None:
    config = run("fedyogi", **{"fedavg.server-learning-rate": 0.5})
    model: dict[str, Tensor] = {"w": torch.tensor([1.0, -2.0])}
    memory: dict[str, Tensor] = {}
    first, second, expected = torch.zeros(2), torch.zeros(2), model["w"].clone()
    for moved in ([[0.2, -0.4], [0.0, 0.2]], [[-0.3, 0.1], [0.1, 0.1]], [[0.01, 0.0], [0.0, 0.0]]):
        deltas = torch.tensor(moved)
        model, memory = aggregate(
            config, model, [update(3, w=deltas[0]), update(1, w=deltas[1])], memory, 2
        )
        mean = 0.75 * deltas[0] + 0.25 * deltas[1]
        first = 0.9 * first + 0.1 * mean
        second = second - 0.01 * mean**2 * torch.sign(second - mean**2)
        expected = expected + 0.5 * first / (second.sqrt() + 1e-3)
        assert torch.allclose(model["w"], expected, atol=1e-5)


def test_scaffolds_control_moves_by_the_sum_over_all_sites() -> None:
    config, model = run("scaffold"), {"w": torch.zeros(2)}
    memory = fresh_memory(config.plan.messages.sends, model)
    updates = [
        update(1, w=torch.zeros(2), control_w=torch.tensor([1.0, 0.0])),
        update(9, w=torch.zeros(2), control_w=torch.tensor([0.0, 3.0])),
    ]
    _, memory = aggregate(config, model, updates, memory, sites=4)
    assert torch.allclose(memory[CONTROL + "w"], torch.tensor([0.25, 0.75]))


@pytest.mark.parametrize("rule", ["median", "trimmed"])
@pytest.mark.parametrize("sites", [3, 6])
def test_a_robust_control_counts_as_that_of_each_site(rule: str, sites: int) -> None:
    config, model = run("scaffold", defence=rule), {"w": torch.zeros(2)}
    memory = {CONTROL + "w": torch.tensor([1.0, -1.0])}
    controls = ([1.0, 0.0], [2.0, 3.0], [900.0, 3.5])
    updates = [update(1, w=torch.zeros(2), control_w=torch.tensor(control)) for control in controls]
    robust = robust_mean(torch.tensor(controls).double(), torch.ones(3), rule)
    _, found = aggregate(config, model, updates, memory, sites)
    wanted = torch.tensor([1.0, -1.0]).double() + 3 * robust / sites
    assert torch.allclose(found[CONTROL + "w"].double(), wanted)
    if rule == "median":
        assert robust.tolist() == [2.0, 3.0]
