"""The commands `coordinator evaluate`, `survey` and `approval`, on a simulated run and on proposals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from fedsurrogate.common.security.documents import Proposal, SignedProposal, read_proposal
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.signed_models.signed_model import SUFFIX, save_signed_model
from fedsurrogate.server_app.deployment.audit_log import APPROVERS, RULES
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.export.graph import signed_model_of
from tests.commands import coordinator


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    settings = {
        "output-dir": str(home),
        "device": "cpu",
        "classes": "0,1,2",
        "image-size": 8,
        "alpha": 5.0,
    }
    return simulate_here(
        3, settings | {"epsilon": 8.0, "delta": 1e-5}, lambda event: None, report=False
    )


def test_evaluate_prints_noisy_and_exact_values(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("-c", f'output-dir="{tmp_path}"', "--epsilon", "8")
    assert coordinator(monkeypatch, "evaluate", run, *more) == 0
    shown = capsys.readouterr().out
    assert "Exact accuracy" in shown
    assert "At site 0 alone: accuracy" in shown, "simulated sites show their share"
    assert coordinator(monkeypatch, "evaluate", run, *more, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"]["low"] <= result["accuracy"]["value"] <= result["accuracy"]["high"]
    assert list(result["classes"]) == ["0", "1", "2"]


def test_secure_aggregation_show_no_site(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("-c", f'output-dir="{tmp_path}"', "--epsilon", "8", "--secure-aggregation")
    assert coordinator(monkeypatch, "evaluate", run, *more) == 0
    shown = capsys.readouterr().out
    assert "at 3 sites" in shown
    assert "Exact accuracy" not in shown
    assert "At site" not in shown
    assert coordinator(monkeypatch, "survey", "--classes", "0,1,2", "--simulate", "3", *more) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the records are divided evenly, because secure aggregation shows no site's" in shown
    assert "Site 0" not in shown


def test_survey_prints_counts_and_an_estimate(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--classes", "0,1,2", "--simulate", "3", "-c", f'output-dir="{tmp_path}"')
    assert coordinator(monkeypatch, "survey", *more) == 0
    shown = capsys.readouterr().out
    assert "A run at epsilon 4 could reach an accuracy of about" in shown
    assert "without noise" in shown
    assert coordinator(monkeypatch, "survey", *more, "--like", run, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert "drawn from the surrogates" in result["estimate"]["how"]
    assert result["estimate"]["accuracy"].keys() == {"1", "2", "4"}


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """A folder of `coordinator sites certs` whose rules ask for one signature; and a person's key."""
    credentials = tmp_path / "certificates"
    credentials.mkdir()
    (credentials / "ca.crt").write_text("a certificate")
    (credentials / RULES).write_text("approvals = 1\n")
    (credentials / APPROVERS).write_text(f'"Ada" = "{public_key(b"k" * 32).hex()}"\n')
    (tmp_path / "ada.key").write_bytes(b"k" * 32)
    return credentials


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / f"model{SUFFIX}"
    file.write_bytes(save_signed_model(signed_model_of(run)))
    return file


COUNTING: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "evaluate": lambda model: ("evaluate", model),
    "survey": lambda _: ("survey", "--classes", "0,1,2"),
}


@pytest.mark.parametrize("command", COUNTING)
def test_what_counts_at_sites_needs_the_signatures_of_a_run(
    command: str,
    model: Path,
    federation: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, proposal = COUNTING[command](model), tmp_path / "counts.json"
    link = ("--root-certificates", federation / "ca.crt", "--control", "127.0.0.1:1")

    def refused(*more: object) -> str:
        assert coordinator(monkeypatch, *words, *link, *more) == 1
        return " ".join(capsys.readouterr().err.split())

    assert "approvals = 1, so this needs a proposal" in refused()
    asked = ("--propose", proposal, "--purpose", "how good it is")
    assert coordinator(monkeypatch, *words, *link, *asked) == 0
    shown = capsys.readouterr().out
    assert "how good it is" in shown
    assert (
        f"counting.kind = {read_proposal(proposal).proposal.run().settings.counting.kind}" in shown
    )
    assert "has 0 signatures of the 1 people" in refused("--proposal", proposal)
    assert (
        coordinator(
            monkeypatch, "approval", "approve", proposal, "--key", tmp_path / "ada.key", "--yes"
        )
        == 0
    )
    capsys.readouterr()
    assert "no SuperLink listens there" in refused("--proposal", proposal)
    # The budget is the proposal's: another one is not passed over in silence.
    other = refused("--proposal", proposal, "--epsilon", "2")
    assert "has the budget that people have signed" in other
    assert "allows something else" in refused("--proposal", proposal, "-c", "epsilon=2.0")


def test_a_proposal_is_of_one_model(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, asked = tmp_path / "counts.json", ("--purpose", "how many")
    assert coordinator(monkeypatch, "survey", "--classes", "0,1", "--propose", file, *asked) == 0
    assert coordinator(monkeypatch, "evaluate", model, "--proposal", file) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "proposes counting.kind = 'survey', and this command asks for 'evaluation'" in shown
    assert coordinator(monkeypatch, "survey", "--classes", "0,1", "--propose", file) == 1
    assert "purpose: must be one line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("evaluate", "nowhere"), "neither a run folder nor a model file"),
        (("survey", "--classes", ","), "--classes"),
        (("survey", "--classes", "0,1", "--like", "nowhere", "--simulate", "2"), "nowhere"),
    ],
)
def test_what_cannot_work_is_named(
    words: tuple[str, ...],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert coordinator(monkeypatch, *words) != 0
    assert named in capsys.readouterr().err


ADA, BOB = b"a" * 32, b"b" * 32


@pytest.mark.parametrize("meanwhile", ["nothing", "another signs", "another changes it"])
def test_what_happens_while_a_person_reads_is_kept_or_noticed(
    meanwhile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "spring.json"
    made = SignedProposal(Proposal.fresh("run", {"method": "fedpft"}, "spring", 30))
    file.write_text(made.text())
    (tmp_path / "ada.key").write_bytes(ADA)

    def reads(_: str) -> bool:
        if meanwhile == "another signs":
            file.write_text(read_proposal(file).sign(BOB).text())
        elif meanwhile == "another changes it":
            file.write_text(SignedProposal(replace(made.proposal, purpose="autumn")).text())
        return True

    monkeypatch.setattr(typer, "confirm", reads)
    ended = coordinator(monkeypatch, "approval", "approve", file, "--key", tmp_path / "ada.key")
    known = {"Ada": public_key(ADA), "Bob": public_key(BOB)}
    expected = {"nothing": ["Ada"], "another signs": ["Ada", "Bob"], "another changes it": []}
    assert read_proposal(file).signers(known) == expected[meanwhile]
    assert ended == (meanwhile == "another changes it")
    if ended:
        assert "was changed while you read it" in " ".join(capsys.readouterr().err.split())


def test_a_proposed_run_resumes_the_folder_of_who_typed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts it, in another folder."""
    monkeypatch.chdir(tmp_path)
    words = ("approval", "propose", "p.json", "--purpose", "go on")
    assert coordinator(monkeypatch, *words, "-c", 'method="fedavg" resume="runs/one"') == 0
    content = read_proposal(tmp_path / "p.json").proposal.content
    assert content["resume"] == str(tmp_path / "runs" / "one")
