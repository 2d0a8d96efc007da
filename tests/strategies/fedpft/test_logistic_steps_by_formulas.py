"""The logistic head at the coordinator by its formulas in numpy: what sites receive first, the centre, and
every step, for any noise.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import (
    LogisticStart,
    absorb_total,
    factor_of,
    head_of,
)
from fedsurrogate.strategies.pooling.site_weights import Total

C, D, STEPS = 3, 4, 3
CLIP, CONSTANT = 0.75, 0.25
LENGTH = math.sqrt(1 + CONSTANT**2)
few = settings(max_examples=30, deadline=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("public")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return logistic(folder, torch.rand(30, D, generator=torch.Generator().manual_seed(0)))


def logistic(folder: Path, public: torch.Tensor, **more: Any) -> Run:
    file = folder / f"public-{public.shape[1]}.safetensors"
    save_file({"x": public}, file)
    own: dict[str, Any] = {
        "head.solver": "logistic",
        "secure-aggregation": True,
        "classes": "a,b,c",
    }
    own |= {"epsilon": 8.0, "delta": 1e-5, "fedpft.public": str(file)}
    with pytest.MonkeyPatch.context() as patch:
        steps = "fedsurrogate.common.methods.logistic_rounds.STEPS"
        patch.setattr(steps, ((float("inf"), STEPS),))
        return parse_run(own | more)


def total(tensors: dict[str, Any], sigmas: dict[str, float]) -> Total:
    header = Header("fedpft", "r", "coordinator", "f", ("a", "b", "c"))
    return Total(header, {name: torch.tensor(own) for name, own in tensors.items()}, sigmas)


@few
@given(
    st.integers(0, 9999),
    st.sampled_from([(-3.0, 2.5), (0.2, 0.1), (1.5, 0.1), (1.5, 2.5), (40.0, 2.5)]),
    st.booleans(),
)
@example(1, (-3.0, 2.5), False)
@example(2, (0.2, 0.1), True)
@example(3, (40.0, 2.5), True)
def test_the_first_round_moves_the_centre_by_the_mean_of_at_least_one_record(
    run: Run, seed: int, counted: tuple[float, float], projected: bool
) -> None:
    records, sigma = counted
    draw = np.random.default_rng(seed)
    centre, bound = draw.normal(size=D), 3.5
    rows = draw.normal(size=(2, D)) if projected else np.eye(D)
    totals = 2 * draw.normal(size=len(rows))
    model = {"weight": np.zeros((C, len(rows))), "bias": np.zeros(C), "centre": centre}
    model |= {"bound": np.array([bound])} | ({"projection": rows} if projected else {})
    tensors = {name: torch.from_numpy(own).float() for name, own in model.items()}
    training = Training(run, ("a", "b", "c"), "f", D, tensors, {})
    absorb_total(
        total({"records": [records], "totals": totals}, {"records": sigma, "totals": 9.0}),
        training,
        ["x"],
    )
    number = max(records, sigma, 1.0)
    mean = totals / number
    shift = bound * mean / max(1.0, float(np.linalg.norm(mean)))
    moved = centre + (rows.T @ np.linalg.solve(rows @ rows.T, shift) if projected else shift)
    most = 1e-3 * float(np.abs(moved).max())
    np.testing.assert_allclose(training.model["centre"], moved, atol=most)
    assert training.memory["counted"].tolist() == pytest.approx([number, sigma])
    assert (training.round, len(training.history)) == (1, 0)
    assert training.model.keys() == tensors.keys()


@few
@given(st.integers(0, 9999), st.sampled_from([1.0, 30.0]), st.sampled_from([0.5, 20.0]))
def test_every_step_is_the_mean_of_all_that_steps_have_observed(
    run: Run, seed: int, records: float, sigma: float
) -> None:
    draw = np.random.default_rng(seed)
    tensors = {"weight": torch.zeros(C, D), "bias": torch.zeros(C), "centre": torch.zeros(D)}
    training = Training(run, ("a", "b", "c"), "f", D, tensors, {})
    training.memory = {"counted": torch.tensor([records, 0.3])}
    training.round = 1
    head, before = np.zeros((C, D + 1)), np.zeros((C, D + 1))
    late, noise_of_late = np.zeros(6), 0.0
    # Half of the second moment of a feature with its constant, whose length is one.
    curvature = np.array([0.5 / LENGTH**2 / D] * D + [0.5 * (CONSTANT / LENGTH) ** 2])
    noise = sigma * CLIP / records / math.sqrt(STEPS)
    ridge = np.array([1.6 * noise] * D + [0.16 * noise])
    for step in range(1, STEPS + 1):
        sums = 0.1 * records * draw.normal(size=(C, D + 1))
        gaps = 0.1 * records * draw.normal(size=6)
        sent = {"sums": sums, "gaps": gaps}
        absorb_total(total(sent, {"sums": sigma, "gaps": 0.1 * step}), training, ["x"])
        if 2 * step > STEPS:
            late, noise_of_late = late + gaps, noise_of_late + (0.1 * step) ** 2
        before = before + step * (curvature * head + CLIP * sums / records)
        head = before / sum(range(1, step + 1)) / (curvature + ridge)
        for name, wanted in (
            ("weight", head[:, :D] / LENGTH),
            ("bias", CONSTANT * head[:, D] / LENGTH),
        ):
            most = 2e-3 * float(np.abs(wanted).max())
            np.testing.assert_allclose(training.model[name], wanted, atol=most)
        # What sites have received, which is rounded.
        kept = training.model
        own = torch.cat([kept["weight"], kept["bias"][:, None] / CONSTANT], 1)
        head = LENGTH * own.double().numpy()
    assert training.round == 1 + STEPS
    assert training.memory["counted"].tolist() == pytest.approx([records, 0.3])
    np.testing.assert_allclose(training.memory["gaps"], late, rtol=1e-5)
    rounds = STEPS - STEPS // 2
    assert training.memory["gap-noise"].tolist() == pytest.approx([noise_of_late, rounds])
    # Scores of the model have one factor, which sites do not receive.
    whole = records * rounds / math.sqrt(6)
    factor = factor_of(torch.from_numpy(late) / whole, math.sqrt(noise_of_late) / whole)
    made = head_of(training)
    torch.testing.assert_close(made.weight, factor * training.model["weight"])
    torch.testing.assert_close(made.bias, factor * training.model["bias"])


@pytest.mark.parametrize("name", ["totals", "sums", "gaps"])
@pytest.mark.parametrize("factor", [0.9, 2.5])
def test_a_sum_is_at_most_as_long_as_records_and_noise_allow(
    run: Run, name: str, factor: float
) -> None:
    tensors = {"weight": torch.zeros(C, D), "bias": torch.zeros(C), "centre": torch.zeros(D)}
    training = Training(run, ("a", "b", "c"), "f", D, tensors | {"bound": torch.ones(1)}, {})
    training.memory = {"counted": torch.tensor([500.0, 1.0]), "in-first.x": torch.ones(1)}
    training.round = 1
    sent: dict[str, Any] = {"records": [500.0], "totals": np.zeros(D)}
    if name != "totals":
        sent = {"sums": np.zeros((C, D + 1)), "gaps": np.zeros(6)}
    sent[name][..., 0] = factor * 500 / (math.sqrt(C) if name == "sums" else 1)
    own = total(sent, dict.fromkeys(("records", "totals", "sums", "gaps"), 1.0))
    if factor < 1:
        absorb_total(own, training, ["x"])
        return
    with pytest.raises(RunError, match="false numbers"):
        absorb_total(own, training, ["x"])


@pytest.mark.parametrize("rows", [0, 3])
def test_sites_receive_zeros_the_public_map_and_the_usual_length(folder: Path, rows: int) -> None:
    width = 64 if rows else D
    draw = torch.Generator().manual_seed(rows)
    public = torch.randn(50, width, generator=draw)
    more: dict[str, Any] = {}
    matrix = torch.eye(width)
    if rows:
        matrix = torch.randn(rows, width, generator=draw)
        save_file({"projection": matrix}, folder / "rows.safetensors")
        more = {"features.projection": str(folder / "rows.safetensors")}
        more |= {"features.dimensions": 5}
    made = LogisticStart(logistic(folder, public, **more)).start(width)
    centre = public.mean(0)
    lengths = ((public - centre) @ matrix.T).norm(dim=1)
    assert float(made["bound"]) == pytest.approx(float(lengths.square().mean().sqrt()), rel=2e-3)
    assert torch.allclose(made["centre"], centre, atol=1e-3)
    assert not any(made["bias"].tolist() + made["weight"].flatten().tolist())
    assert made["weight"].shape == (C, 5 if rows else width)
    assert ("projection" in made) == bool(rows)
    if rows:
        assert torch.allclose(made["projection"][:rows], matrix, atol=3e-3)
        assert not made["projection"][rows:].any()
        assert made["projection"].shape == (5, width)
    with pytest.raises(ConfigError, match=rf"has {width} features; those of the sites have 65"):
        LogisticStart(logistic(folder, public)).start(65)
