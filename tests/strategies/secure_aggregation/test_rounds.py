"""FedAvg through secure aggregation: the same model as with updates in clear, a new sum in each round, and
lost sites.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.common.errors import RunError
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.strategies.interrupted import wire_of

CLASSES = ",".join(map(str, range(10)))
PLAIN: dict[str, Any] = {
    "method": "fedavg",
    "classes": CLASSES,
    "fedavg.rounds": 3,
    "fedavg.local-epochs": 2,
    "max-share": 0,
}
SECURE = PLAIN | {"secure-aggregation": True, "colluding": 0.0, "dropouts": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fedavg.model": "mlp"},
        {"method": "fedprox"},
        {"method": "fedyogi"},
        {"method": "fedsgd"},
    ],
    ids=["fedavg", "mlp", "fedprox", "fedyogi", "fedsgd"],
)
def test_each_round_is_that_of_the_same_run_without_secure_aggregation(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    plain, secure = (
        metrics_of(run_federation(tmp_path, sites(4), **run | settings))["rounds"]
        for run in (PLAIN, SECURE)
    )
    assert [entry["round"] for entry in secure] == [1, 2, 3]
    for before, after in zip(plain, secure, strict=True):
        assert after["accuracy"] == pytest.approx(before["accuracy"], abs=0.006)
        assert after["used"] == 4


def test_every_round_has_new_keys_and_no_update_is_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bytes]] = []
    real = masked.protocol.mask

    def keep(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        seen.append((state.secrets.masking.hex(), values[-40:].astype("<i4").tobytes()))
        return real(state, delivered, rules, values)

    monkeypatch.setattr(masked.protocol, "mask", keep)
    grid = InProcessGrid(sites(4), run_id=4720)
    folder = run_federation(tmp_path, grid, report=True, **SECURE)
    assert len({key for key, _ in seen}) == len(seen) == 12
    wire = wire_of(grid)
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    for _, vector in seen:
        assert any(vector)
        assert vector not in wire
        assert vector not in files
    assert "secure aggregation" in (folder / "report.html").read_text()


def test_a_site_lost_in_the_first_round_takes_part_in_none_and_costs_no_other(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(sites(5), {4: Fault(offline=True, kind="query.sum_shares")})
    folder = run_federation(tmp_path, grid, deadline=2.0, **SECURE)
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [4, 4, 4]
    assert {e["site"] for e in events_of(folder) if e["event"] == "dropped"} == {"4"}


def test_too_few_sites_end_the_run_and_the_round_is_named(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(4), {index: Fault(offline=True, kind="train") for index in (1, 2)})
    with pytest.raises(RunError, match="round 1: the secure aggregation cannot be completed"):
        run_federation(tmp_path, grid, deadline=0.5, **SECURE)


def test_an_update_beyond_the_range_ends_the_run_and_is_not_cut(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="a site has withheld the secure aggregation"):
        run_federation(
            tmp_path,
            sites(4),
            **SECURE,
            **{"secure-aggregation-range": 1e-6, "secure-aggregation-records": 2000},
        )


@pytest.mark.slow
def test_noise_of_training_at_each_site_is_as_without_secure_aggregation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise of one standard deviation in every number, and the same records in each sample,
    both runs learn the same model: nothing is wrapped, scaled, or added twice.
    """
    monkeypatch.setattr(
        "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian",
        lambda variance, count: np.full(count, math.isqrt(variance)),
    )
    monkeypatch.setattr(
        "fedsurrogate.client_app.methods.dp.record_gradients.system_uniforms",
        lambda count: (torch.arange(count) % 20) / 20,
    )
    settings = {
        "method": "dp-fedavg",
        "epsilon": 8.0,
        "delta": 1e-5,
        "fedavg.rounds": 2,
        "fedavg.local-epochs": 1,
        "fedavg.sample-rate": 0.2,
        "fedavg.noise": "site",
        # In secure aggregation, every site counts as the same number of records.
        "partition": "iid",
    }
    folders = [run_federation(tmp_path, sites(4), **run | settings) for run in (PLAIN, SECURE)]
    plain, secure = map(metrics_of, folders)
    assert secure["privacy"] == plain["privacy"]
    assert secure["privacy"]["mechanism"] == "dp-sgd"
    assert [entry["epsilon"] for entry in secure["rounds"]] == [
        entry["epsilon"] for entry in plain["rounds"]
    ]
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=2e-2 * float(tensor.abs().max())), name
    assert not any(
        name.startswith("noise") or name == "local-epsilon" for name in secure["learning"]
    )
