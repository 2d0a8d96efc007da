"""Slides over gRPC: from `site join` of three hospitals to predictions and a judgement at one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fedsurrogate.common.signed_models.signed_model import read_signed_model
from tests.e2e.processes import coordinator, federation, site_command
from tests.grid import run_folders
from tests.slides import slides, write

HOSPITALS = ("north", "south", "east")
RUN = (
    'features.bag="mean" features.power-transform=1.0 sites=3 quorum=1.0 deadline=600.0 '
    'classes="benign,tumour" '
)


def node(home: Path, name: str) -> str:
    return (
        f'site="{name}" data="slides" data-dir="{home}/{name}" patient-column="case" '
        f'cache-dir="{home}/cache-{name}" state-dir="{home}/state-{name}" '
        f'check-log-dir="{home}/check-log-{name}" policy="{home}/policy.toml"'
    )


@pytest.mark.parametrize("tool", ["clam", "trident"])
def test_hospitals_with_slides_learn_together_and_use_the_model(tool: str, tmp_path: Path) -> None:
    for at, name in enumerate(HOSPITALS):
        write(tmp_path / name, tool, slides(200, at, prefix=name))
    write(tmp_path / "new", tool, new := slides(40, 9, prefix="new"))
    (tmp_path / "policy.toml").write_text(
        "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
    )
    for name in HOSPITALS:
        opened = site_command("ledger", "open", "--yes", "--node-config", node(tmp_path, name))
        assert opened.returncode == 0, opened.stderr
    with federation(tmp_path / "flower", [node(tmp_path, name) for name in HOSPITALS]) as running:
        settings = f'{RUN} output-dir="{tmp_path}/out"'
        done = coordinator("run", *running.control, "-c", settings, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = run_folders(tmp_path / "out")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["sites"] == {"invited": 3, "used": 3, "rejected": 0, "dropped": 0}
    model = read_signed_model(folder / "model.fedsurrogate").manifest.name
    own = ("--node-config", node(tmp_path, "north"))
    data = ("--data-dir", str(tmp_path / "new"))
    for words in (
        ("models", "use", model),
        ("predict", *data, "--out", str(tmp_path / "p.csv")),
        ("evaluate", *data, "--out", str(tmp_path / "page")),
    ):
        done = site_command(*words, *own)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    with (tmp_path / "p.csv").open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert len(found) == len(new)
    right = sum(a["decision"] == b.label for a, b in zip(found, new, strict=True))
    assert right > 30
    facts = json.loads((tmp_path / "page" / "evaluation.json").read_text())
    assert facts["report"]["averages"]["accuracy"]["value"] == pytest.approx(right / len(new))
