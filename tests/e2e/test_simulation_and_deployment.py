"""The same federation twice: simulated on Ray, and deployed as a SuperLink and SuperNodes over
gRPC.
"""

import json
from pathlib import Path

import pytest

from tests.children import ok
from tests.e2e.processes import coordinator, federation, site_command
from tests.grid import run_folders

SETTINGS = (
    'fedpft.covariance="diag" fedpft.components=3 seed=7 alpha=1.0 head.min-steps=100 head.epochs=2'
)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulation")
    done = ok(
        coordinator(
            "simulate",
            "--engine",
            "flower",
            "--sites",
            "2",
            "-c",
            SETTINGS + " compare=true",
            cwd=folder,
        )
    )
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hospitals with their own data, and a third whose node-config names a missing folder."""
    home = tmp_path_factory.mktemp("deployment")
    nodes = [
        f'data="digits" partition-id={i} num-partitions=2 cache-dir="{home}/cache-{i}" '
        f'state-dir="{home}/state-{i}"'
        for i in range(2)
    ]
    missing = home / "secret-patient-folder"
    secret = (
        f'data="imagefolder" data-dir="{missing}" site="st-mary" '
        f'state-dir="{home}/state-2" policy="{home}/p.toml"'
    )
    (home / "p.toml").write_text("without-dp = true")
    missing.mkdir()
    assert site_command("ledger", "open", "--yes", "--node-config", secret).returncode == 0
    missing.rmdir()
    output = home / "out"
    with federation(home / "flower", [*nodes, secret]) as running:
        status = running.run(
            f'{SETTINGS} compare=true sites=3 deadline=600.0 output-dir="{output}"', cwd=home
        )
    assert status == "finished:completed", (home / "flower" / "flwr-run.log").read_text()
    (folder,) = run_folders(output)
    return folder


def _metrics(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "metrics.json").read_text()))


def test_simulation_leaves_the_run_folder_where_the_user_stands(simulated: Path) -> None:
    assert simulated.parent.name == "runs"
    files = {path.name for path in simulated.iterdir()}
    assert {
        "metrics.json",
        "manifest.json",
        "events.jsonl",
        "model.safetensors",
        "surrogates",
        "report.html",
    } <= files
    metrics = _metrics(simulated)
    assert metrics["status"] == "ok"
    assert metrics["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    assert metrics["accuracy"]["model"] > 0.85  # type: ignore[index]


def test_the_local_engine_gives_the_same_surrogates_and_the_same_accuracy_to_the_last_digit(
    simulated: Path, tmp_path: Path
) -> None:
    done = ok(
        coordinator(
            "simulate",
            "--engine",
            "local",
            "--sites",
            "2",
            "-c",
            SETTINGS + " compare=true",
            cwd=tmp_path,
        )
    )
    local = Path(done.stdout.splitlines()[-1])
    assert local.parent == tmp_path / "runs"
    for name in sorted((simulated / "surrogates").iterdir()):
        assert name.read_bytes() == (local / "surrogates" / name.name).read_bytes()
    assert _metrics(local)["accuracy"] == _metrics(simulated)["accuracy"]


def test_deployment_gives_the_same_surrogates_bit_for_bit(simulated: Path, deployed: Path) -> None:
    for site in ("0", "1"):
        name = f"surrogates/{site}.pb"
        assert (simulated / name).read_bytes() == (deployed / name).read_bytes()


def test_a_site_without_data_is_named_and_the_others_go_on(deployed: Path) -> None:
    assert _metrics(deployed)["sites"] == {"invited": 3, "used": 2, "rejected": 1, "dropped": 0}
    events = [json.loads(line) for line in (deployed / "events.jsonl").read_text().splitlines()]
    (rejected,) = [event for event in events if event["event"] == "rejected"]
    assert rejected["site"] == "st-mary"
    assert "no usable data" in rejected["reason"]


def test_nothing_of_a_sites_paths_reaches_the_coordinator(deployed: Path) -> None:
    for path in deployed.rglob("*"):
        assert path.is_dir() or b"secret-patient" not in path.read_bytes()
    assert "secret-patient" in (deployed.parents[1] / "state-2" / "site.log").read_text()


def test_a_deployment_has_no_global_test_split(deployed: Path) -> None:
    accuracy = _metrics(deployed)["accuracy"]
    assert set(accuracy["per_site"]) == {"0", "1"}  # type: ignore[index, call-overload]
    assert "model" not in accuracy  # type: ignore[operator]
    assert not (deployed / "projection.json").exists()
