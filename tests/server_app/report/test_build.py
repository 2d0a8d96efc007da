import csv
import json
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.report.build import write_csv, write_report
from tests.hostile_names import faults_of_page, hostile_texts

DIGITS = [str(digit) for digit in range(10)]


def make_run(
    folder: Path,
    names: list[str],
    classes: list[str] = DIGITS,
    bad: dict[str, tuple[str, str]] | None = None,
    simulation: bool = True,
    metrics: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
) -> Path:
    """Write the folder of a finished run; `bad` maps a site to its event and reason.

    own: of the manifest.
    """
    chance, bad = random.Random(0), bad or {}
    accuracy = {name: chance.uniform(0.4, 0.9) for name in names if name not in bad}
    up = {name: chance.randrange(50_000, 200_000) for name in accuracy}
    events: list[dict[str, Any]] = [{"event": "invited", "site": name} for name in names]
    for name in names:
        if name in bad:
            events.append({"event": bad[name][0], "site": name, "reason": bad[name][1]})
        else:
            counts = {c: chance.randrange(40) for c in classes}
            events.append(
                {
                    "event": "replied",
                    "site": name,
                    "bytes": up[name],
                    "seconds": 2.5,
                    "counts": counts,
                }
            )
    result: dict[str, Any] = {
        "schema": 1,
        "method": "fedpft",
        "status": "ok",
        "sites": {"invited": len(names), "used": len(up)},
        "accuracy": {"per_site": accuracy},
        "bytes": {"up": sum(up.values()), "down": 1000, "up_per_site": up},
        "privacy": None,
        "rounds": [],
        "seconds": {"extract": 4.1, "fit": 2.0, "learn": 1.3, "total": 21.0},
    }
    if simulation:
        result["accuracy"] |= {
            "model": 0.684,
            "centralized": 0.702,
            "ensemble": 0.553,
            "average": 0.571,
        }
        result["bytes"]["compare"] = {
            "centralized": 10_000_000,
            "ensemble": 300_000,
            "average": 300_000,
        }
        cloud = {"x": [0.0, 1.0, 2.0], "y": [1.0, 0.0, 3.0], "label": [0, 1, 1]}
        projection = {"classes": classes, "real": cloud, "synthetic": cloud}
        (folder / "projection.json").write_text(json.dumps(projection))
    manifest = {
        "config": {"method": "fedpft", "fedpft.rank": 64, "seed": 0},
        "versions": {"torch": "2.7.0"},
        "seed": 0,
        "fingerprint": "abc123",
        "git_commit": "deadbeef",
        "run": "run-1",
        "started": "2025-01-01T10:00:00Z",
        "classes": classes,
    }
    (folder / "metrics.json").write_text(json.dumps(result | (metrics or {})))
    (folder / "manifest.json").write_text(json.dumps(manifest | (own or {})))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


