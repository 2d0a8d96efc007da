"""What an earlier commit wrote is read, learned from again, continued, charged and reported as
before.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsurrogate.client_app.governance.budget import Release, spent
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import BudgetError, ConfigError, LedgerError, RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.accounting import GaussianEvent
from fedsurrogate.common.renamed import of_today
from fedsurrogate.common.run import stored_run
from fedsurrogate.common.security.documents import read_request
from fedsurrogate.common.security.sealing import public_key, read_keys
from fedsurrogate.common.signed_models.signed_model import read_signed_model, settings_of_run
from fedsurrogate.common.wire.generator_files import read_generator
from fedsurrogate.common.wire.model_proto import load_model
from fedsurrogate.common.wire.records import unpack_bundle, unpack_surrogate
from fedsurrogate.server_app.exchange import learn_from_files
from fedsurrogate.server_app.lifecycle.before_start import check_resume
from fedsurrogate.server_app.refit import refit
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.reader import read_payloads, read_run
from fedsurrogate.strategies.fedpft import private_head
from fedsurrogate.strategies.fedpft.strategy import learn
from fedsurrogate.strategies.pooling import class_means
from tests.grid import InProcessGrid, metrics_of
from tests.pins.stored import (
    BEFORE_THE_BREAK,
    CLASSES,
    DELTA,
    POLICY,
    RUNS,
    SITES,
    STORED,
    budget,
    federate,
    ledger_in,
    nodes,
)
from tests.totals import unpack_total

# Heads in closed form: other processors round differently.
CLOSE = 1e-6
REFITTED = ("fedpft", "fedpft-private")
EXPECTED = json.loads((STORED / "site" / "expected.json").read_text())
Copy = Callable[[str], Path]
# Folders of a machine. A stored run names none, nor a user or host by them.
MACHINE = re.compile(rb"/(tmp|home|root|usr|var|opt|srv|mnt|Users|builds)/")
LARGEST = 600_000


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A function that copies a stored folder to where it can be written."""
    return lambda name: Path(shutil.copytree(STORED / name, tmp_path / name))


# Whose scores have a slope that earlier versions did not compute.
CALIBRATED = ("fedpft", "fedpft-private")


def close(folder: Path, other: Path, scaled: bool = False) -> bool:
    """Whether two folders have the same model, up to rounding; with `scaled`, the first also up to a
    factor of all scores, which changes no decision: probabilities are calibrated since.
    """
    one, two = (load_file(each / "model.safetensors") for each in (folder, other))
    if scaled:
        factor = float(two["weight"].norm() / one["weight"].norm())
        one = {name: factor * tensor for name, tensor in one.items()}
    return one.keys() == two.keys() and all(
        torch.allclose(one[name], two[name], rtol=CLOSE, atol=CLOSE * float(one[name].abs().max()))
        for name in one
    )


