import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.common.backbones.backbone_names import KNOWN_DIMENSIONS
from fedsurrogate.common.costs import Cost, find_dimension
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.server_app.runs.plan import plan
from tests.grid import FAST, InProcessGrid, run_federation, sites
from tests.registry import sent_numbers


def config(family: str = "lowrank", components: int = 1, rank: int = 16) -> Run:
    flat = {"fedpft.covariance": family, "fedpft.components": components, "fedpft.rank": rank}
    return parse_run(flat)


def measured(tmp_path: Path, family: str, components: int) -> Iterator[tuple[Cost, int, int]]:
    """The plan for each site of a run, and the bytes that it actually sent and received."""
    grid = InProcessGrid(sites(3))
    settings = {
        "fedpft.covariance": family,
        "fedpft.components": components,
        "partition": "iid",
        "head.epochs": 1,
    }
    folder = run_federation(tmp_path, grid, **settings, **{"head.min-steps": 20})
    for node in range(3):
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        (counts,) = (
            e["counts"] for e in events if e["event"] == "replied" and e["site"] == str(node)
        )
        yield (
            plan(config(family, components), 64, len(counts), sum(counts.values()), 20)[0],
            *grid.counted(node),
        )


ALL = {"partition": "iid", "classes": ",".join(map(str, range(10)))}
PRIVATE = ALL | {"epsilon": 4.0, "delta": 1e-5}
FEDLAP: dict[str, Any] = {
    "method": "fedlap", "image-size": 16, "partition": "iid", "fedlap.rounds": 2,
    "fedlap.image-steps": 1, "fedlap.server-steps": 1,
}  # fmt: skip
SUMMED = ALL | {"secure-aggregation": True, "sites": 3, "fedpft.covariance": "gram"}