class Page(HTMLParser):
    """What a browser would see: tags, attributes, text in order."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path) -> tuple[str, Page]:
    html = write_report(folder).read_text(encoding="utf-8")
    return html, Page(html)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("simulation", [True, False])
@pytest.mark.parametrize("count", [1, 10, 300])
def test_report_is_one_file_that_loads_nothing(
    tmp_path: Path, count: int, simulation: bool
) -> None:
    html, page = report(make_run(tmp_path, [str(i) for i in range(count)], simulation=simulation))
    assert "script" not in page.tags
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert all(
        link.startswith(("#", "data:image/png;base64,", "data:text/csv;charset=utf-8;base64,"))
        for link in page.links
    )
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert "nan" not in re.findall(r"[a-z]+", re.sub(r"base64,[^\"]*", "", html))


def test_ids_are_unique_over_all_pictures_and_every_reference_resolves(tmp_path: Path) -> None:
    html, page = report(make_run(tmp_path, DIGITS))
    assert len(set(page.ids)) == len(page.ids)
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', html)
    assert {a or b for a, b in used} <= set(page.ids)


def test_a_simulation_shows_all_pictures_and_says_that_real_points_stay_in_hospitals(
    tmp_path: Path,
) -> None:
    _, page = report(make_run(tmp_path, DIGITS))
    assert page.tags.count("svg") == 5
    assert "real points never leave a hospital" in flat(page.text)
    assert (
        "FedPFT on the surrogates of 10 of 10 sites reaches 68.4% accuracy, against 70.2%"
        in flat(page.text)
    )
    assert 'role="alert"' not in report(tmp_path)[0]


def test_every_missing_site_is_named_with_its_reason(tmp_path: Path) -> None:
    bad = {
        f"h{i}": ("dropped" if i % 2 else "rejected", f"reason number {i}")
        for i in range(0, 300, 7)
    }
    _, page = report(make_run(tmp_path, [f"h{i}" for i in range(300)], bad=bad))
    banner = flat(page.text).split("not in this result")[1].split("Duration")[0]
    for name, (what, why) in bad.items():
        assert f"{name}: {what}, {why}" in banner


@settings(max_examples=6, deadline=None)
@given(
    hostile_texts().filter(lambda text: 0 < len(text.encode(errors="ignore")) < 200),
    hostile_texts().filter(lambda text: len(text) < 200),
)
@example("</title><x-evil>", "</title><x-evil>")
def test_a_run_of_any_name_method_and_settings_makes_no_markup(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str
) -> None:
    """Another's run folder may have any name, and any text in its files."""
    name = re.sub(r"[/\x00\ud800-\udfff]", "-", name)
    folder = tmp_path_factory.mktemp("runs") / (f"{name}-" if name in (".", "..") else name)
    folder.mkdir()
    manifest = {"config": {"method": text, "fedpft.public": text}, "git_commit": text, "run": text}
    manifest |= {"fingerprint": text, "started": text, "versions": {text: text}}
    make_run(folder, ["a", "b"], ["x"], simulation=False, metrics={"method": text}, own=manifest)
    assert faults_of_page(write_report(folder).read_text(encoding="utf-8")) == []


def test_the_same_folder_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, [str(i) for i in range(40)], classes=[f"c{i}" for i in range(120)])
    first = write_report(tmp_path).read_bytes()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert write_report(tmp_path).read_bytes() == first


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    events = [
        {"event": "invited", "site": "0"},
        {"event": "invited", "site": "1"},
        {"event": "replied", "site": "0", "bytes": 1200, "counts": {"cat": 3}},
        {"event": "failed", "reason": "1 of 2 sites replied, quorum needs 2"},
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + '\n{"event": "tru')
    _, page = report(tmp_path)
    text = flat(page.text)
    assert "This run did not finish: 1 of 2 sites had replied." in text
    assert "The run failed 1 of 2 sites replied, quorum needs 2" in text
    for note in (
        "metrics.json is missing",
        "manifest.json is missing",
        "events.jsonl has 1 unreadable line,",
    ):
        assert note in text
    assert "Not drawn" in text


@pytest.mark.parametrize(
    "part", ["metrics.json", "manifest.json", "events.jsonl", "projection.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        "",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("{", "[]", "null")),
        '{"accuracy": 3, "sites": [], "config": 1, "real": {"x": "a"}}',
    ],
)
def test_a_broken_part_never_stops_the_report(tmp_path: Path, part: str, content: str) -> None:
    make_run(tmp_path, DIGITS)
    (tmp_path / part).write_text(content)
    assert "</html>" in report(tmp_path)[0]


def test_numbers_that_are_none_are_treated_as_missing(tmp_path: Path) -> None:
    accuracy = {"model": float("nan"), "centralized": None, "per_site": {"a": "high", "b": True}}
    html, page = report(
        make_run(tmp_path, ["a", "b"], metrics={"accuracy": accuracy, "seconds": None})
    )
    assert "its accuracy was not measured" in flat(page.text)
    assert "nan%" not in html


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "runs")
    with pytest.raises(RunError, match=r"runs' is not a run folder"):
        write_report(tmp_path / "runs")


def test_without_privacy_the_report_says_so(tmp_path: Path) -> None:
    assert (
        "Nothing protects single records in this run" in report(make_run(tmp_path, ["a"]))[1].text
    )


def test_privacy_is_listed_by_site_and_a_site_without_budget_is_named(tmp_path: Path) -> None:
    privacy = {"epsilon": 1.5, "delta": 1e-05, "per_site": {"a": {"epsilon": 1.5, "delta": 1e-05}}}
    _, page = report(make_run(tmp_path, ["a", "b"], metrics={"privacy": privacy}))
    text = flat(page.text)
    assert "Nothing protects single records in this run" not in text
    assert "ε = 1.5" in text
    assert "Non-private: b. No budget is recorded" in text


