"""The `site` command as a hospital types it: an error gives one line on stderr and exit code 1."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.cli import main as cli
from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.settings.base import parse_overrides
from tests.client_app.governance.ledger_processes import release

Captured = pytest.CaptureFixture[str]
BUDGET = 'epsilon=1.0 delta=1e-5 classes="a,b" fedpft.covariance="spherical"'


def site(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["site", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def node(tmp_path: Path) -> str:
    """A site with features of two classes, and one release in its ledger."""
    labels = torch.arange(400) % 2
    features = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)) + 3 * labels[:, None]
    content = {"x": features, "y": labels, "patient": torch.arange(400) // 4}
    save_file(content, tmp_path / "all.safetensors", {"classes": "a,b", "fingerprint": "f" * 16})
    text = (
        f'data="safetensors" data-dir="{tmp_path}" state-dir="{tmp_path}/state" '
        f'cache-dir="{tmp_path}/cache"'
    )
    text += f' check-log-dir="{tmp_path}/check-log"'
    open_ledger(parse_node_config(parse_overrides([text])))
    gate = open_gate(parse_node_config(parse_overrides([text])), "digits", "7")
    gate.let_out(release(10.0, run="7"))
    return text


def test_the_ledger_tells_what_left_and_what_is_left(
    node: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert site(monkeypatch, "ledger", "show", "--json", "--node-config", node) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"] + shown["epsilon_left"] == pytest.approx(4.0)
    assert shown["without_privacy"] == 0
    assert [entry["flower_run"] for entry in shown["entries"]] == ["7"]
    monkeypatch.setattr(cli.console, "width", 200)
    assert site(monkeypatch, "ledger", "show", "--node-config", node) == 0
    assert f"of 4 at delta 1e-05, {shown['epsilon_left']:.4g} left" in capsys.readouterr().out


def test_the_rounds_of_a_run_are_one_row(
    node: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each states what the whole run costs: sixteen rows of epsilon 2 would look like 32."""
    config = parse_node_config(parse_overrides([node]))
    (charged,) = open_gate(config, "digits", "7").ledger.entries()
    rounds = [charged | {"flower_run": "9", "round": at} for at in range(1, 17)]
    table = cli.ledger_table([charged, *rounds, charged | {"flower_run": "9", "events": []}])
    assert table.row_count == 3
    monkeypatch.setattr(cli.console, "width", 200)
    cli.console.print(table)
    shown = " ".join(capsys.readouterr().out.split())
    assert "16 rounds" in shown