@pytest.mark.parametrize(
    ("settings", "rounds", "epsilon"),
    [
        *(
            (FAST | PRIVATE | {"fedpft.covariance": family}, 1, 4.0)
            for family in ("spherical", "diag", "full", "lowrank")
        ),
        (FAST | PRIVATE | {"fedpft.covariance": "diag", "fedpft.privacy": "theorem-4.1"}, 1, 4.0),
        (FAST | SUMMED | {"features.projection": "", "features.dimensions": 32}, 1, None),
        (FEDLAP, 2, None),
        pytest.param(PRIVATE | FEDLAP, 2, 4.0, marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_within_five_percent_of_the_run(
    tmp_path: Path, settings: dict[str, Any], rounds: int, epsilon: float | None
) -> None:
    if "features.projection" in settings:
        square = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        rows = torch.linalg.qr(square)[0][:32].contiguous()
        save_file({"projection": rows}, tmp_path / "map.safetensors")
        settings = settings | {"features.projection": str(tmp_path / "map.safetensors")}
    grid = InProcessGrid(sites(3))
    run_federation(tmp_path, grid, **settings)
    run = parse_run(settings)
    planned = plan(run, find_dimension(run.settings), 10, 400, 20)[0]
    kinds = {m.metadata.message_type for m in grid.sent} - {"query.name"}
    counted = grid.counted(1, [*kinds])
    assert (planned.up, planned.down) == tuple(pytest.approx(n, rel=0.05) for n in counted)
    assert (planned.rounds, planned.epsilon) == (rounds, epsilon)


def test_noisy_sums_are_of_all_classes_whatever_the_records() -> None:
    settings = {"epsilon": 1.0, "delta": 1e-5, "classes": ",".join(map(str, range(30)))}
    for family, squares in (
        ("spherical", 0),
        ("diag", 64),
        ("full", 64 * 65 // 2),
        ("lowrank", 64 * 65 // 2),
    ):
        private = parse_run(settings | {"fedpft.covariance": family})
        assert (
            sent_numbers(private, 64, 30, 5)
            == sent_numbers(private, 64, 30, 5000)
            == 30 * 65 + squares
        )
        few, many = (plan(private, 64, 2, records, 20)[0] for records in (50, 5000))
        assert few.up == many.up > 2 * (30 * 65 + squares)


def test_a_plan_tells_how_much_noise_a_class_mean_gets() -> None:
    settings = {"epsilon": 1.0, "delta": 1e-5, "fedpft.covariance": "spherical"}
    ours, *others = plan(parse_run(settings), 64, 10, 1000, 20)
    assert (ours.name, ours.epsilon, ours.delta) == ("fedpft spherical, sums", 1.0, 1e-5)
    sigma = gaussian_noise_multiplier(1.0, 1e-5) / math.sqrt(0.93)
    assert ours.noise == pytest.approx(sigma * math.sqrt(64) / 100)
    assert all((other.epsilon, other.delta, other.noise) == (None, None, None) for other in others)
    theorem = settings | {"fedpft.privacy": "theorem-4.1"}
    wanted = 4 / 100 * math.sqrt(5 * math.log(4e5)) * math.sqrt(64)
    assert plan(parse_run(theorem), 64, 10, 1000, 20)[0].noise == pytest.approx(wanted)
    split = plan(parse_run(settings | {"fedpft.components": 4}), 64, 10, 1000, 20)[0]
    assert split.name == "fedpft spherical, dp-em"
    assert split.noise == pytest.approx(ours.noise * 2 * 4, rel=1e-6)
    assert plan(config(), 64, 10, 1000, 20)[0].noise is None


def test_a_plan_is_hardly_lower_than_a_run_whose_components_dissolve(tmp_path: Path) -> None:
    """The plan is for classes of equal size; how many components dissolve depends on the records."""
    for planned, up, _ in measured(tmp_path, "diag", 5):
        assert 0.7 * planned.up < up < 1.1 * planned.up


def test_numbers_are_those_of_the_paper() -> None:
    """FedPFT, equations 9 to 11 with d = 512, C = 10, K = 10."""
    assert (
        sent_numbers(config("full", 10), 512, 10, 10_000)
        == (2 * 512 + (512**2 - 512) // 2 + 1) * 100
    )
    assert sent_numbers(config("diag", 10), 512, 10, 10_000) == (2 * 512 + 1) * 100
    assert sent_numbers(config("spherical", 10), 512, 10, 10_000) == (512 + 2) * 100
    assert sent_numbers(config("lowrank", 10, 16), 512, 10, 10_000) == 512 * 17 + 513 * 100


def test_few_records_hold_few_components() -> None:
    assert sent_numbers(config("diag", 10), 64, 10, 200) == sent_numbers(
        config("diag", 2), 64, 10, 200
    )
    assert sent_numbers(config("diag", 10), 64, 10, 3) == sent_numbers(config("diag", 1), 64, 10, 3)
    assert sent_numbers(config("lowrank", 1, 64), 512, 10, 50) == sent_numbers(
        config("lowrank", 1, 5), 512, 10, 50
    )


def test_the_alternatives_stand_beside_the_run() -> None:
    ours, fedavg, raw = plan(config(), 512, 10, 1000, 20)
    assert (ours.rounds, ours.messages) == (1, 2)
    assert (fedavg.rounds, fedavg.messages) == (20, 20)
    assert fedavg.up == fedavg.down == 20 * 2 * 10 * 513
    assert raw.up == 2 * 1000 * 512
    assert ours.name == "fedpft lowrank"


def test_a_dimension_is_found_without_loading_a_model(tmp_path: Path) -> None:
    assert find_dimension(parse_run({}).settings) == 64
    for backbone, dimension in KNOWN_DIMENSIONS.items():
        assert (
            find_dimension(parse_run({"data": "imagefolder", "backbone": backbone}).settings)
            == dimension
        )
    save_file({"x": torch.zeros(3, 77), "y": torch.zeros(3)}, tmp_path / "set-train.safetensors")
    assert (
        find_dimension(
            parse_run({"data": "safetensors", "data-dir": str(tmp_path), "dataset": "set"}).settings
        )
        == 77
    )


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff" * 7,
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"{}",
        b"\x02" + b"\0" * 7 + b"[]",
    ],
)
def test_a_dimension_that_cannot_be_found_is_asked_for(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "set-train.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="give --dimension"):
        find_dimension(
            parse_run({"data": "safetensors", "data-dir": str(tmp_path), "dataset": "set"}).settings
        )
