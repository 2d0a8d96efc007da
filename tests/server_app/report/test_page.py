"""The page of a report: pictures on any screen, comparisons at true bytes, warnings, tables for a
spreadsheet.
"""

import base64
import csv
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import get_filtered_fab_paths

from fedsurrogate.server_app.report.build import TEMPLATES, write_csv, write_report
from fedsurrogate.server_app.report.tables import warnings_of
from fedsurrogate.server_app.runs.reader import read_run
from fedsurrogate.strategies.robustness import harm
from tests.documents import ROOT
from tests.server_app.report.test_build import flat, make_run, report

SITES = ["a", "b", "c"]
ROUNDS = [
    {"round": n + 1, "accuracy": 0.3 + 0.1 * n, "bytes_up": 2_000_000 * (n + 1), "epsilon": n + 1.0}
    for n in range(4)
]
DOWNSTREAM = {
    "accuracy-local": 0.61,
    "accuracy-synthetic": 0.72,
    "accuracy-mixed": 0.83,
    "share": 0.4,
}
PRIVACY = {
    "epsilon": 1.5,
    "delta": 1e-05,
    "per_site": {
        name: {"epsilon": 1.5, "signal_to_noise": {"sums": 3.0, "counts": 2.0}} for name in SITES
    },
}


def full_run(folder: Path, **metrics: Any) -> Path:
    """A run that has every picture but sheets of images."""
    folder.mkdir()
    effects = {name: {"harm": 0.02, "gain": 0.1, "kept": 1.0} for name in SITES}
    seconds = {"extract": 4.1, "learn": 1.3, "total": 21.0, "command": 47.0}
    every = {
        "rounds": ROUNDS,
        "card": {"effects": effects},
        "downstream": dict.fromkeys(SITES, DOWNSTREAM),
        "privacy": PRIVACY,
        "seconds": seconds,
    }
    return make_run(folder, SITES, metrics=every | metrics)


@pytest.mark.parametrize(
    ("task", "most", "out"),
    [
        ("classification", harm.MOST, harm.OUT),
        ("multilabel", harm.AREA.most, harm.AREA.out),
        ("regression", harm.CONCORDANCE.most, harm.CONCORDANCE.out),
        ("survival", harm.CONCORDANCE.most, harm.CONCORDANCE.out),
    ],
)
def test_what_a_site_may_cost_is_what_the_defence_allows(
    tmp_path: Path, task: str, most: float, out: float
) -> None:
    folder = full_run(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"]["task"] = task
    (folder / "manifest.json").write_text(json.dumps(manifest))
    words = f"costs more than {100 * most:g} % counts less; above {100 * out:g} % it is left out"
    assert words in flat(write_report(folder).read_text())


def test_a_run_that_sends_once_records_its_bytes(tmp_path: Path) -> None:
    from tests.grid import run_federation, sites

    folder = run_federation(tmp_path, sites(2), **{"head.min-steps": 20, "head.epochs": 1})
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["rounds"][0]["bytes_up"] == metrics["bytes"]["up"] > 0


def tables(page: str) -> dict[str, list[list[str]]]:
    """The tables behind the links of a page."""
    found = re.findall(
        r'download="(\w+)\.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', page
    )
    return {
        name: list(csv.reader(io.StringIO(base64.b64decode(text).decode("utf-8-sig"))))
        for name, text in found
    }


def test_every_table_can_be_taken_as_csv(tmp_path: Path) -> None:
    run = full_run(tmp_path / "a")
    page = write_report(run).read_text()
    found = tables(page)
    assert set(found) == {"sites", "classes", "rounds", "privacy", "settings"}
    columns = ["site", "status", "reason", "records", "bytes", "seconds", "accuracy"]
    assert found["sites"][0] == [*columns, "accuracy own", "accuracy synthetic", "accuracy mixed"]
    assert [row[0] for row in found["sites"][1:]] == SITES
    metrics = json.loads((run / "metrics.json").read_text())
    assert [int(row[4]) for row in found["sites"][1:]] == [
        metrics["bytes"]["up_per_site"][name] for name in SITES
    ]
    assert [float(row[1]) for row in found["rounds"][1:]] == pytest.approx(
        [each["accuracy"] for each in ROUNDS]
    )
    assert ["fedpft.rank", "64", "0"] in found["settings"]
    files = write_csv(run, tmp_path / "out")
    assert {
        file.stem: list(csv.reader(file.open(encoding="utf-8-sig", newline=""))) for file in files
    } == found


def counts(folder: Path, *per_site: dict[str, int]) -> None:
    """Replace the numbers of records that the sites have reported."""
    lines = [
        {"event": "replied", "site": name, "counts": each}
        for name, each in zip(SITES, per_site, strict=True)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ("exact", "No site has a record of classes rare, odd:"),
        ("noisy", "Perhaps no site has a record of 'rare', 'odd':"),
    ],
)
def test_classes_that_no_site_has_are_named(known: str, words: str, tmp_path: Path) -> None:
    card = {"without_records": ["rare", "odd"], "records_by_class": known}
    run = make_run(tmp_path, SITES, metrics={"card": card})
    (warning,) = warnings_of(read_run(run))
    assert warning.startswith(words)
    _, page = report(run)
    assert warning in flat(page.text)


