import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedsurrogate.common.escapes import human_bytes
from fedsurrogate.server_app.cli import main as cli
from tests.commands import coordinator
from tests.grid import run_federation, sites

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_federation(
        tmp_path_factory.mktemp("run"), sites(2), **{"head.min-steps": 20, "head.epochs": 1}
    )


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def test_the_installed_script_starts() -> None:
    script = Path(sys.executable).parent / "coordinator"
    if not script.exists():
        pytest.skip(
            "this environment was not installed from here; 'make setup' without VENV= does that"
        )
    done = subprocess.run(
        [script, "plan", "-c", "fedpft.rank=-1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr.splitlines()[-1]
        == "error: fedpft.rank = -1: must be greater than or equal to 0"
    )


def test_a_plan_is_readable_by_programs(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    settings = ("-c", 'fedpft.covariance="diag"', "--records", 500)
    assert coordinator(monkeypatch, "plan", "--json", *settings) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [
        "fedpft diag",
        "FedAvg of the head, 20 rounds",
        "raw features",
    ]
    assert all(
        set(row) == {"name", "up", "down", "rounds", "messages", "epsilon", "delta", "noise"}
        for row in rows
    )
    assert all(type(row["up"]) is int and row["up"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("epsilon=4.0 delta=1e-5", ("have 1.22/S of it", "at most 33% of the sites collude", "local-epsilon")),
        ("epsilon=4.0 delta=1e-5 colluding=0.0 dropouts=0.0", ("have 1/S of it", "at most 0%")),
        ("", ("privacy none", "the coordinator sees the sum over all sites", "has no noise")),
        (
            'method="dp-fedavg" epsilon=4.0 delta=1e-5',
            ("each of 30 rounds is one step", "gradients", "local-epsilon"),
        ),
        ('method="dp-fedavg" fedavg.noise="site" epsilon=4.0 delta=1e-5', ("each site adds the whole noise itself",)),
    ],
)  # fmt: skip
def test_a_plan_of_a_secure_aggregation_says_who_sees_what(
    settings: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """One distributed noise does not grow with the number of sites, so on a mean over S sites it falls as
    1/S.
    """
    monkeypatch.setattr(cli.console, "_width", 160)
    method = "" if "method" in settings else 'fedpft.covariance="gram" '
    assert (
        coordinator(
            monkeypatch, "plan", "-c", f'secure-aggregation=true classes="a,b" {method}{settings}'
        )
        == 0
    )
    out = capsys.readouterr().out
    for word in words:
        assert word in out


def test_a_report_is_written_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (run / "report.html").unlink(missing_ok=True)
    assert coordinator(monkeypatch, "report", run) == 0
    assert capsys.readouterr().out.splitlines() == ["privacy none", str(run / "report.html")]
    assert "<html" in (run / "report.html").read_text()


def test_refit_says_where_the_head_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert coordinator(monkeypatch, "refit", run, "--without", "1", "--classes", "8, 3") == 0
    described, folder = capsys.readouterr().out.strip().splitlines()
    assert described == "2 classes: 3, 8"
    assert (Path(folder) / "model.safetensors").exists()
    assert json.loads((Path(folder) / "manifest.json").read_text())["without"] == ["1"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--without", "clinic"], "site 'clinic'"),
        (["--classes", "x"], "class 'x'"),
        (["--classes", ","], "classes: an empty"),
        (["--classes", "0"], "classes = '0': a head tells two classes apart"),
    ],
)
def test_refit_refuses_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, arguments: list[str], word: str
) -> None:
    assert coordinator(monkeypatch, "refit", run, *arguments) == 1
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1


def test_a_plan_of_one_class_is_refused_but_of_one_number_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = ("plan", "--classes", 1, "--dimension", 8)
    assert coordinator(monkeypatch, *words) == 1
    assert "give 2 at least" in capsys.readouterr().err
    number = 'task="regression" target-range="0,1"'
    assert coordinator(monkeypatch, *words, "-c", number) == 0


@pytest.mark.parametrize("command", ["report", "refit"])
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, command: str
) -> None:
    assert coordinator(monkeypatch, command, tmp_path / "nothing") == 2
    assert "Invalid value" in capsys.readouterr().err
    assert coordinator(monkeypatch, command, tmp_path) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("private", [True, False])
def test_a_plan_fills_the_fields_of_an_impact_assessment_with_its_own_figures(
    private: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that only people know say so; nothing promises privacy that the plan has not."""
    settings = "classes=no,yes" + " epsilon=2.0 delta=1e-5" * private
    given = ("--dimension", 64, "-c", settings)
    assert coordinator(monkeypatch, "plan", "--json", *given) == 0
    (row, *_) = json.loads(capsys.readouterr().out)
    assert coordinator(monkeypatch, "plan", "--json", "--classes", 2, *given) == 0
    assert json.loads(capsys.readouterr().out)[0] == row, "the classes that the run names"
    assert coordinator(monkeypatch, "plan", "--dpia", "--json", *given) == 0
    fields = {each["field"]: each["text"] for each in json.loads(capsys.readouterr().out)}
    assert human_bytes(row["up"]) in fields["Data that leave"]
    assert "no, yes" in fields["Data that leave"]
    assert "to be filled in" in fields["Legal basis"]
    claimed = "epsilon 2, delta 1e-05"
    assert (claimed in fields["Risks"], claimed in fields["Measures: noise"]) == (private, private)
    assert ("No differential privacy" in fields["Risks"]) == (not private)
    assert coordinator(monkeypatch, "plan", "--dpia", *given) == 0
    printed = capsys.readouterr().out
    assert all(f"**{field}** (" in printed and text in printed for field, text in fields.items())
