"""Differential privacy over gRPC: one site without budget, one whose policy forbids the method, one
that takes part.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hospitals import CLASSES, write_features
from tests.e2e.processes import federation, site_command

SETTINGS = (
    f'classes="{CLASSES}" epsilon=1.0 delta=1e-5 fedpft.covariance="spherical" sites=3 '
    "quorum=0.3 deadline=600.0"
)
SECRET = "secret-ward-7"
POLICIES = {
    "private": "epsilon-per-run = 2.0\nepsilon-total = 2.0\n",
    "spent": f'epsilon-per-run = 1.5\nepsilon-total = 0.25\nbackbones = ["{SECRET}", "pixels"]\n',
    "strict": f'methods = ["dpcvae"]\nbackbones = ["{SECRET}"]\n',
}


def _node(home: Path, name: str) -> str:
    policy = f' policy="{home}/{name}.toml"' if POLICIES[name] else ""
    return (
        f'site="{name}" data="safetensors" data-dir="{home}/{SECRET}-{name}" dataset="f" '
        f'cache-dir="{home}/cache-{name}" state-dir="{home}/state-{name}" '
        f'check-log-dir="{home}/check-log-{name}"{policy}'
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals with their own data, after one run."""
    home = tmp_path_factory.mktemp("private")
    for seed, (name, policy) in enumerate(POLICIES.items()):
        write_features(home / f"{SECRET}-{name}", seed)
        (home / f"{name}.toml").write_text(policy)
        assert (
            site_command("ledger", "open", "--yes", "--node-config", _node(home, name)).returncode
            == 0
        )
    with federation(home / "flower", [_node(home, name) for name in POLICIES]) as running:
        status = running.run(f'{SETTINGS} output-dir="{home}/out"', cwd=home)
    assert status == "finished:completed", (home / "flower" / "flwr-run.log").read_text()
    return home


@pytest.fixture
def folder(home: Path) -> Path:
    (found,) = (file.parent for file in (home / "out").glob("*/manifest.json"))
    return found


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_the_run_goes_on_with_the_healthy_and_names_the_others_and_why(folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["sites"] == {"invited": 3, "used": 1, "rejected": 2, "dropped": 0}
    reasons = {event["site"]: event["reason"] for event in _events(folder, "rejected")}
    assert reasons == {
        "spent": "the site's privacy budget does not allow this release",
        "strict": "the site's policy does not allow what was asked",
    }
    assert metrics["privacy"]["per_site"].keys() == {"private"}


def test_nothing_of_a_policy_or_of_the_data_is_at_the_coordinator(folder: Path) -> None:
    for path in folder.parent.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    # No working time and no number of correct records: these would be exact numbers on the data.
    for event in _events(folder, "replied"):
        assert event.get("seconds") is None
    assert json.loads((folder / "metrics.json").read_text())["accuracy"] == {"per_site": {}}


def test_what_left_is_in_the_ledger_to_the_byte(home: Path, folder: Path) -> None:
    shown = json.loads(
        site_command("ledger", "show", "--json", "--node-config", _node(home, "private")).stdout
    )
    (release,) = (entry for entry in shown["entries"] if entry.get("mechanism"))
    assert release["bytes"] == len((folder / "surrogates" / "private.pb").read_bytes())
    assert shown["epsilon"] == pytest.approx(1.0)
    for name in ("spent", "strict"):
        shown = json.loads(
            site_command("ledger", "show", "--json", "--node-config", _node(home, name)).stdout
        )
        assert not [entry for entry in shown["entries"] if entry.get("mechanism")]


def test_the_site_finds_the_reason_in_its_own_log(home: Path) -> None:
    assert "epsilon-total" in (home / "state-spent" / "site.log").read_text()
    assert "methods" in (home / "state-strict" / "site.log").read_text()


def test_a_dry_run_tells_what_would_leave_and_charges_nothing(home: Path) -> None:
    node = _node(home, "private")
    done = site_command("check", "--json", "--node-config", node, "-c", SETTINGS)
    shown = json.loads(done.stdout)
    assert done.returncode == 0
    assert shown["may_leave"] is True
    assert shown["epsilon_after"] == pytest.approx(1.4, abs=0.15)
    again = json.loads(site_command("ledger", "show", "--json", "--node-config", node).stdout)
    assert again["epsilon"] == pytest.approx(1.0)
    refused = site_command("check", "--json", "--node-config", _node(home, "spent"), "-c", SETTINGS)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["may_leave"] is False