def test_stored_folders_are_small_and_name_no_machine() -> None:
    files = [file for file in STORED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < LARGEST
    assert not [file for file in files if MACHINE.search(file.read_bytes())]
    assert {folder.name for folder in STORED.iterdir() if folder.is_dir()} == {
        *RUNS,
        "afl",
        "data",
        "exchange",
        "site",
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run_is_read_in_full_and_reported(copy: Copy, name: str) -> None:
    folder = copy(name)
    run = read_run(folder)
    assert not run.notes
    assert (run.failure is None) == (name not in BEFORE_THE_BREAK)
    assert [site.name for site in run.sites] == list(SITES)
    assert run.used == run.invited == len(SITES)
    config = stored_run(run.manifest["config"])
    # Earlier versions gave these settings other digests; the folder keeps its own.
    assert run.manifest["run"] == settings_of_run(folder).digest != config.digest
    # The last site of a chain makes its model.
    if name != "fedpft-chain-interrupted":
        assert (
            load_model(folder / "model.safetensors").header.classes == tuple(run.classes) == CLASSES
        )
    page = write_report(folder).read_text()
    assert run.method in page
    assert all(site in page for site in SITES)
    if (file := folder / "model.fedsurrogate").exists():
        assert read_signed_model(file).manifest.run == run.manifest["run"]


def test_the_parts_of_single_methods_are_read() -> None:
    header, sites, numbers, claim = unpack_total(
        (STORED / "fedpft-secure-sum" / "sum.pb").read_bytes()
    )
    assert (header.classes, sites, claim) == (CLASSES, SITES, None)
    assert len(numbers)
    assert read_generator(STORED / "dpcvae" / "generator.safetensors").header.classes == CLASSES


@pytest.mark.parametrize("name", REFITTED)
def test_learning_again_gives_the_stored_head(
    copy: Copy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lengths of noisy class means are shrunk since, and sites differ only if they do across their
    # means, and with as many columns as least squares need; all else of that head is as before.
    monkeypatch.setattr(class_means, "FEWEST", len(CLASSES) + 1)
    monkeypatch.setattr(private_head, "differ_across", lambda own, of_sum: 1.0)
    monkeypatch.setattr(private_head, "ENOUGH_COLUMNS", 1)
    folder = copy(name)
    again, _ = refit(folder)
    assert close(again, folder, name in CALIBRATED)
    without, model = refit(folder, without=["south"])
    assert sorted(json.loads((without / "manifest.json").read_text())["sites"]) == ["north", "west"]
    assert model.header.classes == CLASSES
    assert not close(without, folder, name in CALIBRATED)


def test_a_run_of_a_method_that_is_gone_is_shown_and_learned_from_by_the_version_that_has_it(
    copy: Copy,
) -> None:
    folder = copy("afl")
    assert read_run(folder).method == "afl"
    assert "afl" in write_report(folder).read_text()
    assert read_signed_model(folder / "model.fedsurrogate").classifier.header.classes == CLASSES
    with pytest.raises(
        ConfigError, match=r"'afl' is gone: version 0\.2\.0 .*use method = 'fedpft'"
    ):
        refit(folder)


def test_a_stored_chain_is_learned_from_again(copy: Copy) -> None:
    """From the last site's surrogate; the run's own model is the head that this site trained on its
    records too.
    """
    folder = copy("fedpft-chain")
    _, again = refit(folder)
    surrogates = [unpack_surrogate(payload) for payload in read_payloads(folder)]
    config = stored_run(json.loads((folder / "manifest.json").read_text())["config"])
    learned = learn(surrogates, config, "cpu", config.settings.classes).model
    assert isinstance(again, Head)
    assert isinstance(learned, Head)
    torch.testing.assert_close(again.weight, learned.weight)


def test_no_site_is_taken_out_of_a_stored_chain(copy: Copy) -> None:
    with pytest.raises(RunError, match="one site cannot be removed"):
        refit(copy("fedpft-chain"), without=["south"])


def test_a_stored_secure_aggregation_is_not_learned_again(copy: Copy) -> None:
    with pytest.raises(RunError, match="only the sum over its sites"):
        refit(copy("fedpft-secure-sum"))


@pytest.mark.parametrize("name", ["fedavg-interrupted", "fedpft-chain-interrupted"])
def test_an_interrupted_run_is_continued_by_the_version_that_began_it(
    copy: Copy, tmp_path: Path, name: str
) -> None:
    config = json.loads((copy(name) / "manifest.json").read_text())["config"]
    settings: dict[str, Any] = of_today(config) | {
        "output-dir": str(tmp_path),
        "resume": str(tmp_path / name),
    }
    with pytest.raises(RunError, match=r"continue it with version 0\.2\.0"):
        check_resume(stored_run(settings), simulated=False)
    # Also where the manifest is lost: the checkpoint names its run.
    (tmp_path / name / "manifest.json").unlink()
    copy("data")
    with pytest.raises(RunError, match="of a run with other settings, or of another version"):
        federate(tmp_path, InProcessGrid(nodes(tmp_path)), **settings)


def _next(flower_run: str, noise: float = 7.0318266755825025) -> Release:
    """One more release, of epsilon 0.5 if no other noise is given."""
    parts: dict[str, Any] = {"sigmas": {"sums": noise}, "sensitivities": {"sums": 1.0}, "facts": {}}
    return Release(
        run="1875af46e182aeb7",
        flower_run=flower_run,
        method="fedpft",
        round=1,
        mechanism="sums",
        events=(GaussianEvent(noise),),
        unit="record",
        epsilon=0.5,
        delta=DELTA,
        bytes=249,
        sha256="0" * 64,
        rounds=1,
        **parts,
    )


def test_a_stored_ledger_is_intact_has_spent_the_same_and_is_charged_further(copy: Copy) -> None:
    ledger = ledger_in(copy("site"))
    ledger.check()
    entries = ledger.entries()
    assert (len(entries), entries[-1]["hash"]) == (EXPECTED["entries"], EXPECTED["last"])
    assert ledger.spent(DELTA) == pytest.approx(EXPECTED["epsilon at delta"], rel=1e-9)
    assert spent(entries, budget()) == pytest.approx(EXPECTED["spent"], rel=1e-9)
    content = ledger.path.read_bytes()
    after = ledger.charge(_next("78"), budget())
    assert EXPECTED["spent"] < after < EXPECTED["spent"] + 0.5
    assert ledger.path.read_bytes().startswith(content), "what was written before stays as it is"
    assert (len(ledger.entries()), ledger.entries()[-1]["previous"]) == (
        EXPECTED["entries"] + 1,
        EXPECTED["last"],
    )
    with pytest.raises(BudgetError, match="epsilon-total = 40"):
        ledger.charge(_next("79", noise=0.05), budget())


def test_a_stored_ledger_that_was_changed_or_rolled_back_is_refused(copy: Copy) -> None:
    ledger = ledger_in(copy("site"))
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines).replace(b'"epsilon":8.0', b'"epsilon":0.1', 1))
    with pytest.raises(LedgerError, match="line 2: edited"):
        ledger.entries()
    ledger.path.write_bytes(b"".join(lines[:-2]))
    last = json.loads(lines[-3])
    ledger.head.write_text(f"{len(lines) - 2} {last['hash']}\n")
    with pytest.raises(LedgerError):
        ledger.entries()


def test_a_request_that_was_answered_before_is_known(copy: Copy) -> None:
    request = read_request(STORED / "exchange" / "request.json", None)
    ledger = ledger_in(copy("site"))
    assert f"bundle-{request.id}" in ledger.answered()
    assert Gate(Policy(epsilon_total=40.0), ledger).spent() == pytest.approx(
        EXPECTED["spent"], rel=1e-9
    )
    assert "epsilon-total = 40.0" in POLICY


def test_a_stored_bundle_is_read_with_the_key_of_the_stored_site_and_learned_from(
    copy: Copy, tmp_path: Path
) -> None:
    exchange, site = copy("exchange"), copy("site")
    keys = read_keys(exchange / "keys.toml")
    key = private_key(NodeConfig(state_dir=str(site / "state")), "north")
    assert keys == {"north": public_key(key)}
    bundle = unpack_bundle(
        (exchange / "north.bundle").read_bytes(),
        read_request(exchange / "request.json", None),
        keys,
    )
    second = ledger_in(site).entries()[1]
    assert {name: bundle.manifest["ledger"][name] for name in ("sha256", "events", "epsilon")} == {
        name: second[name] for name in ("sha256", "events", "epsilon")
    }
    settings = {"output-dir": str(tmp_path / "runs")}
    folder = learn_from_files(
        exchange / "request.json", [exchange / "north.bundle"], exchange / "keys.toml", settings
    )
    assert metrics_of(folder)["status"] == "ok"
    assert (folder / "surrogates" / "north.pb").read_bytes() == bundle.payload
