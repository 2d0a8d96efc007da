import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.config import RunConfig, parse_run_config
from common.errors import ConfigError
from server_app.plan import KNOWN_DIMENSIONS, find_dimension, numbers, plan
from tests.grid import InProcessGrid, run_federation, sites


def config(family: str = "lowrank", components: int = 1, rank: int = 16) -> RunConfig:
    flat = {"fedpft.covariance": family, "fedpft.components": components, "fedpft.rank": rank}
    return parse_run_config(flat)


@pytest.mark.parametrize(
    ("family", "components"),
    [("spherical", 1), ("spherical", 3), ("diag", 3), ("full", 1), ("full", 2), ("lowrank", 1), ("lowrank", 3)],
)
def test_a_plan_is_within_five_percent_of_the_run(tmp_path: Path, family: str, components: int) -> None:
    grid = InProcessGrid(sites(3))
    settings = {"fedpft.covariance": family, "fedpft.components": components, "partition": "iid", "head.min-steps": 20}
    folder = run_federation(tmp_path, grid, **settings, **{"head.epochs": 1})
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    records = {event["site"]: sum(event["counts"].values()) for event in events if event["event"] == "replied"}
    for node in range(3):
        up, down = grid.counted(node)
        planned, *_ = plan(config(family, components), 64, 10, records[str(node)], 20)
        assert planned.up == pytest.approx(up, rel=0.05)
        assert planned.down == pytest.approx(down, rel=0.05)


def test_numbers_are_those_of_the_paper() -> None:
    """FedPFT, equations 9 to 11 with d = 512, C = 10, K = 10."""
    assert numbers(config("full", 10), 512, 10, 10_000) == (2 * 512 + (512**2 - 512) // 2 + 1) * 100
    assert numbers(config("diag", 10), 512, 10, 10_000) == (2 * 512 + 1) * 100
    assert numbers(config("spherical", 10), 512, 10, 10_000) == (512 + 2) * 100
    assert numbers(config("lowrank", 10, 16), 512, 10, 10_000) == 512 * 17 + 513 * 100


def test_few_records_hold_few_components() -> None:
    assert numbers(config("diag", 10), 64, 10, 200) == numbers(config("diag", 2), 64, 10, 200)
    assert numbers(config("diag", 10), 64, 10, 3) == numbers(config("diag", 1), 64, 10, 3)
    assert numbers(config("lowrank", 1, 64), 512, 10, 50) == numbers(config("lowrank", 1, 5), 512, 10, 50)


def test_the_alternatives_stand_beside_the_run() -> None:
    ours, fedavg, raw = plan(config(), 512, 10, 1000, 20)
    assert (ours.rounds, ours.messages) == (1, 2)
    assert (fedavg.rounds, fedavg.messages) == (20, 20)
    assert fedavg.up == fedavg.down == 20 * 2 * 10 * 513
    assert raw.up == 2 * 1000 * 512
    assert ours.name == "fedpft lowrank"


def test_a_dimension_is_found_without_loading_a_model(tmp_path: Path) -> None:
    assert find_dimension(RunConfig()) == 64
    for backbone, dimension in KNOWN_DIMENSIONS.items():
        assert find_dimension(RunConfig(data="imagefolder", backbone=backbone)) == dimension
    save_file({"x": torch.zeros(3, 77), "y": torch.zeros(3)}, tmp_path / "set-train.safetensors")
    assert find_dimension(RunConfig(data="safetensors", data_dir=str(tmp_path), dataset=("set",))) == 77


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff" * 7, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_a_dimension_that_cannot_be_found_is_asked_for(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "set-train.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="give --dimension"):
        find_dimension(RunConfig(data="safetensors", data_dir=str(tmp_path), dataset=("set",)))


@pytest.mark.parametrize("settings", [{"data": "imagefolder"}, {"backbone": "timm:resnet99"}, {"data": "safetensors"}])
def test_an_unknown_dimension_is_asked_for(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="give --dimension"):
        find_dimension(RunConfig(**settings))  # type: ignore[arg-type]
