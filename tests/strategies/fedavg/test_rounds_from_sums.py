"""A round from secure aggregation does what the round from separate replies does, over generated updates;
the step along noisy gradients is the one that its formula says.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import absorb_total, aggregate
from fedsurrogate.strategies.pooling.site_weights import Total, weight_of

HEADER = Header("fedavg", "r", "s", "f", ("a", "b"))
SUMMED: dict[str, Any] = {
    "secure-aggregation": True,
    "sites": 9,
    "classes": "a,b",
    "fedavg.model": "linear",
}


def training(run: Run, inputs: int = 3) -> Training:
    return Training.begin(run, ("a", "b"), "f", inputs)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


@settings(max_examples=15)
@given(
    records=st.lists(st.integers(1, 500), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    method=st.sampled_from(["fedavg", "fedprox", "fedyogi"]),
)
def test_the_sum_of_weighted_updates_moves_the_model_as_the_updates_do(
    records: list[int], seed: int, method: str
) -> None:
    run = parse_run(SUMMED | {"method": method})
    one, two = training(run), training(run)
    generator = torch.Generator().manual_seed(seed)
    updates = [
        Parameters(HEADER, 1, {k: torch.randn(v.shape, generator=generator) for k, v in one.model.items()}, n)
        for n in records
    ]  # fmt: skip
    summed = sum(each.records * flat(dict(each.tensors)) for each in updates)
    assert isinstance(summed, Tensor)
    total = Total(HEADER, {"update": summed, "records": torch.tensor([float(sum(records))])})
    names = [f"s{number}" for number in range(len(records))]
    absorb_total(total, one, names)
    wanted, _ = aggregate(run, two.model, updates, two.memory, len(records))
    for name, tensor in wanted.items():
        torch.testing.assert_close(one.model[name], tensor, rtol=1e-4, atol=1e-5)
    assert one.round == 1
    assert set(one.confirmed) == set(names)
    for wrong, why in ((0, "no site"), (-3, "-3 records")):
        bad = Total(HEADER, dict(total.tensors) | {"records": torch.tensor([float(wrong)])})
        with pytest.raises(RunError, match=why):
            absorb_total(bad, training(run), names)


@settings(max_examples=20)
@given(
    steps=st.lists(
        st.tuples(st.floats(-20, 400), st.floats(0, 2), st.integers(0, 99)), min_size=1, max_size=4
    ),
    sigmas=st.tuples(st.sampled_from([0.1, 5.0, 40.0]), st.sampled_from([0.1, 2.0, 20.0])),
)
@example(steps=[(1.0, 0.5, 1), (400.0, 0.9, 2)], sigmas=(5.0, 0.1))
def test_a_step_follows_the_mean_of_noisy_gradients_with_momentum(
    steps: list[tuple[float, float, int]], sigmas: tuple[float, float]
) -> None:
    """In double precision and by hand: the mean number of records so far, at least its noise; a
    mean that is no longer than one and the noise; momentum 0.9; the bias at a tenth of the rate.
    """
    run = parse_run(SUMMED | {"method": "dp-fedavg", "epsilon": 4.0, "delta": 1e-5})
    assert run.mechanism is not None
    assert run.mechanism.name == DISTRIBUTED_SUMS
    found, clip = training(run), run.mechanism.clip
    weights = flat(dict(found.model))
    size, counted, velocity = len(weights), 0.0, torch.zeros_like(weights)
    rate = run.settings.fedavg.distributed_rate(2)
    slow = flat(
        {k: torch.full_like(v, 0.1 if k == "bias" else 1.0) for k, v in found.model.items()}
    )
    for number, (records, length, seed) in enumerate(steps, 1):
        generator = torch.Generator().manual_seed(seed)
        gradients = torch.randn(size, generator=generator).double()
        # Some are longer than records can have; with the noise, not more than the check allows.
        gradients *= length * max(records, 1.0) / gradients.norm()
        total = Total(
            HEADER,
            {"gradients": gradients, "records": torch.tensor([records]).double()},
            {"gradients": sigmas[0], "records": sigmas[1]},
            run.mechanism,
        )
        before = found.round
        try:
            absorb_total(total, found, ["a", "b"])
        except RunError as error:
            above = records < 0 or length > 1
            assert above, error  # noqa: PT017 - the other branch goes on
            assert found.round == before
            return
        assert records > -7 * sigmas[1]
        assert length * max(records, 1.0) < max(records, 0.0) + 30 * (sum(sigmas) + 1)
        counted += records
        mean_records = max(counted / number, sigmas[1] / math.sqrt(number), 1.0)
        longest = mean_records + sigmas[0] * (math.sqrt(size) + 6)
        norm = float(gradients.norm())
        mean = gradients * clip / mean_records * min(1.0, longest / max(norm, 1e-12))
        velocity = 0.9 * velocity + mean
        weights = weights - slow * rate * velocity
        scale = float(weights.abs().max()) + 1
        torch.testing.assert_close(flat(dict(found.model)), weights, rtol=1e-3, atol=1e-4 * scale)


@given(
    sites=st.integers(1, 50), each=st.sampled_from([0.0, 1.0, 250.0]), records=st.integers(0, 99)
)
@settings(max_examples=40)
def test_a_weight_that_is_public_is_no_sites_to_change(
    sites: int, each: float, records: int
) -> None:
    total = Total(HEADER, {"records": torch.tensor([records + 0.3, 0.1])})
    if each:
        assert weight_of(total, sites, each) == sites * each
    elif not records:
        with pytest.raises(RunError, match="no site of the secure aggregation"):
            weight_of(total, sites)
    else:
        assert weight_of(total, sites) == records
