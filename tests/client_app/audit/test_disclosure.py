import hashlib
import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app.audit import disclosure
from fedsurrogate.client_app.audit.disclosure import disclose
from fedsurrogate.client_app.features.site_features import site_name
from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.governance.release import disclosure_of, prepare
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.run import parse_run
from tests import commands
from tests.client_app.audit.test_release_audit import OPEN, hospital

RUN: dict[str, Any] = {"backbone": "none", "data": "safetensors", "fedpft.covariance": "spherical"}


@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_the_sheet_has_the_hash_of_what_leaves_and_the_ledger_has_the_sheets_address(
    earlier: int, tmp_path: Path
) -> None:
    node, run = hospital(tmp_path, [30, 30]), parse_run(RUN)
    open_ledger(node)
    for number in range(earlier):
        before = open_gate(node, run.settings.data, f"before {number}")
        other = SiteRequest(run, node, site_name(node, 0), flower_run=f"before {number}")
        before.let_out(prepare(other, before).release)
    content, facts, page = disclose(run, node)
    gate = open_gate(node, run.settings.data, "1")
    prepared = prepare(
        SiteRequest(run, node, site_name(node, 0), flower_run="1", info={"lineage": "one"}), gate
    )
    gate.let_out(prepared.release)
    entry = gate.ledger.entries()[-1]
    assert (
        content["outputs"]["sha256 of the payload"]
        == entry["sha256"]
        == hashlib.sha256(prepared.made.payload).hexdigest()
    )
    assert content["outputs"]["bytes"] == entry["bytes"] == len(prepared.made.payload)
    assert (node.state / f"{entry['disclosure']}.json").read_bytes() == facts.read_bytes()
    assert content["schema"] == 1
    assert facts.stem == f"{run.digest}-{hashlib.sha256(facts.read_bytes()).hexdigest()[:16]}"
    assert content["outputs"]["ledger after"]["entries"] == len(gate.ledger.entries())
    assert entry["disclosure"] in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_address_in_the_ledger_has_a_page_wherever_a_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """A release takes the address of the JSON file, so the page must be there before it."""
    node, run, done = hospital(tmp_path, [30, 30]), parse_run(RUN), list[Path]()

    def killed(file: Path, content: bytes) -> None:
        if len(done) == written:
            raise KeyboardInterrupt
        done.append(file)
        replace_file(file, content)

    with monkeypatch.context() as patch:
        for name in ("check_run", "audit_release"):
            patch.setattr(disclosure, name, lambda *_, **__: None)
        patch.setattr(disclosure, "sheet", lambda *_: {"schema": 1})
        patch.setattr(disclosure, "page_of", lambda *_: "page")
        patch.setattr(disclosure, "replace_file", killed)
        with suppress(KeyboardInterrupt):
            disclose(run, node)
    address = disclosure_of(node, run.digest)
    assert bool(address) == (written == 2)
    assert not address or (node.state / f"{address}.html").is_file()


def test_a_release_without_a_sheet_has_no_address(tmp_path: Path) -> None:
    node, run = hospital(tmp_path, [30, 30]), parse_run(RUN)
    open_ledger(node)
    disclose(parse_run(RUN | {"seed": 5}), node)
    request = SiteRequest(run, node, site_name(node, 0), flower_run="1", info={"lineage": "one"})
    prepared = prepare(request, open_gate(node, run.settings.data, "1"))
    assert prepared.release.disclosure == ""


def test_a_private_sheet_has_the_claim_and_what_it_does_not_cover_but_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    node = hospital(tmp_path, [30, 30], policy=OPEN)
    open_ledger(node)
    text = " ".join(f"{key}={value!r}" for key, value in {
        "site": node.site, "data": node.data, "data-dir": node.data_dir, "dataset": "own", "policy": node.policy,
        "state-dir": node.state_dir, "cache-dir": node.cache_dir,
    }.items())  # fmt: skip
    run = (
        'backbone="none" data="safetensors" fedpft.covariance="spherical" epsilon=1.0 '
        'delta=1e-5 classes="0,1"'
    )
    assert (
        commands.site(monkeypatch, "check", "--sheet", "--node-config", text, "-c", run, "--json")
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    outputs = found["outputs"]
    assert outputs["claim"]["epsilon"] == 1.0
    assert outputs["claim"]["sigmas"]["sums"] > 1
    assert any("takes part" in each for each in outputs["not covered"])
    assert "the ledger's entry has the hash" in outputs["sha256 of the payload"]
    (attack,) = outputs["attacks"].values()
    assert attack["low"] <= attack["auc"] <= attack["high"]
    assert outputs["ledger after"]["epsilon spent"] > outputs["ledger before"]["epsilon spent"]
    assert {"projects", "people", "data", "settings", "outputs"} <= found.keys()
    assert str(tmp_path) not in json.dumps(
        {key: value for key, value in found.items() if key not in ("file", "page")}
    )
