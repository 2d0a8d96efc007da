"""Settings that name no data, payloads above the limit, and empty folders: found before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedsurrogate as fs
from fedsurrogate.client_app.cli.join import check_settings
from fedsurrogate.client_app.diagnostics.first_look import check_records, first_look
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.costs import check_payload, payload_bytes
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.cli.main import app
from fedsurrogate.server_app.lifecycle.before_start import (
    check_simulation,
    check_start,
    check_submission,
)
from tests import commands

TINY = {"max-payload-mib": 1}


def test_a_site_with_a_folder_and_the_bundled_digits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data-dir = .*bundled"):
        check_settings(NodeConfig(data="digits", data_dir=str(tmp_path)))


COMMANDS = {
    "doctor": ("doctor",),
    "features": ("features", "--out", "f.safetensors"),
    "check": ("check",),
    "ledger": ("ledger", "show"),
    "join": ("join", "--superlink", "localhost:1", "--insecure"),
}


@pytest.mark.parametrize("key", ["data-dir", "dataset", "held-out-dir"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_site_refuses_data_without_their_kind(
    command: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`site doctor` once found 1,438 digits in a folder of X-rays, and all was well."""
    monkeypatch.chdir(tmp_path)
    own = f'{key}="xrays" state-dir="{tmp_path}/s" cache-dir="{tmp_path}/c"'
    assert commands.site(monkeypatch, *COMMANDS[command], "--node-config", own) != 0
    assert f"{key} = 'xrays', but data is not set" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["data-dir", "dataset"])
def test_every_way_to_a_run_refuses_data_without_their_kind(key: str, tmp_path: Path) -> None:
    run, where = parse_run({key: "xrays"}), f'{key}="xrays"'
    for way in (
        lambda: check_start(run, simulated=True),
        lambda: check_start(run, simulated=False),
        lambda: check_submission(run, "coordinator.example.org:9093"),
        lambda: fs.simulate(3, output_dir=tmp_path, **{key.replace("-", "_"): str(tmp_path)}),
    ):
        with pytest.raises(ConfigError, match=f"{key} = .*set data to the kind"):
            way()
    planned = CliRunner().invoke(app, ["plan", "-c", where, "--classes", "2"])
    assert isinstance(planned.exception, ConfigError)


def test_a_site_may_name_the_bundled_digits_and_a_folder() -> None:
    """As kits do in a rehearsal: the kind is stated."""
    assert parse_node_config({"data": "digits", "data-dir": "/data"}).data == "digits"


def test_data_with_their_kind_are_taken(tmp_path: Path) -> None:
    flat = {"data": "imagefolder", "data-dir": str(tmp_path), "output-dir": str(tmp_path)}
    assert check_simulation(flat)[0].settings.data == "imagefolder"
    assert check_simulation({"output-dir": str(tmp_path)})[0].settings.data == "digits"


LARGE = [
    {"method": "fedpft", "fedpft.covariance": "gram", "backbone": "torchvision:resnet50"},
    {"method": "fedpft", "fedpft.covariance": "full", "backbone": "torchvision:mobilenet_v2"},
    {"method": "fedavg", "fedavg.model": "mlp", "fedavg.width": 1024, "backbone": "pixels"}
    | {"image-size": 64},
]


@pytest.mark.parametrize("own", LARGE, ids=lambda own: str(own["method"]))
def test_a_payload_above_the_limit_is_refused_by_its_setting(own: dict[str, object]) -> None:
    run = parse_run({**own, **TINY})  # type: ignore[arg-type]
    dimension = 4096 if own["backbone"] == "pixels" else 2048
    with pytest.raises(ConfigError, match=r"max-payload-mib = 1: .* set max-payload-mib to "):
        check_payload(run, dimension, 10, 100_000)
    needed = payload_bytes(run, dimension, 10, 100_000)
    enough = parse_run({**own, "max-payload-mib": -(-needed // 2**20)})  # type: ignore[arg-type]
    check_payload(enough, dimension, 10, 100_000)


def test_a_run_on_a_superlink_is_refused_as_far_as_its_settings_tell() -> None:
    with pytest.raises(ConfigError, match="max-payload-mib"):
        check_submission(parse_run(LARGE[0] | TINY), "coordinator.example.org:9093")  # type: ignore[arg-type]
    check_submission(
        parse_run({"fedpft.covariance": "gram"} | TINY), "coordinator.example.org:9093"
    )


def test_a_plan_and_a_simulation_are_refused_before_any_work(tmp_path: Path) -> None:
    settings = 'fedpft.covariance="gram" max-payload-mib=1'
    done = CliRunner().invoke(app, ["plan", "-c", settings, "--dimension", "2048"])
    assert isinstance(done.exception, ConfigError)
    save_file(
        {"x": torch.rand(8, 2048), "y": torch.arange(8) % 2},
        tmp_path / "own-train.safetensors",
        {"classes": "a,b"},
    )
    save_file(
        {"x": torch.rand(4, 2048), "y": torch.arange(4) % 2},
        tmp_path / "own-test.safetensors",
        {"classes": "a,b"},
    )
    flat = {"data": "safetensors", "data-dir": str(tmp_path), "dataset": "own"}
    flat["fedpft.covariance"] = "gram"
    with pytest.raises(ConfigError, match="max-payload-mib = 1"):
        check_records(parse_run(flat | TINY), 2)
    assert "12 used" in check_records(parse_run(flat), 2)[0]


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
@pytest.mark.parametrize("there", ["missing", "empty", "class-without-files"])
def test_a_folder_that_is_empty_or_not_mounted_does_not_join(
    kind: str, there: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if there != "missing":
        folder.mkdir()
    if there == "class-without-files":
        (folder / "sick").mkdir()
    node = NodeConfig.model_validate({"data": kind, "data-dir": str(folder)})
    found = "no such folder" if there == "missing" else "smallest-site is 1; is the disk mounted"
    with pytest.raises(DataError, match=found):
        first_look(node, 1)
    if there != "missing":
        first_look(node, 0)


def test_empty_tables_and_features_do_not_join(tmp_path: Path) -> None:
    (tmp_path / "sick").mkdir()
    (tmp_path / "labels.csv").write_text("path,label\n")
    node = NodeConfig(data="imagefolder", data_dir=str(tmp_path))
    with pytest.raises(DataError):
        first_look(node, 1)
    (tmp_path / "labels.csv").write_text("path,label\na.png,sick\nb.png,well\n")
    first_look(node, 2)
    first_look(NodeConfig(data="digits"), 5000)
