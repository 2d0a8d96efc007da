"""A hostile site adds false numbers to secure aggregation, whose parts nobody can see: totals that no
records have are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.secure_aggregation import forget
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import numbers_of
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import absorb_total as absorb_generator
from fedsurrogate.strategies.dpcvae import expected_shapes
from fedsurrogate.strategies.fedavg import absorb_total
from fedsurrogate.strategies.pooling.site_weights import Total, check_gradients, check_moments
from tests.grid import NodeConfig, run_federation, sites

CLASSES = ",".join(map(str, range(10)))
SECURE: dict[str, Any] = {
    "classes": CLASSES,
    "secure-aggregation": True,
    "colluding": 0.0,
    "dropouts": 0.2,
}
GRAM = SECURE | {"fedpft.covariance": "gram", "head.max-samples": 20_000}
BUDGET = {"epsilon": 4.0, "delta": 1e-5}
DISTRIBUTED = SECURE | BUDGET | {"method": "dp-fedavg", "fedavg.rounds": 2}
FALSE = "some site has added false numbers"
Lie = Callable[[np.ndarray], None]


def run_with_a_liar(folder: Path, lie: Lie, settings: dict[str, Any]) -> Path:
    """A run of five sites, one of which changes its whole numbers before it masks them."""
    real = masked.protocol.mask

    def false(state: Any, delivered: Any, rules: Any, values: np.ndarray) -> Any:
        if state.site == "2":
            values = values.copy()
            lie(values)
        return real(state, delivered, rules, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked.protocol, "mask", false)
        return run_federation(folder, sites(5), **settings)


def assert_refused(
    folder: Path, part: slice | int, value: int, settings: dict[str, Any], why: str = FALSE
) -> None:
    """A run with another value in a part of one site's numbers fails for this reason."""

    def lie(values: np.ndarray) -> None:
        values[part] = value

    with pytest.raises(RunError, match=why):
        run_with_a_liar(folder, lie, settings)


def largest(settings: dict[str, Any], name: str) -> int:
    config = parse_run(settings)
    return numbers_of(config.plan, config.settings, 5)[name].largest


def test_gradients_longer_than_the_number_of_records_are_refused(tmp_path: Path) -> None:
    """Each is shortened to the clip, so their sum is not longer than their number, apart from the
    noise.
    """
    assert_refused(tmp_path, slice(1, None), largest(DISTRIBUTED, "gradients"), DISTRIBUTED)


def test_class_sums_longer_than_their_counts_are_refused_with_distributed_noise(
    tmp_path: Path,
) -> None:
    noisy = GRAM | BUDGET
    assert_refused(tmp_path, slice(10, 74), largest(noisy, "sums"), noisy)


def test_class_sums_longer_than_the_second_moment_allows_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, slice(10, 74), largest(GRAM, "sums"), GRAM)


@pytest.mark.parametrize("settings", [GRAM, GRAM | BUDGET], ids=["exact", "noisy"])
def test_negative_counts_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """They were taken for classes that no site has."""
    step = 1 if "epsilon" not in settings else largest(settings, "counts") / 20_000

    def fewer(values: np.ndarray) -> None:
        values[:5] -= round(2000 * step)

    with pytest.raises(RunError, match=FALSE):
        run_with_a_liar(tmp_path, fewer, settings)


@pytest.mark.parametrize(
    ("left", "reason"), [(0, "no site of the secure aggregation"), (-2, FALSE)]
)
def test_updates_of_no_record_are_refused(tmp_path: Path, left: int, reason: str) -> None:
    """The sum of the updates is divided by them. A site without records adds none."""

    def fewer(values: np.ndarray) -> None:
        values[0] -= 1438 - left

    with pytest.raises(RunError, match=reason):
        run_with_a_liar(tmp_path, fewer, SECURE | {"method": "fedavg", "fedavg.rounds": 1})


def test_a_number_of_records_that_grows_in_one_round_makes_no_longer_step() -> None:
    """The step is divided by the mean of all rounds' numbers, so a liar made it almost as many
    times as long as rounds.
    """
    config = parse_run(DISTRIBUTED | {"classes": "a,b", "fedavg.rounds": 10})
    training = Training.begin(config, ("a", "b"), "f", 4)
    sigmas, claim = {"records": 1.0, "gradients": 0.01}, config.mechanism
    for records in [1000.0] * 9 + [1e6]:
        before = training.model["weight"]
        gradients = torch.zeros(10).double()
        gradients[9] = 1e6 if records > 1000 else 0.0
        tensors = {"records": torch.tensor([records]).double(), "gradients": gradients}
        absorb_total(Total(training.header(), tensors, sigmas, claim), training, ["1", "2"])
    step = float((training.model["weight"] - before).norm())
    assert step == pytest.approx(
        config.settings.fedavg.distributed_rate(2) * config.settings.fedavg.clip, rel=0.01
    )


