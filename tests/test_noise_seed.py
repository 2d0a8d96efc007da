"""A simulation can be repeated with its privacy noise; a hospital answers no such run."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.requests import WORK, answer
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import to_record
from fedsurrogate.server_app.deployment.local_engine import simulate_here


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"secure-aggregation": True, "classes": ",".join("0123456789"), "fedpft.covariance": "gram"},
        pytest.param({"method": "dp-fedavg", "fedavg.rounds": 2, "fedavg.sample-rate": 0.5}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("system_noise")
def test_a_simulation_with_a_noise_seed_repeats_its_model(
    settings: dict[str, str | int | bool], tmp_path: Path
) -> None:
    models = []
    for seed in (0, 0, 5, 5, 6) if not settings else (0, 5, 5, 6):
        own = {"epsilon": 8.0, "delta": 1e-5, "noise-seed": seed, "output-dir": str(tmp_path)}
        folder = simulate_here(2, own | settings, lambda _: None, report=seed == 5)
        weights = load_file(folder / "model.safetensors")
        models.append({name: value.tobytes() for name, value in sorted(weights.items())})
    *others, first, second, another = models
    assert first == second
    assert not any(one == other for one, other in combinations([*others, first, another], 2))
    said = "not private: noise-seed = 5"
    assert sum(said in page.read_text() for page in tmp_path.glob("*/report.html")) == 2


@pytest.mark.parametrize("work", WORK)
def test_a_hospital_does_nothing_for_a_run_whose_noise_can_be_repeated(
    work: str, tmp_path: Path
) -> None:
    own = {"epsilon": 8.0, "delta": 1e-5, "noise-seed": 5}
    content = to_record(None, {"run": parse_run(own).digest})
    node = NodeConfig(site="clinic", state_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="noise-seed = 5 makes privacy noise that anybody can"):
        answer(work, content, own, "1", node, "clinic")


def test_a_run_is_known_by_its_noise_seed_and_without_one_by_the_name_that_it_always_had() -> None:
    digests = [parse_run({"noise-seed": seed}).digest for seed in (1, 2)]
    assert len({*digests, parse_run({}).digest}) == 3
    assert "noise-seed" not in parse_run({}).document["settings"]
