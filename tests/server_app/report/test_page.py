"""The page of a report: pictures on any screen, comparisons at true bytes, warnings, tables for a
spreadsheet.
"""

import base64
import csv
import io
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import get_filtered_fab_paths
from matplotlib.figure import Figure

from fedsurrogate.common.flower.environment import COMMAND_BEGAN
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.pages.svg import THEME
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.report.build import TEMPLATES, write_csv, write_report
from fedsurrogate.server_app.report.plots.rows import steps
from fedsurrogate.server_app.report.tables import TITLES, layout, warnings_of
from fedsurrogate.server_app.runs.reader import read_run
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.strategies.base.outcome import Outcome
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


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """All figures that are drawn."""
    found: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        found.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def test_a_run_that_sends_once_stands_at_its_bytes_next_to_rounds(
    tmp_path: Path, figures: list[Figure]
) -> None:
    once, rounds = tmp_path / "fedpft-111111", tmp_path / "fedavg-222222"
    once.mkdir()
    make_run(once, SITES, metrics={"rounds": [{"round": 1, "accuracy": 0.684, "bytes_up": None}]})
    full_run(rounds, method="fedavg")
    sent = json.loads((once / "metrics.json").read_text())["bytes"]["up"]
    assert [step.bytes for step in steps(read_run(once))[1]] == [sent]
    figures.clear()
    page = write_report(rounds, [once]).read_text()
    (by_bytes,) = (
        each
        for each in figures
        if each.axes[0].get_xlabel().startswith("sent up") and len(each.axes[0].lines) == 3
    )
    lines = {
        line.get_label(): list(map(float, line.get_xdata())) for line in by_bytes.axes[0].lines
    }
    assert lines["FedPFT"] == [sent]
    assert lines["FedAvg"] == [each["bytes_up"] for each in ROUNDS]
    low, high = by_bytes.axes[0].get_xlim()
    assert 0 < low < sent < ROUNDS[-1]["bytes_up"] < high
    assert ">0 B<" not in page


def test_a_run_that_sends_once_records_its_bytes(tmp_path: Path) -> None:
    from tests.grid import run_federation, sites

    folder = run_federation(tmp_path, sites(2), **{"head.min-steps": 20, "head.epochs": 1})
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["rounds"][0]["bytes_up"] == metrics["bytes"]["up"] > 0


def test_every_axis_has_a_title(tmp_path: Path, figures: list[Figure]) -> None:
    write_report(full_run(tmp_path / "a"), [full_run(tmp_path / "b")])
    assert len(figures) >= 7
    for figure in figures:
        # A bar of colours has its title above.
        for axes in (
            each
            for each in figure.axes
            if each.axison and not each.get_label().startswith("<colorbar")
        ):
            assert axes.get_xlabel(), figure.axes
            assert axes.get_ylabel() or not axes.get_yticks().size, axes.get_xlabel()


def test_no_two_ticks_have_the_same_text(tmp_path: Path, figures: list[Figure]) -> None:
    write_report(full_run(tmp_path / "a"))
    for figure in figures:
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            shown = [label.get_text() for label in axis.get_ticklabels() if label.get_text()]
            assert len(set(shown)) == len(shown), shown


@pytest.mark.parametrize("left_out", [(), ("counts",), ("counts", "progress"), ("curves",)])
def test_no_row_is_half_empty(left_out: tuple[str, ...]) -> None:
    keys = TITLES.keys() - {*left_out}
    places = layout(keys)
    assert {key for key, _, _ in places} == keys
    rows = "".join("1" if place else "h" for _, _, place in places)
    assert "h" not in rows.replace("hh", "")


def test_pictures_follow_a_dark_screen(tmp_path: Path) -> None:
    page = write_report(full_run(tmp_path / "a"), [full_run(tmp_path / "b")]).read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert re.findall(r"(?:fill|stroke|color): ?#[0-9a-f]+", drawn) == []
    assert "currentColor" in drawn
    # A share is no colour, and is set where it is used.
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", page)) - {"share"}
    light, dark = (
        page.split("@media (prefers-color-scheme: dark)")[0],
        page.split("@media (prefers-color-scheme: dark)")[1],
    )
    for name in used:
        assert f"--{name}:" in light, name
        assert f"--{name}:" in dark.split("}")[0], name


def brightness(colour: str) -> float:
    """Relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_of_texts_and_lines_can_be_read_on_both_screens() -> None:
    card = THEME["#ffffff"][1]
    for colour, (name, other) in THEME.items():
        if name in ("ink", "quiet", "blue", "orange", "green", "purple"):
            assert 1.05 / (brightness(colour) + 0.05) > 4.3, name
            assert (brightness(other) + 0.05) / (brightness(card) + 0.05) > 4.5, name


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


def test_what_accuracy_at_a_site_means_is_in_the_table(tmp_path: Path) -> None:
    _, page = report(full_run(tmp_path / "a", method="dpcvae"))
    text = flat(page.text)
    for words in (
        "Accuracy, own",
        "Accuracy, synthetic",
        "Accuracy, mixed",
        "61.0%",
        "72.0%",
        "83.0%",
        "λ",
        "0.4",
        METHODS["dpcvae"].usual.combination.tested,
    ):
        assert words in text
    (tmp_path / "b").mkdir()
    _, other = report(make_run(tmp_path / "b", SITES, metrics={"method": "local"}))
    assert f"Accuracy at a site: {METHODS['local'].usual.combination.tested}" in flat(other.text)
    assert "Accuracy, own" not in other.text


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
        # Too few records for an interval say nothing.
        ((0.5, None, None), (0.5, None, None), False),
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


def test_the_duration_is_what_the_command_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMAND_BEGAN, f"{time.time() - 100:f}")
    folder = RunWriter(parse_run({"output-dir": str(tmp_path)}), 7)
    folder.event("invited", sites=0)
    folder.finish(Outcome(), "ok")
    seconds = json.loads((folder.path / "metrics.json").read_text())["seconds"]
    assert seconds["command"] >= 100
    assert seconds["total"] < seconds["command"] - 90
    _, page = report(folder.path)
    assert re.search(rf"Duration{int(seconds['command']) // 60} min \d", flat(page.text))
    monkeypatch.delenv(COMMAND_BEGAN)
    other = RunWriter(parse_run({"output-dir": str(tmp_path)}), 8)
    other.finish(Outcome(), "ok")
    assert "command" not in json.loads((other.path / "metrics.json").read_text())["seconds"]


def test_the_start_of_the_processes_is_a_part_of_the_time(tmp_path: Path) -> None:
    _, page = report(full_run(tmp_path / "a"))
    assert "starting the processes 26.0 s (55.3%)" in flat(page.text)
    assert "Duration47.0 sthe command; the federation 21.0 s" in flat(page.text)


def test_a_run_in_rounds_shows_its_bytes_a_round(tmp_path: Path) -> None:
    _, page = report(
        full_run(tmp_path / "a", bytes={"up": 8_000_000, "down": 10, "up_per_site": {}})
    )
    assert "Sent up8 MB2 MB a round" in flat(page.text)


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
        *(ROOT / folder / "templates" for folder in ("common/pages", "server_app/export")),
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
