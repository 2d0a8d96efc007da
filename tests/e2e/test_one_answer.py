"""An operator asks whether a private run is possible, in every way that there is: ledger, doctor, a check
of the run, the coordinator's check, and the run itself. All give one answer, and a refusal is free.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.job import MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import PUBLIC_SENTENCES, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides
from tests.commands import site
from tests.grid import run_federation

RUN = 'epsilon=1.0 delta=1e-5 classes="no,yes" image-size=4 fedpft.covariance="spherical"'
Shown = pytest.CaptureFixture[str]


@dataclass
class Hospital:
    """West, with 30 images of each of two classes and an open ledger. A test changes one thing."""

    home: Path
    text: str

    @property
    def node(self) -> NodeConfig:
        return parse_node_config(parse_overrides([self.text]))

    def write_policy(self, **rules: object) -> None:
        """Its policy file, with these rules."""
        lines = [f"{key.replace('_', '-')} = {json.dumps(value)}" for key, value in rules.items()]
        (self.home / "policy.toml").write_text("\n".join(lines))


@pytest.fixture
def west(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> Hospital:
    draw = np.random.default_rng(0)
    for at, name in enumerate(("no", "yes")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(30):
            pixels = draw.integers(100 * at, 100 * at + 80, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    text = f'site="west" data="imagefolder" data-dir="{tmp_path}/data" classes="no,yes" '
    text += (
        f'state-dir="{tmp_path}/state" cache-dir="{tmp_path}/cache" check-log-dir="{tmp_path}/log"'
    )
    found = Hospital(tmp_path, f'{text} policy="{tmp_path}/policy.toml"')
    found.write_policy(epsilon_total=4.0)
    assert site(monkeypatch, "ledger", "open", "--node-config", found.text) == 0
    capsys.readouterr()
    return found


def nothing(_: Hospital) -> None:
    pass


def released_without_privacy(west: Hospital) -> None:
    """Once, while the policy allowed it; and the total is raised as if that helped."""
    exact = parse_run(parse_overrides(['classes="no,yes" image-size=4']))
    west.write_policy(without_dp=True)
    open_gate(west.node, "imagefolder", "7").let_out(entry(exact, "7", MethodOutput(b"exact")))
    west.write_policy(epsilon_total=4.0)


def protected_another_unit(west: Hospital) -> None:
    run = parse_run(parse_overrides([RUN]))
    release = entry(run, "7", MethodOutput(b"noise", run.mechanism_for("patient")))
    open_gate(west.node, "imagefolder", "7").let_out(release)


def loosened(west: Hospital) -> None:
    west.write_policy(epsilon_total=9.0)


def spent(west: Hospital) -> None:
    run = parse_run(parse_overrides([RUN]))
    release = entry(run, "7", MethodOutput(b"noise", run.mechanism))
    open_gate(west.node, "imagefolder", "7").let_out(release)
    west.write_policy(epsilon_total=1.0)


def renamed(west: Hospital) -> None:
    (west.home / "data" / "no").rename(west.home / "data" / "nein")


def asks_an_officer(west: Hospital) -> None:
    west.write_policy(require_officer=True)


# What the coordinator reads of it: no path, no number.
SENTENCES = "|".join(PUBLIC_SENTENCES[code] for code in ("policy", "budget", "data"))
CASES = [
    (nothing, ""),
    (released_without_privacy, "1 releases left without privacy before"),
    (protected_another_unit, "a ledger counts one unit"),
    (loosened, "epsilon-total = 9 (was 4)"),
    (spent, "epsilon-total = 1"),
    (renamed, "has no folder of 'no'"),
    (asks_an_officer, "no officer of this site has approved"),
]


@pytest.mark.parametrize(("change", "why"), CASES, ids=[each.__name__ for each, _ in CASES])
def test_ledger_doctor_check_and_run_give_one_answer(
    change: Callable[[Hospital], None],
    why: str,
    west: Hospital,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Shown,
) -> None:
    change(west)

    def typed(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        return site(monkeypatch, *words, "--node-config", west.text), capsys.readouterr().out

    before = json.loads(typed("ledger", "show", "--json")[1])
    assert why in before["refusal"]
    assert bool(before["refusal"]) == bool(why)
    _, shown = typed("ledger", "show")
    assert ("more runs" in shown) == (not why)
    assert why in shown
    _, doctor = typed("doctor", "--json", "-c", RUN)
    (found,) = (each for each in json.loads(doctor) if each["what"] == "a run")
    assert (found["state"] != "FAIL") == (not why)
    assert why in found["found"]
    capsys.readouterr()
    code = site(monkeypatch, "check", "--json", "-c", RUN, "--node-config", west.text)
    check = capsys.readouterr()
    assert (code == 0) == (not why)
    assert why in check.out + check.err
    if not why:
        facts = json.loads(check.out)
        assert before["runs_left"] == facts["runs_left"] > 0
        assert f"{facts['runs_left']} such runs fit" in found["found"]

    # The coordinator's check is free; the run costs one release, or nothing where it is refused.
    own = {"epsilon": 1.0, "delta": 1e-5, "classes": "no,yes", "image_size": 4, "method": "fedpft"}
    flat = parse_overrides([west.text])
    for more in ({"check_only": True}, {}):
        with pytest.raises(RunError, match=SENTENCES) if why else nullcontext():
            run_federation(west.home / "runs", [flat], **own, **more)
        charged = len(json.loads(typed("ledger", "show", "--json")[1])["entries"])
        assert charged - len(before["entries"]) == (not why and not more)


@pytest.mark.parametrize(
    ("classes", "noise"),
    [("normal,pneumonia", True), ("nein,yes", True), ("no,yes,covid", False), ("no,yes", False)],
)
def test_a_run_that_writes_classes_otherwise_than_the_site_costs_nothing(
    classes: str, noise: bool, west: Hospital
) -> None:
    """As a coordinator types the example of a page: it was charged in full, for noise alone."""
    own = {"epsilon": 1.0, "delta": 1e-5, "classes": classes, "image_size": 4, "method": "fedpft"}
    for more in ({"check_only": True}, {}):
        with pytest.raises(RunError, match=PUBLIC_SENTENCES["data"]) if noise else nullcontext():
            run_federation(west.home / "runs", [parse_overrides([west.text])], **own, **more)
    log = (west.home / "state/site.log").read_text()
    assert ("The coordinator and all sites need the same names" in log) == noise
    assert len(open_gate(west.node, "imagefolder", "").ledger.entries()) == (not noise)
