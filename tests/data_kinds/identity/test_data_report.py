"""Each source ends in a data report: on the terminal, in the run folder and its page, and at a site
in its log, once, and its doctor. A private run keeps it at the site.
"""

from __future__ import annotations

import json
import logging
import tempfile
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.data_report import (
    DataReport,
    Loss,
    merged,
    report_from,
    reports_from,
)
from fedsurrogate.common.errors import DataError, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.report.tables import warnings_of
from fedsurrogate.server_app.runs.metrics import missing_line
from fedsurrogate.server_app.runs.reader import read_run
from tests.data_kinds.identity.sources import WRITERS, csv_source, folders, picture

BACKBONE: dict[str, Any] = {"backbone": "pixels", "image-size": 4, "device": "cpu"}
PRIVATE = BACKBONE | {"epsilon": 1.0, "delta": 1e-5, "classes": "a,b,absent"}


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Two classes in a given split, with a copy in both parts, a broken, an empty and other files."""
    root = tmp_path / "messy"
    folders(root / "train", {"a": 12, "b": 12})
    folders(root / "test", {"a": 3, "b": 3}, first=100)
    (root / "test" / "a" / "copy.png").write_bytes(picture(0))
    (root / "train" / "a" / "empty.png").write_bytes(b"")
    (root / "train" / "b" / "cut.png").write_bytes(picture(60)[:40])
    (root / "train" / "__MACOSX").mkdir()
    (root / "train" / "b" / "._0.png").write_bytes(b"x")
    return root


def test_a_simulation_reports_its_data_on_terminal_page_and_in_json(
    messy: Path, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    run = simulate_here(
        2,
        BACKBONE
        | {"data": "imagefolder", "data-dir": str(messy), "output-dir": str(tmp_path / "runs")}
        | {"partition": "iid", "classes": "a,b,absent", "head.min-steps": 20},
        events.append,
        report=False,
    )
    written_lines = [each["reason"] for each in events if each["event"] == "warning"]
    assert [line for line in written_lines if line.startswith("data ")] == [
        "data imagefolder: 35 found, 32 to open, 3 left out"
    ]
    assert sum(line.startswith(("left out: ", "warning: ")) for line in written_lines) == 2
    (facts,) = json.loads((run / "metrics.json").read_text())["data"]
    assert (facts["read"], facts["used"], facts["lost"]) == (35, 30, 5)
    losses = {loss["why"].split(", such as")[0] for loss in facts["left_out"]}
    assert losses == {
        "1 folders of systems",
        "1 files of systems",
        "1 test records are copies of training records",
        "2 images cannot be read, or have no finite features",
    }
    assert facts["warnings"] == ["no record of 'absent'"]
    page = write_report(run).read_text()
    assert "35 read, 30 used, 5 left out" in page
    assert "no record of &#39;absent&#39;" in page
    warned = " ".join(warnings_of(read_run(run)))
    assert "2 images cannot be read" in warned
    assert "Warnings about the data" not in warned
    # What is wrong: one example of each fault.
    assert "empty.png (UnidentifiedImageError: cannot identify image file)." in warned


BROKEN = {
    "empty.png": b"",
    "cut.png": picture(60)[:40],
    "without an end.png": picture(60)[:-30],
    "page.jpg": b"<html><body>404</body></html>",
    "zeros.tif": bytes(2000),
    "noise.webp": bytes(range(1, 200)),
    "other.bmp": picture(60)[8:],
    "start.gif": b"GIF89a",
}


@settings(max_examples=4, deadline=None)
@given(names=st.sets(st.sampled_from(sorted(BROKEN)), min_size=1))
def test_broken_images_of_a_simulation_are_counted_with_an_example_and_cost_no_other_record(
    names: set[str],
) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "data"
        folders(root, {"a": 8, "b": 8})
        for name in names:
            (root / "a" / name).write_bytes(BROKEN[name])
        where = {"data": "imagefolder", "data-dir": str(root), "output-dir": f"{place}/runs"}
        more = {"partition": "iid", "head.min-steps": 20}
        run = simulate_here(2, BACKBONE | where | more, lambda _: None, report=False)
        (facts,) = json.loads((run / "metrics.json").read_text())["data"]
        warned = [each for each in warnings_of(read_run(run)) if each.startswith("Left out: ")]
    count = len(names)
    assert (facts["read"], facts["used"], facts["lost"]) == (16 + count, 16, count)
    (reasons,) = warned
    assert reasons.startswith(f"Left out: {count} images cannot be read")
    assert any(name in reasons for name in names)


def test_what_is_odd_is_read_before_the_result(tmp_path: Path) -> None:
    """An accuracy on patients that a model was trained on is not one on new patients."""
    where = {"data": "imagefolder", "data-dir": str(tmp_path / "d"), "output-dir": str(tmp_path)}
    split = ["train", "train", "train", "test"] * 6
    who = [f"P{number // 2}" for number in range(24)]
    csv_source(tmp_path / "d", {"label": [*"aabb"] * 6, "who": who, "split": split})
    own = BACKBONE | where | {"partition": "iid", "patient-column": "who"}
    run = simulate_here(2, own, lambda _: None, report=False)
    (warned,) = [
        each for each in warnings_of(read_run(run)) if each.startswith("Warnings about the data")
    ]
    assert "6 patients have records in both training and test" in warned
    assert "6 patients have records in both" in write_report(run).read_text()


@pytest.mark.parametrize("sound", range(3))
def test_no_image_is_called_used_before_it_is_opened(sound: int, tmp_path: Path) -> None:
    root = tmp_path / "d"
    folders(root, {"a": sound, "b": sound})
    for number in range(4):
        for name in "ab":
            (root / name).mkdir(exist_ok=True)
            (root / name / f"broken {number}.png").write_bytes(f"{name} {number}".encode())
    where = {"data": "imagefolder", "data-dir": str(root), "output-dir": str(tmp_path / "runs")}
    events: list[dict[str, Any]] = []
    with suppress(RunError):
        simulate_here(2, BACKBONE | where, events.append, report=False)
    (first,) = [
        each["reason"]
        for each in events
        if str(each.get("reason")).startswith("data imagefolder: ")
    ]
    if sound:
        assert first.startswith(f"data imagefolder: {8 + 2 * sound} found, {8 + 2 * sound} to open")
    else:
        assert first == "data imagefolder: 8 found, 0 used, 8 left out"


@pytest.mark.parametrize("writer", WRITERS)
def test_a_record_without_a_label_ends_no_private_simulation(writer: str, tmp_path: Path) -> None:
    """As at a hospital, it is left out alone and counted; without privacy it is corrected."""
    kind, write = WRITERS[writer]
    write(tmp_path / "d", {"label": ["a", "b", None, *"ab" * 30]})
    own = BACKBONE | {"data": kind, "data-dir": str(tmp_path / "d"), "classes": "a,b"}
    own |= {"output-dir": str(tmp_path / "runs"), "partition": "iid"}
    run = simulate_here(2, own | {"epsilon": 100.0, "delta": 1e-5}, lambda _: None, report=False)
    (facts,) = json.loads((run / "metrics.json").read_text())["data"]
    assert (facts["used"], facts["lost"]) == (62, 1)
    with pytest.raises(DataError, match=r"no label.* (line 4|row 3);|line 4 .*no label"):
        simulate_here(2, own, lambda _: None, report=False)


@pytest.mark.parametrize("private", [{}, {"epsilon": 100.0, "delta": 1e-5}])
def test_a_simulation_without_a_label_says_why(private: dict[str, Any], tmp_path: Path) -> None:
    csv_source(tmp_path / "d", {"label": [None] * 8})
    own = BACKBONE | {"data": "imagefolder", "data-dir": str(tmp_path / "d"), "classes": "a,b"}
    own |= {"output-dir": str(tmp_path / "runs")} | private
    with pytest.raises(DataError, match=r"8 of 8 records have no label .* such as line 2"):
        simulate_here(2, own, lambda _: None, report=False)


def hospital(folder: Path, data: Path, **more: Any) -> NodeConfig:
    own = {"data": "imagefolder", "data-dir": str(data), "device": "cpu"}
    places = {"state-dir": str(folder / "state"), "cache-dir": str(folder / "cache")}
    return parse_node_config(own | places | more)


@pytest.mark.parametrize("chosen", [BACKBONE, PRIVATE], ids=["open", "private"])
def test_a_site_logs_its_report_once_and_again_only_if_it_changes(
    messy: Path, tmp_path: Path, chosen: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedsurrogate.site")
    run, node = parse_run(chosen), hospital(tmp_path, messy)
    for _ in range(4):
        found = load_site(run, node, 100)
    written_lines = [
        each for each in caplog.messages if each.startswith(("data ", "left out", "warning"))
    ]
    assert len(written_lines) == 1 + len(found.report.left_out) + len(found.report.warnings)
    assert not [each for each in caplog.messages if "0 of" in each]
    assert f"{found.report.lost} left out" in written_lines[0]
    caplog.clear()
    (messy / "train" / "b" / "._1.png").write_bytes(b"x")
    load_site(run, node, 100)
    assert sum(each.startswith("data ") for each in caplog.messages) == 1


@pytest.mark.parametrize("absent", ["absent", "cafe\u0301", "A"])
def test_a_class_without_a_record_anywhere_is_a_warning_of_a_private_run(
    absent: str, tmp_path: Path
) -> None:
    """It uses what was released, and names no site."""
    x, y = np.random.default_rng(0).random((600, 3)), ["a", "b"] * 300
    private = {"epsilon": 8.0, "delta": 1e-5, "classes": ["a", "b", absent]}
    run = fs.simulate([(x, y)] * 4, output_dir=tmp_path, **private).folder
    (warned,) = [each for each in warnings_of(read_run(run)) if "Perhaps" in each]
    assert repr(unicodedata.normalize("NFC", absent)) in warned
    assert "'a'" not in warned
    assert "site 0" not in warned
    card = json.loads((run / "metrics.json").read_text())["card"]
    assert card["without_records"] == [unicodedata.normalize("NFC", absent)]
    assert (card["records_by_class"], card["state"]) == ("noisy", "amber")
    assert "perhaps no site has a record of" in missing_line(card)
    page = write_report(run).read_text()
    assert "Perhaps without a record at any site:" in page
    assert "Perhaps no site" in page


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
reports = st.builds(
    DataReport,
    words,
    st.integers(0, 2**50),
    st.lists(st.builds(Loss, words, st.integers(0, 2**40)), max_size=4).map(tuple),
    st.lists(words, max_size=4).map(tuple),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["source", "used", "left_out", "odd", "why", "count"]),
            inner,
            max_size=6,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(reports, min_size=1, max_size=3))
def test_a_report_survives_its_message_and_adds_up(made: list[DataReport]) -> None:
    assert reports_from(json.dumps([each.facts() for each in made])) == made
    whole = merged(made)
    assert whole.read == sum(each.read for each in made) == whole.used + whole.lost
    assert 1 <= len(whole.lines()) <= 3


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_what_another_machine_sends_as_a_report_is_one_or_is_dropped(value: Any) -> None:
    found = reports_from(json.dumps(value))
    assert all(each == report_from(each.facts()) for each in found)
    whole = {"source": "s", "used": 1, "left_out": [], "warnings": []}
    assert len(reports_from(json.dumps([whole]))) == 1
    for count in (True, 1.0, "1", -1, 2**53):
        assert reports_from(json.dumps([whole | {"used": count}])) == []
    for texts in ("ab", {}, [1], ["a"] * 201):
        assert reports_from(json.dumps([whole | {"warnings": texts}])) == []
