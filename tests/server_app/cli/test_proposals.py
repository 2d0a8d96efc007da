"""`coordinator approval approve`: what is signed is what was read, and nobody's signature is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from fedsurrogate.common.security.documents import Proposal, SignedProposal, read_proposal
from fedsurrogate.common.security.sealing import public_key
from tests.commands import coordinator

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
