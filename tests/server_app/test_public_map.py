"""A public map: made once from features of public images, and the same in every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.cli.main import app
from fedsurrogate.server_app.counting import write_public_map
from fedsurrogate.strategies.pooling.class_means import read_map
from tests.grid import metrics_of, run_federation, sites

SECURE: dict[str, Any] = {
    "secure-aggregation": True,
    "classes": "a,b",
    "epsilon": 1.0,
    "delta": 1e-5,
}


def public(folder: Path, head: torch.Tensor | None = None) -> tuple[str, str, torch.Tensor]:
    """Features of public images, a file of weights, and the features."""
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(80, 64, generator=generator) * torch.arange(1, 65)
    save_file({"x": features}, folder / "public.safetensors")
    save_file({"fc.weight": torch.ones(1) if head is None else head}, folder / "w.safetensors")
    return str(folder / "public.safetensors"), str(folder / "w.safetensors"), features


def test_a_map_with_a_head_is_that_of_the_run_that_reads_both_files(tmp_path: Path) -> None:
    head = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    features, weights, _ = public(tmp_path, head)
    told = write_public_map(features, tmp_path / "map.safetensors", weights_path=weights)
    assert "40 directions" in told
    shared = SECURE | {"features.dimensions": 8}
    once = read_map(parse_run(shared | {"features.projection": str(tmp_path / "map.safetensors")}))
    each = read_map(parse_run(shared | {"features.projection": weights, "fedpft.public": features}))
    for name in ("projection", "centre"):
        torch.testing.assert_close(getattr(once, name), getattr(each, name), rtol=1e-3, atol=1e-3)


def test_a_map_without_a_head_keeps_the_variance_of_the_public_images(tmp_path: Path) -> None:
    features, _, values = public(tmp_path)
    told = write_public_map(features, tmp_path / "map.safetensors")
    assert "principal components" in told
    settings = SECURE | {"features.dimensions": 16}
    found = read_map(
        parse_run(settings | {"features.projection": str(tmp_path / "map.safetensors")})
    )
    moved = found.apply(values)
    assert float(moved.mean(0).abs().max()) < 0.05 * float(values.mean())
    share = moved.var(0).sum() / values.var(0).sum()
    assert float(share) > 16 / 64


def test_the_command_writes_the_map_and_says_how_to_use_it(tmp_path: Path) -> None:
    features, _, _ = public(tmp_path)
    out = tmp_path / "map.safetensors"
    result = CliRunner().invoke(app, ["public-map", features, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.exists()
    assert "features.projection" in result.output


def test_a_map_for_another_power_is_refused(tmp_path: Path) -> None:
    features, _, _ = public(tmp_path)
    write_public_map(features, tmp_path / "map.safetensors", power=0.5)
    chosen = SECURE | {"features.projection": str(tmp_path / "map.safetensors")}
    with pytest.raises(ConfigError, match=r"power-transform = 0\.5"):
        read_map(parse_run(chosen))
    assert read_map(parse_run(chosen | {"features.power-transform": 0.5})).centre is not None


def test_budget_and_classes_are_all_that_a_secure_aggregation_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsurrogate.common.secure_aggregation.rules.FEWEST_MAPPED", 64)
    classes = ",".join(map(str, range(10)))
    chosen = {"secure-aggregation": True, "epsilon": 8.0, "delta": 1e-5, "classes": classes}
    metrics = metrics_of(run_federation(tmp_path, sites(3), **chosen))
    assert "63 of 64 directions: random" in metrics["learning"]["projection"]
    assert metrics["accuracy"]["model"] > 0.8