@pytest.mark.parametrize(
    ("accuracy", "warned"),
    [
        ({"model": 0.114, "majority": 0.103}, True),
        ({"model": 0.60, "majority": 0.62}, True),
        ({"model": 0.684, "majority": 0.103}, False),
        # Not measured: the classes of the sites' records. The largest has 0.6 of them.
        ({"model": 0.61}, True),
        ({"model": 0.70}, False),
        # At the sites: always "no" reaches (0.8 + 0.5 + 0.5) / 3 there.
        ({"model": None, "per_site": dict.fromkeys(SITES, 0.6)}, True),
        ({"model": None, "per_site": dict.fromkeys(SITES, 0.7)}, False),
    ],
)
def test_an_accuracy_no_better_than_the_majority_baseline_is_named(
    tmp_path: Path, accuracy: dict[str, Any], warned: bool
) -> None:
    run = make_run(
        tmp_path, SITES, classes=["no", "yes"], metrics={"accuracy": {"per_site": {}} | accuracy}
    )
    last = (15, 15) if accuracy.get("per_site") else (10, 20)
    counts(
        run,
        {"no": 40, "yes": 10},
        {"no": 10, "yes": 10},
        dict(zip(("no", "yes"), last, strict=True)),
    )
    found = warnings_of(read_run(run))
    # Accuracy alone does not show it.
    assert ["is not above that of the majority baseline" in each for each in found] == [
        True
    ] * warned
    _, page = report(run)
    assert ("is not above that of the majority baseline" in page.text) == warned
    assert "no better than chance" not in page.text


@pytest.mark.parametrize(
    ("auroc", "balanced", "warned"),
    [
        # AUROC .900 (.858 to .943) with an accuracy of 74.6 % below the largest class, 87.6 %.
        ((0.9, 0.858, 0.943), (0.78, 0.7, 0.83), False),
        ((0.9, 0.858, 0.943), (0.5, 0.47, 0.55), False),
        ((0.52, 0.44, 0.6), (0.6, 0.55, 0.65), False),
        ((0.52, 0.44, 0.6), (0.5, 0.47, 0.55), True),
        ((0.2, 0.1, 0.3), (0.3, 0.2, 0.4), True),
        # Too few records for an interval show nothing.
        ((0.5, None, None), (0.5, None, None), True),
        ((0.9, None, None), (0.9, None, None), True),
        ((None, None, None), (0.5, 0.4, 0.6), True),
    ],
)
def test_a_model_may_be_no_better_than_chance_by_the_intervals_of_auroc_and_balanced_accuracy(
    tmp_path: Path, auroc: Any, balanced: Any, warned: bool
) -> None:
    names = ("value", "low", "high")
    averages = {
        name: dict(zip(names, values, strict=True)) | {"support": 97}
        for name, values in (("macro_auroc", auroc), ("balanced_accuracy", balanced))
    }
    quality = {
        "classes": ["no", "yes"], "records": 97, "unknown": 0, "units": 0, "majority": 0.876,
        "averages": averages,
    }  # fmt: skip
    accuracy = {"model": 0.746, "majority": 0.876, "per_site": {}}
    run = make_run(
        tmp_path, SITES, classes=["no", "yes"], metrics={"accuracy": accuracy, "quality": quality}
    )
    found = [each for each in warnings_of(read_run(run)) if "chance" in each]
    assert ["no better than chance" in each for each in found] == [True] * warned
    assert not any("learned nothing" in each or "largest class" in each for each in found)
    _, page = report(run)
    assert ("no better than chance" in page.text) == warned
    if auroc[0]:
        assert f"an AUROC of {auroc[0]:.3f} and 74.6% accuracy" in flat(page.text)


def test_flower_packs_every_template() -> None:
    """The app of a run is what Flower packs. It draws the report."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = ("common", "client_app", "server_app", "strategies", "fedsurrogate")
    files = [
        *(file for folder in folders for file in (ROOT / folder).rglob("*.*")),
        ROOT / "LICENSE",
        ROOT / "README.md",
    ]
    packed = get_filtered_fab_paths(
        {file.relative_to(ROOT).as_posix(): file for file in files}, config
    )
    folders_of_templates = [
        TEMPLATES.resolve(),
        *(
            ROOT / folder / "templates"
            for folder in ("common/pages", "client_app/audit", "server_app/export")
        ),
    ]
    tables = {f"server_app/runs/{name}.toml" for name in ("covers", "impact")}
    tables.add("common/renamed.toml")
    templates = tables | {
        file.relative_to(ROOT).as_posix()
        for folder in folders_of_templates
        for file in folder.iterdir()
    }
    assert "server_app/report/templates/page.html.j2.md" in templates
    assert templates <= set(packed)