def csv_file(files: list[Path], name: str) -> list[list[str]]:
    """The rows of one of the written tables."""
    (file,) = (each for each in files if each.stem == name)
    with file.open(newline="", encoding="utf-8-sig") as stream:
        return list(csv.reader(stream))


def test_runs_are_drawn_beside_each_other_and_those_without_a_curve_refused(tmp_path: Path) -> None:
    for name, rounds in (("a-111111", [0.2, 0.5]), ("b-222222", [0.3, 0.4]), ("c-333333", [])):
        (tmp_path / name).mkdir()
        reported = [
            {"round": i + 1, "accuracy": a, "bytes_up": 1000 * (i + 1)}
            for i, a in enumerate(rounds)
        ]
        reported = reported or [{"round": 1, "accuracy": None}]
        (tmp_path / name / "metrics.json").write_text(
            json.dumps({"status": "ok", "method": "fedavg", "rounds": reported})
        )
    page = write_report(tmp_path / "a-111111", [tmp_path / "b-222222"]).read_text()
    assert "Compared with other runs" in page
    assert "FedAvg 222222" in page
    rows = csv_file(
        write_csv(tmp_path / "a-111111", tmp_path / "csv", [tmp_path / "b-222222"]), "comparison"
    )
    assert rows[1] == ["FedAvg", "1", "1000", "0.2"]
    assert rows[4] == ["FedAvg 222222", "2", "2000", "0.4"]
    assert "comparison.csv" in page
    assert "other records" not in page
    with pytest.raises(RunError, match="c-333333"):
        write_report(tmp_path / "a-111111", [tmp_path / "c-333333"])


def private_site(**more: Any) -> dict[str, Any]:
    noise = {"counts": 5.4, "sums": 1.5, "squares": 1.7}
    signal = {"counts": 9.0, "sums": 0.0, "squares": None}
    facts = {
        "epsilon": 1.0,
        "delta": 1e-05,
        "unit": "patient",
        "mechanism": "sums",
        "noise_multiplier": 3.73,
    }
    return facts | {"noise": noise, "signal_to_noise": signal} | more


def test_the_promise_stands_in_plain_words_with_what_it_leaves_open(tmp_path: Path) -> None:
    privacy = {
        "mechanism": "sums",
        "epsilon": 1.0,
        "delta": 1e-05,
        "relation": "add or remove one patient",
        "covers": "all that is sent",
        "not_covered": ["<i>that a site takes part</i>"],
        "per_site": {"a": private_site(), "b": private_site()},
        "dropped_classes": ["3", "7"],
    }
    html, page = report(make_run(tmp_path, ["a", "b"], metrics={"privacy": privacy}))
    text = flat(page.text)
    assert "Single patients are protected." in text
    assert "add or remove one patient in a site's training data" in text
    assert "(2.72 for ε = 1)" in text
    assert "(1 in 100,000)" in text
    assert "at most 73.1% sure afterwards" in text
    assert "<li>&lt;i&gt;that a site takes part" in html
    assert "Classes 3, 7: not learned" in text
    assert "Patients (noisy)" in text
    assert "Signal/noise, class sizes" in text
    assert html.count('<td class="number">9</td>') == 2


@pytest.mark.parametrize(
    "privacy",
    [
        {"per_site": {"a": 3, "b": {"epsilon": "x", "noise": [], "signal_to_noise": {"sums": "y"}}}},
        {"epsilon": 1e9, "delta": 0.0, "per_site": [], "not_covered": "none", "dropped_classes": 1},
        {"epsilon": -1, "delta": -1},
        {"epsilon": 0.5, "per_site": {"a": {"signal_to_noise": {"sums": 1e200, "counts": 0}}}},
    ],
)  # fmt: skip
def test_odd_privacy_never_stops_the_report(tmp_path: Path, privacy: Any) -> None:
    assert "</html>" in report(make_run(tmp_path, ["a", "b"], metrics={"privacy": privacy}))[0]


def test_a_run_that_asked_for_privacy_and_used_nothing_promises_nothing(tmp_path: Path) -> None:
    make_run(
        tmp_path, ["a"], metrics={"status": "failed", "failure": "1 of 4 sites, the quorum is 2"}
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["config"] |= {"epsilon": 4.0, "delta": 1e-5}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    text = flat(report(tmp_path)[1].text)
    assert "No surrogate was used, so there is no privacy guarantee to report" in text
    assert "Nothing protects" not in text