@pytest.mark.parametrize("word", ["show", "open"])
def test_a_ledger_of_a_folder_that_is_not_there_is_refused(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It would show the ledger of the digits, or open one."""
    node = f'data="imagefolder" data-dir="{tmp_path}/nope" state-dir="{tmp_path}/state"'
    assert site(monkeypatch, "ledger", word, "--node-config", node) == 1
    error = capsys.readouterr().err
    assert f"data-dir = '{tmp_path}/nope' is not there" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_policy_of_the_node_config_is_the_one_that_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "policy.toml").write_text("epsilon-total = 2.5\n")
    monkeypatch.setenv("FEDSURROGATE_NODE_CONFIG", f'data="digits" policy="{tmp_path}/policy.toml"')
    assert site(monkeypatch, "policy", "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon-total"] == 2.5


def test_a_damaged_ledger_is_one_line_until_a_person_decides(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (ledger,) = (tmp_path / "state" / "ledgers").glob("*.jsonl")
    ledger.write_text("edited\n")
    assert site(monkeypatch, "ledger", "show", "--node-config", node) == 1
    assert "site ledger reopen" in capsys.readouterr().err
    decision = ("--reason", "restored from a backup", "--epsilon-spent", "2.5")
    assert site(monkeypatch, "ledger", "reopen", "--node-config", node, *decision) == 0
    capsys.readouterr()
    assert site(monkeypatch, "ledger", "show", "--json", "--node-config", node) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"] == pytest.approx(2.5)
    assert shown["entries"][0]["reason"] == "restored from a backup"


def test_a_policy_is_checked_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("epsilon-total = 8.0\n")
    assert site(monkeypatch, "policy", str(file), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["epsilon-total"], shown["without-dp"], shown["smallest-class"]) == (
        8.0,
        False,
        10,
    )
    assert site(monkeypatch, "policy") == 0
    assert "without a policy file" in capsys.readouterr().out
    file.write_text("without-dp = true\n")
    assert site(monkeypatch, "policy", str(file)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot be taken back: without-dp = true" in said
    assert "it can have no private run" in said
    file.write_text("epsilon-total = 'much'\n")
    assert site(monkeypatch, "policy", str(file)) == 1
    assert "epsilon-total = 'much': must be a number" in capsys.readouterr().err


def test_what_people_wrote_is_shown_as_they_wrote_it(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(cli.console, "width", 250)
    file = tmp_path / "policy.toml"
    file.write_text('backbones = ["timm:resnet[a-z]*", "open_clip:cat:x"]\n')
    assert site(monkeypatch, "policy", str(file)) == 0
    assert "timm:resnet[a-z]*, open_clip:cat:x" in capsys.readouterr().out
    decision = ("--reason", "see [/7] :cat:", "--epsilon-spent", "0")
    assert site(monkeypatch, "ledger", "reopen", "--node-config", node, *decision) == 0
    assert site(monkeypatch, "ledger", "show", "--node-config", node) == 0
    assert "see [/7] :cat:" in capsys.readouterr().out


def test_a_check_shows_the_noise_and_charges_nothing(
    node: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert site(monkeypatch, "check", "--json", "--node-config", node, "-c", BUDGET) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["may_leave"] is True
    assert shown["records"] == 400, (
        "a split that would be drawn depends on all records, so all of them train"
    )
    assert shown["epsilon_before"] < 1 < shown["epsilon_after"] < 1.2
    assert shown["sigmas"]["sums"] == pytest.approx(3.7306 / 0.93**0.5, rel=1e-4)
    assert set(shown["facts"]) == {
        "clip-fraction",
        "signal-to-noise-counts",
        "signal-to-noise-sums",
    }
    assert site(monkeypatch, "ledger", "show", "--json", "--node-config", node) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == shown["epsilon_before"]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("", "without-dp = false"),
        ("epsilon=1.0 delta=1e-5", "classes is empty"),
        ("epsilon=2.0 delta=1e-5", "epsilon-per-run = 1"),
    ],
)
def test_what_may_not_leave_is_one_line_and_exit_code_1(
    node: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, run: str, message: str
) -> None:
    assert site(monkeypatch, "check", "--node-config", node, "-c", run) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_the_key_of_a_site_is_shown_as_peers_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    named = f'site="north" state-dir="{tmp_path}"'
    assert site(monkeypatch, "offline", "key", "--node-config", named) == 0
    line = capsys.readouterr().out
    assert re.fullmatch(r'north = "[0-9a-f]{128}"\n', line)
    assert site(monkeypatch, "offline", "key", "--node-config", named) == 0
    assert capsys.readouterr().out == line
    assert site(monkeypatch, "offline", "key", "--node-config", f'state-dir="{tmp_path}"') == 1
    assert "names no site" in capsys.readouterr().err


def test_a_check_of_rounds_tells_cost_and_refusal_by_the_settings(
    node: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Nothing is computed: each reply depends on a model that the coordinator sends."""
    exact = 'method="fedavg" image-size=8 backbone="pixels" classes="0,1,2,3,4,5,6,7,8,9"'
    private = exact.replace("fedavg", "dp-fedavg") + " epsilon=1.0 delta=1e-5"
    for run, epsilon, refusal in ((exact, None, "without-dp = false"), (private, 1.0, "")):
        done = site(monkeypatch, "check", "--json", "--node-config", node, "-c", run)
        found = json.loads(capsys.readouterr().out)
        assert (done, found["may_leave"]) == (bool(refusal), not refusal)
        assert refusal in (found["refusal"] or "")
        assert found["rounds"] > 1
        assert found["bytes"] > 0
        assert (found["epsilon"], found["runs_left"] is None) == (epsilon, epsilon is None)
