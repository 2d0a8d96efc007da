"""Findings and times over gRPC: from `coordinator run` to the page of `site evaluate` at each of three
hospitals with drawn X-rays.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.server_app.sample_data import write_xrays
from tests.e2e.processes import coordinator, federation, site_command
from tests.grid import run_folders

HOSPITALS = ("north", "south", "east")
# Where new patients are answered: one way leads to every hospital, and takes seconds there.
ANSWERED = {"findings": HOSPITALS, "times": HOSPITALS[:1]}
FINDINGS = ("Cardiomegaly", "Effusion", "Emphysema")
# Each hospital annotated two of the three.
SETS = {
    name: [each for each in FINDINGS if each != FINDINGS[at]] for at, name in enumerate(HOSPITALS)
}
COMMON = 'backbone="pixels" image-size=8 sites=3 quorum=1.0 deadline=600.0 '
PRIVATE = "secure-aggregation=true dropouts=0.0 epsilon=4.0 delta=1e-5"
RUNS = {
    "findings": COMMON + 'task="multilabel" label-columns="' + ",".join(FINDINGS) + '" label-sets="'
    "" + "; ".join(f"{name}={','.join(own)}" for name, own in SETS.items()) + '" ' + PRIVATE,
    "times": COMMON + 'task="survival" time-column="years" event-column="event" horizon=5.0 '
    'time-unit="years" ' + PRIVATE,
}


def node(home: Path, name: str) -> str:
    return (
        f'site="{name}" data="imagefolder" data-dir="{home}/xrays/hospitals/{name}" '
        f'patient-column="patient" target-columns="{",".join((*FINDINGS, "years", "event"))}" '
        f'cache-dir="{home}/cache-{name}" state-dir="{home}/state-{name}" '
        f'check-log-dir="{home}/check-log-{name}" policy="{home}/policy.toml"'
    )


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals after both runs; what they predicted, KIND-NAME.csv; and what
    one of them judged, KIND."""
    home = tmp_path_factory.mktemp("targets")
    write_xrays(home / "xrays", 3, 800, 0, 32)
    for name in HOSPITALS:
        file = home / "xrays" / "hospitals" / name / "table.csv"
        table = rows(file)
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, table[0])
            writer.writeheader()
            for row in table:
                known = {each: row[each] if each in SETS[name] else "" for each in FINDINGS}
                writer.writerow(row | known)
    (home / "policy.toml").write_text(
        'without-dp = true\nmechanisms = ["sums", "counts", "secure-aggregation"]\n'
        "epsilon-per-run = 4.0\nepsilon-total = 8.0\n"
        "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
    )
    for name in HOSPITALS:
        opened = site_command("ledger", "open", "--yes", "--node-config", node(home, name))
        assert opened.returncode == 0, opened.stderr
    with federation(home / "flower", [node(home, name) for name in HOSPITALS]) as running:
        for kind, settings in RUNS.items():
            output = home / "out" / kind
            wanted = f'{settings} output-dir="{output}"'
            done = coordinator("run", *running.control, "-c", wanted, cwd=home)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder,) = run_folders(output)
            model = read_signed_model(folder / "model.fedsurrogate").manifest.name
            for name in ANSWERED[kind]:
                own, new = node(home, name), str(home / "xrays" / "new")
                used = site_command("models", "use", model, "--node-config", own)
                assert used.returncode == 0, used.stderr
                steps = [("predict", "--out", f"{home}/{kind}-{name}.csv")]
                # One model on the same records is judged alike everywhere.
                if name == HOSPITALS[0]:
                    steps += [("evaluate", "--out", f"{home}/{kind}")]
                for words in steps:
                    done = site_command(*words, "--data-dir", new, "--node-config", own)
                    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return home


def metrics_of(home: Path, kind: str) -> dict[str, Any]:
    (folder,) = run_folders(home / "out" / kind)
    return dict(json.loads((folder / "metrics.json").read_text()))


@pytest.mark.parametrize("kind", RUNS)
def test_all_three_hospitals_are_in_the_model(home: Path, kind: str) -> None:
    metrics = metrics_of(home, kind)
    assert metrics["sites"] == {"invited": 3, "used": 3, "rejected": 0, "dropped": 0}
    assert metrics["privacy"]["epsilon"] == pytest.approx(4.0)


@pytest.mark.parametrize("kind", RUNS)
def test_new_patients_are_answered_at_every_hospital_and_judged(home: Path, kind: str) -> None:
    truth = rows(home / "xrays" / "new" / "table.csv")
    wanted = FINDINGS if kind == "findings" else ("risk", "survival 1")
    for name in ANSWERED[kind]:
        answered = rows(home / f"{kind}-{name}.csv")
        assert len(answered) == len(truth)
        # Noise may leave a finding out, which the model then names.
        columns = [column for column in wanted if column in answered[0]]
        assert columns
        for row in answered:
            assert not row["problem"]
            assert all(row[column] for column in columns)
    facts = json.loads((home / kind / "evaluation.json").read_text())
    assert facts["count"] == len(truth)
    picture = "<svg" if kind == "findings" else "data:image/png"
    assert picture in (home / kind / "evaluation.html").read_text()
    if kind == "findings":
        # Something is found under noise, although no hospital annotated all three.
        ranks = [
            each["auroc"]["value"] for each in facts["metric_values"].values() if "auroc" in each
        ]
        assert max(ranks) > 0.6


def test_the_ledger_of_a_hospital_has_both_runs_as_spent(home: Path) -> None:
    for name in HOSPITALS:
        done = site_command("ledger", "show", "--json", "--node-config", node(home, name))
        shown = json.loads(done.stdout)
        # Together less than the sum: what both spend is composed.
        assert 4.0 < shown["epsilon"] <= 8.0
        assert sum(entry["kind"] == "release" for entry in shown["entries"]) >= 2