@pytest.mark.parametrize("claimed", [1.0, 1e6])
def test_with_noise_at_every_site_a_false_weight_changes_nothing(claimed: float) -> None:
    """All sites weigh the same, so the sum of their weights is public; a liar made the step 60,000
    times as long.
    """
    config = parse_run(DISTRIBUTED | {"classes": "a,b", "fedavg.noise": "site"})
    update = (
        torch.randn(10, generator=torch.Generator().manual_seed(0)).double()
        * config.settings.secure_aggregation_records
    )
    found = []
    for records in (3.0 * config.settings.secure_aggregation_records, claimed):
        training = Training.begin(config, ("a", "b"), "f", 4)
        tensors = {"records": torch.tensor([records]).double(), "update": update}
        absorb_total(
            Total(training.header(), tensors, {}, config.mechanism), training, ["1", "2", "3"]
        )
        found.append(training.model["weight"])
    assert found[0].abs().max() > 0.1
    assert torch.equal(*found)


def test_a_false_weight_of_a_generator_is_refused() -> None:
    settings = SECURE | {
        "method": "dpcvae",
        "classes": "a,b",
        "dpcvae.hidden": 8,
        "dpcvae.latent": 2,
    }
    training = Training.begin(parse_run(settings), ("a", "b"), "f", 4)
    training.round = 1
    count = sum(math.prod(shape) for shape in expected_shapes(training).values())
    tensors = {"records": torch.tensor([-2.0]).double(), "update": torch.zeros(count).double()}
    with pytest.raises(RunError, match=FALSE):
        absorb_generator(Total(training.header(), tensors), training, ["1", "2", "3"])


def test_rounding_of_small_features_is_not_taken_for_false_numbers(tmp_path: Path) -> None:
    """With one record of a class, a class sum is as long as the second moment allows, and whole
    numbers are rounded.
    """
    policy, nodes = tmp_path / "policy.toml", list[NodeConfig]()
    policy.write_text("without-dp = true\nsmallest-class = 1\nsmallest-colluding = 0.0\n")
    for site in "abc":
        folder = tmp_path / site
        folder.mkdir()
        features = torch.randn(2, 200, generator=torch.Generator().manual_seed(ord(site))) * 1e-3
        for part in ("train", "test"):
            tables, facts = (
                {"x": features.abs(), "y": torch.arange(2)},
                {"classes": "no,yes", "fingerprint": "f" * 16},
            )
            save_file(tables, folder / f"f-{part}.safetensors", facts)
        own: NodeConfig = {
            "site": site,
            "data": "safetensors",
            "data-dir": str(folder),
            "dataset": "f",
        }
        nodes.append(own | {"policy": str(policy), "state-dir": str(folder / "state")})
    settings = {
        "secure-aggregation": True,
        "colluding": 0.0,
        "dropouts": 0.0,
        "classes": "no,yes",
        "fedpft.covariance": "gram",
    }
    with pytest.raises(RunError, match="set a smaller secure-aggregation-range") as failure:
        run_federation(tmp_path, nodes, **settings)
    assert FALSE not in str(failure.value)
    for node in nodes:
        forget(parse_node_config(node))
    run_federation(tmp_path, nodes, **settings | {"secure-aggregation-range": 0.01})


@pytest.mark.parametrize("records", [0, 40, 2000])
def test_honest_noise_is_never_refused(records: int) -> None:
    """The worst honest case: all records have the same feature, or the same gradient, of norm one."""
    config = parse_run(DISTRIBUTED)
    claim = config.mechanism
    assert claim is not None
    training, generator = (
        Training.begin(config, tuple(CLASSES.split(",")), "f", 64),
        torch.Generator().manual_seed(1),
    )
    sigmas = {name: sigma for name, (sigma, _) in claim.noise.items()}

    def noise(name: str, *shape: int) -> torch.Tensor:
        return sigmas[name] * torch.randn(shape, generator=generator, dtype=torch.float64)

    for _ in range(1000):
        gradients = noise("gradients", 650)
        gradients[0] += records
        tensors = {"records": records + noise("records", 1), "gradients": gradients}
        check_gradients(Total(training.header(), tensors, sigmas, claim))
    gram = parse_run(GRAM | BUDGET)
    claim = gram.mechanism
    assert claim is not None
    sigmas = {name: sigma for name, (sigma, _) in claim.noise.items()}
    for _ in range(300):
        sums, squares = noise("sums", 10, 64), noise("squares", 2080)
        sums[0, 0] += records
        squares[0] += records
        counts = noise("counts", 10)
        counts[0] += records
        check_moments(
            Total(
                training.header(),
                {"counts": counts, "sums": sums, "squares": squares},
                sigmas,
                claim,
            )
        )
