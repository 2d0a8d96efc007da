"""The list of what the three papers print is complete, and each of its rows has evidence that exists."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.harness.results import RESULTS, stored
from benchmarks.harness.samples import sample_folder
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import known_keys
from fedsurrogate.common.settings.settings import Settings
from fedsurrogate.server_app.runs.presets import (
    preset_notes,
    preset_settings,
    presets,
    typed_settings,
)
from tests.documents import DOCS, ROOT

# What each paper numbers: how many, or their names.
NUMBERED: dict[str, dict[str, int | list[str]]] = {
    "FedPFT": {
        "table": 7,
        "figure": 12,
        "algorithm": 1,
        "theorem": ["4.1", "6.1", "C.1"],
        "equation": 28,
    },
    "FedLAP-DP": {
        "table": 5,
        "figure": 16,
        "algorithm": 3,
        "theorem": ["3.4", "5.4", "5.5", "5.6", "5.7", "5.8"],
        "equation": 21,
    },
    "DP-CVAE": {"table": 1, "figure": 3, "equation": 5},
}
# Settings that the papers' texts state, by preset, defaults among them.
FEDLAP = {
    "images_per_class": 50,
    "trajectories": 1,
    "model_steps": 0,
    "image_steps": 5,
    "trust_radius": 10.0,
    "loops": 5,
    "image_learning_rate": 100.0,
    "learning_rate": 0.1,
    "cosine": True,
    "mse_weight": 0.1,
    "rule": "min",
    "width": 128,
    "memory": 0.0,
}
PRIVATE = FEDLAP | {
    "images_per_class": 10,
    "trajectories": 4,
    "model_steps": 2,
    "image_steps": 10,
    "trust_radius": 1.5,
    "noise_multiplier": 1.0,
}
del PRIVATE["rule"]  # The radius is a constant.
STATED: dict[str, dict[str, dict[str, Any]]] = {
    "fedlap-cifar10": {"fedlap": FEDLAP},
    "fedlap-mnist": {"fedlap": FEDLAP},
    "fedlap-fashion-mnist": {"fedlap": FEDLAP},
    "fedlap-dp-cifar10": {},
    "fedlap-dp-cifar10-paper": {"fedlap": PRIVATE},
    "fedpft-paper": {
        "fedpft": {"covariance": "diag", "components": 10, "samples_per_component": 1, "bits": 16},
        "head": {"learning_rate": 1e-4, "solver": "sampled"},
    },
    "dpcvae-paper": {
        "dpcvae": {
            "rounds": 1 + 50,
            "local_epochs": 5,
            "optimiser": "sgd",
            "learning_rate": 1e-3,
            "clip": 1.5,
            "learned_variance": False,
            "class_prior": False,
        },
        "head": {"learning_rate": 1e-3, "epochs": 100},
        "baseline": {"validation": 0.2 / 0.8},
    },
}
TEXTS = {"FedPFT": "fedpft.txt", "FedLAP-DP": "fedlap-dp.txt", "DP-CVAE": "dp-cvae.txt"}
LISTED = pages.papers()
ROWS = [(name, row) for name, each in LISTED.items() for row in each["rows"]]
PARTS = [(name, part) for name, row in ROWS for part in row.get("measured", ())]


def names_of(count: int | list[str]) -> list[str]:
    return [str(each) for each in range(1, count + 1)] if isinstance(count, int) else count


def things(text: str) -> Iterator[tuple[str, str]]:
    """Each thing that an id names: "tables 1, 4-5; figure 2" are four."""
    for group in text.split("; "):
        kind, numbers = group.split(" ", 1)
        for each in numbers.split(", "):
            first, _, last = each.partition("-")
            several = map(str, range(int(first), int(last) + 1)) if last else [first]
            yield from ((kind.rstrip("s"), number) for number in several)


def paper_text(name: str) -> str:
    file = sample_folder() / "papers" / TEXTS[name]
    if not file.is_file():
        pytest.skip(f"{file} is not beside the checkout")
    return file.read_text()


@pytest.mark.parametrize("name", NUMBERED)
def test_everything_that_a_paper_numbers_is_listed_once(name: str) -> None:
    expected = [
        (kind, number) for kind, count in NUMBERED[name].items() for number in names_of(count)
    ]
    found = [each for row in LISTED[name]["rows"] for each in things(row["id"])]
    assert sorted(found) == sorted(expected)
    assert LISTED.keys() == NUMBERED.keys()


@pytest.mark.parametrize("name", NUMBERED)
def test_no_paper_numbers_more_than_this_test_expects(name: str) -> None:
    text = paper_text(name)
    patterns = {
        "table": r"\bTable (\d+)\b",
        "figure": r"\bFig(?:ure|\.) (\d+)\b",
        "algorithm": r"\bAlgorithm (\d+)\b\W*Fed",
        "theorem": r"\*?\bTheorem ([\dA-C]\.\d+)\.? ",
        "equation": r"(?m)[ \n]\((\d\d?)\)(?:\$\$)?\s*$",
    }
    for kind, expected in NUMBERED[name].items():
        found = set(re.findall(patterns[kind], text))
        assert found <= {*names_of(expected)}, kind
        assert isinstance(expected, list) or str(expected) in found, kind


def test_every_script_and_result_of_a_paper_is_named() -> None:
    scripts = {*(ROOT / "benchmarks" / "reproduce").glob("[a-z]*.py")}
    assert scripts <= {pages.script_of(part["result"]) for _, part in PARTS}
    results = {file.stem for file in RESULTS.glob("reproduce-*.json")}
    assert results <= {part["result"] for _, part in PARTS}


@pytest.mark.parametrize(
    ("name", "part"), PARTS, ids=[f"{part['result']}-{part['column']}" for _, part in PARTS]
)
def test_figures_are_in_the_results_and_the_papers_are_those_that_it_prints(
    name: str, part: dict[str, Any]
) -> None:
    assert pages.measured(part)
    columns = [each for each in stored(part["result"])["columns"] if each.startswith("paper")]
    for row_name, printed in part["figures"].items():
        row = pages.row_named(part["result"], row_name)
        theirs = [str(row[each]).partition(" ±")[0] for each in columns]
        known = [float(each) for each in theirs if re.fullmatch(r"[\d.]+", each)]
        assert printed == "" or not known or printed in known, row_name


@pytest.mark.parametrize("name", NUMBERED)
def test_figures_of_a_paper_stand_in_its_text(name: str) -> None:
    text = paper_text(name).replace(",", "")
    for own, part in PARTS:
        for row, printed in part["figures"].items() if own == name else ():
            if printed != "":
                number = f"{abs(printed):g}".removeprefix("0")
                assert re.search(rf"(?<![\d.]){re.escape(number)}0*(?!\d)", text), (row, printed)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}-{row['id']}" for name, row in ROWS])
def test_a_row_says_how_it_differs_and_shows_it(name: str, row: dict[str, Any]) -> None:
    statuses = re.findall(r"(?m)^\| (\w[\w ]+) \| ", (DOCS / "papers.md").read_text())[1:]
    assert row["status"] in statuses
    why, keys = row.get("why", ""), {*known_keys(Settings)}
    if row["status"] in ("differs", "reproduced"):
        assert why
        assert row.get("measured") or re.search(r"`|\]\(", why), "no result, setting, page or file"
    assert {*re.findall(r"`([a-z-]+\.[a-z-]+)=", why)} <= keys
    assert {*re.findall(r"[Pp]reset `([a-z\d-]+)`", why)} <= {*presets()}


def test_the_page_leads_to_all_rows() -> None:
    page = (DOCS / "papers.md").read_text()
    assert "](../benchmarks/results/papers.md)" in page
    for section in re.findall(r"docs/papers\.md#([\w-]+)\)", pages.papers_page()):
        headings = re.findall(r"(?m)^#+ (.+)$", page)
        assert section in {
            re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
        }


@pytest.mark.parametrize("name", STATED)
def test_presets_of_the_papers_have_what_these_state_and_say_how_they_differ(name: str) -> None:
    settings = parse_run(preset_settings(name)).settings
    for section, stated in STATED[name].items():
        own = getattr(settings, section)
        assert {key: getattr(own, key) for key in stated} == stated
    assert len([note for note in preset_notes(name) if note.startswith("Differs")]) > 3
    assert settings.max_share == 0 or settings.epsilon


@pytest.mark.parametrize("data", ["digits", "features"])
@pytest.mark.parametrize("name", STATED)
def test_a_preset_of_a_paper_says_how_to_run_it_in_minutes(name: str, data: str) -> None:
    """With settings that fit it, of a small run."""
    (line,) = [
        note
        for note in preset_notes(name)
        if re.search(rf"^In (minutes|seconds) on .*\b{data}\b", note)
    ]
    assert f"-c {name}" in line
    small = re.findall(r"-c '(.*?)'", line)
    run = parse_run(typed_settings([name, *small]))
    assert run.rounds <= 6
    assert run.settings.fedlap.width <= 32
    assert run.settings.data == ("safetensors" if small and "DIR" in small[-1] else "digits")
