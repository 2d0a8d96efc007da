"""Names of classes, sites, files, columns and models that another hospital chose, in every file and
page that is written, and on every terminal: they stay text.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from fedsurrogate.client_app.audit.disclosure import page_of as disclosure_page
from fedsurrogate.client_app.audit.membership import NearestRecords
from fedsurrogate.client_app.audit.output import page_of as audit_page
from fedsurrogate.client_app.audit.release_audit import ReleaseAudit, StandingOut
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.evaluation import page_of as evaluation_page
from fedsurrogate.client_app.model_use.inputs import PATIENT, find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, by_patient, predict
from fedsurrogate.client_app.model_use.store import keep_model
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.command_line import SafeConsole
from fedsurrogate.common.errors import FedSurrogateError, SurrogateError
from fedsurrogate.common.escapes import as_utf8, csv_rows, csv_text, for_terminal
from fedsurrogate.common.identity import normal
from fedsurrogate.common.logs import TextLines, in_one_line
from fedsurrogate.common.models.class_metrics import Judged, report
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    make_signed_model,
    read_signed_model,
    save_signed_model,
)
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.server_app.export.model_card import model_card
from fedsurrogate.server_app.monitoring.prometheus import RunCollector
from fedsurrogate.server_app.monitoring.watch import show_once, watch
from fedsurrogate.server_app.report.build import write_csv, write_report
from fedsurrogate.strategies.counting.strategy import payload_of
from tests.client_app.audit.test_release_audit import attacked, hospital
from tests.client_app.model_use.hospitals import site
from tests.hostile_names import faults_of_page, formulas, hostile_texts, unsafe
from tests.server_app.report.test_build import make_run

KEY = bytes(range(32))
FEW = settings(
    max_examples=6,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=25)


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names are not cut into lines."""
    monkeypatch.setenv("COLUMNS", "20000")


def names(count: int, printable: bool = False) -> st.SearchStrategy[list[str]]:
    if printable:
        # Of classes in a message no two are one name.
        return st.lists(
            hostile_texts(printable).filter(normal),
            min_size=count,
            max_size=count,
            unique_by=normal,
        )
    return st.lists(hostile_texts(), min_size=count, max_size=count, unique=True)


def shown_by(console: SafeConsole) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def captured() -> SafeConsole:
    console = SafeConsole()
    console.file = io.StringIO()
    return console


@given(names(12))
@settings(FEW, max_examples=3)
def test_pages_tables_and_views_of_a_run_show_names_as_text(found: list[str]) -> None:
    one, two, three, *classes = found[:6]
    reason, method, version, key, value, fate = found[6:]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        folder.mkdir()
        claim = {"epsilon": 1.0, "delta": 1e-5, "mechanism": method}
        card = {"state": "red", "missing_share": 0.5, "invited": 3, "never_came": 1, "names": fate}
        card |= {"absent": [three], "used": [one], "rejected": {two: reason}}
        card |= {"suspects": {one: reason}, "capped": {one: 0.5}}
        more: dict[str, Any] = {
            "stopped": reason,
            "failure": reason,
            "method": method,
            "card": card,
        }
        more["privacy"] = {"epsilon": 1.0, "delta": 1e-5, "per_site": {one: claim}}
        more["rounds"] = [{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.6}]
        make_run(folder, [one, two, three], classes, {two: ("rejected", reason)}, metrics=more)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {"config": {key: value}, "versions": {version: value}, "run": value}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with (folder / "events.jsonl").open("a") as events:
            events.write(json.dumps({"event": fate, "site": one, "reason": reason}) + "\n")
        page = write_report(folder).read_text(encoding="utf-8")
        assert faults_of_page(page) == []
        for file in write_csv(folder, Path(home) / "tables"):
            assert formulas(file.read_text(encoding="utf-8")) == [], file
        for once in (True, False):
            console = captured()
            show_once(folder, console, False) if once else watch(folder, console, 1.0)
            assert unsafe(shown_by(console)) == set()
        registry = CollectorRegistry()
        registry.register(RunCollector(folder, 1))
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        assert all(family.name.startswith("fedsurrogate_") for family in families)
        labels = [value for f in families for s in f.samples for value in s.labels.values()]
        assert for_terminal(one) in labels
        assert not unsafe("".join(labels), "")


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> ReleaseAudit:
    return attacked(hospital(tmp_path_factory.mktemp("audit"), [30, 30]), 8)


@given(names(6))
@FEW
def test_the_page_of_an_audit_shows_names_as_text(audit: ReleaseAudit, found: list[str]) -> None:
    one, two, where, method, mechanism, broken = found
    assert isinstance(audit.nearest, NearestRecords)
    hostile = replace(
        audit,
        method=method,
        mechanism=mechanism,
        per_class={one: (3, 0.5), two: (4, 0.6)},
        others={one: audit.attack},
        nearest=replace(audit.nearest, classes=(one, two)),
        standing_out=(StandingOut(0, where, one, 3.0),),
        standing_out_count=1,
    )
    assert faults_of_page(audit_page(hostile, broken, [b"x"])) == []


@given(names(8))
@FEW
def test_a_disclosure_sheet_shows_names_as_text(found: list[str]) -> None:
    one, two, *rest = found
    part = {one: two, two: {one: [two, {"x": one}]}, "attacks": {}}
    content: dict[str, Any] = dict.fromkeys(("people", "data", "settings"), part)
    content |= {"run": rest[0], "site": rest[1], "written": rest[2]}
    content |= {"projects": part | {"method": rest[3]}, "outputs": part | {"bytes": 3}}
    assert faults_of_page(disclosure_page(content, rest[4])) == []


def facts_of_evaluation() -> dict[str, Any]:
    """The facts of an evaluation with classes A and B."""
    labels = torch.arange(60).numpy() % 2
    chances = torch.softmax(torch.randn(60, 2, generator=torch.Generator().manual_seed(0)), 1)
    judged = Judged(labels, chances.double().numpy(), chances.argmax(1).numpy())
    found = report(judged, ("A", "B"), draws=20)
    shown = asdict(found)
    line = [[0.0, 1.0], [0.0, 1.0]]
    model = {"name": "MODEL", "method": "METHOD", "run": "RUN", "sites": 2, "privacy": None}
    chosen = {"positive": "A", "threshold": 0.5, "temperature": 1.0, "note": "NOTE"}
    return {
        "model": model | {"settings": {"KEY": "VALUE"}, "fingerprint": "FINGERPRINT"},
        "made": "MADE",
        "records": "RECORDS",
        "left_out": 1,
        "adapted": True,
        "calibrated_on": 3,
        "report": shown,
        "groups": {"COLUMN": {"VALUE": shown, "OTHER": 3}},
        "curves": {name: {"roc": line} for name in "AB"},
        "promise": None,
        "out_of_distribution": None,
        "calibration": chosen | {"score": "relative", "abstain_above": None},
    }


PLACES = (
    "A", "B", "MODEL", "METHOD", "RUN", "KEY", "VALUE", "FINGERPRINT", "MADE", "RECORDS", "COLUMN", "OTHER", "NOTE",
)  # fmt: skip


def renamed(value: Any, new: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {new.get(key, key): renamed(each, new) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [renamed(each, new) for each in value]
    return new.get(value, value) if isinstance(value, str) else value


@given(names(len(PLACES)))
@FEW
def test_the_page_of_an_evaluation_shows_names_as_text(found: list[str]) -> None:
    page = evaluation_page(renamed(facts_of_evaluation(), dict(zip(PLACES, found, strict=True))))
    assert faults_of_page(page) == []


def model_of(classes: list[str]) -> SignedModel:
    config = parse_run({"backbone": "pixels", "image-size": 8})
    backbone = load_backbone("pixels", image_size=8)
    header = Header("fedpft", "run", "coordinator", backbone.fingerprint_at(64), tuple(classes))
    weight = torch.randn(len(classes), 64, generator=torch.Generator().manual_seed(1))
    head = Head(header, weight, torch.zeros(len(classes)), 0.0)
    return make_signed_model(head, config, None, "1", 3, KEY)


def file_names() -> st.SearchStrategy[list[bytes]]:
    """Names that a file system takes, also such that are not UTF-8."""
    texts = hostile_texts().map(lambda text: text.encode(errors="surrogatepass")[:150])
    raw = st.one_of(texts, st.binary(min_size=1, max_size=20))
    clean = raw.map(lambda name: name.replace(b"/", b"").replace(b"\0", b"") + b".png")
    return st.lists(clean, min_size=1, max_size=5, unique=True)


@given(names(3, printable=True), file_names(), st.data())
@MANY
def test_predictions_are_no_formula_and_are_continued_by_their_names(
    classes: list[str], files: list[bytes], data: st.DataObject
) -> None:
    model, backbone = model_of(classes), load_backbone("pixels", image_size=8)
    predictor = Predictor(model.classifier, Calibration())
    with tempfile.TemporaryDirectory() as home:
        images, out, patients = (
            Path(home) / "new",
            Path(home) / "p.csv",
            Path(home) / "patients.csv",
        )
        images.mkdir()
        for name in files:
            Image.new("L", (8, 8), 99).save(images / "x.png")
            (images / "x.png").rename(images / os.fsdecode(name))
        inputs = find_inputs(str(images), "imagefolder")
        assert set(inputs.names) == set(map(os.fsdecode, files))
        owners = [data.draw(hostile_texts()) for _ in inputs.names]
        inputs = replace(inputs, columns={PATIENT: owners})
        done = predict(model, predictor, inputs, backbone, out)
        assert done.written == len(files)
        text = out.read_bytes().decode("utf-8", "surrogateescape")
        assert formulas(text) == []
        header, *rows = csv_rows(io.StringIO(text, newline=""))
        assert header[2:5] == [f"p_{name}" for name in classes]
        assert text.encode().decode() == text
        assert [row[0] for row in rows] == list(map(as_utf8, inputs.names))
        assert [row[1] for row in rows] == list(map(as_utf8, owners))
        assert {row[5] for row in rows} <= set(classes)
        assert predict(model, predictor, inputs, backbone, out).written == 0
        cut = data.draw(
            st.integers(len(csv_line(header)), len(text.encode("utf-8", "surrogateescape")))
        )
        out.write_bytes(out.read_bytes()[:cut])
        predict(model, predictor, inputs, backbone, out)
        again = out.read_bytes().decode("utf-8", "surrogateescape")
        _, *continued = csv_rows(io.StringIO(again, newline=""))
        for row, other in zip(sorted(rows), sorted(continued), strict=True):
            # A batch of another size moves the last bits of a probability.
            assert (row[:2], row[5:]) == (other[:2], other[5:])
            assert list(map(float, row[2:5])) == pytest.approx(list(map(float, other[2:5])))
        by_patient(out, patients, predictor.calibration, tuple(classes))
        text = patients.read_bytes().decode("utf-8", "surrogateescape")
        assert formulas(text) == []
        _, *rows = csv_rows(io.StringIO(text, newline=""))
        assert {row[0] for row in rows} == {as_utf8(owner) for owner in owners if owner.strip()}


def csv_line(cells: list[str]) -> bytes:
    return csv_text([cells]).encode()


HEADINGS = ["Classes", "Features", "Data", "Measured", "Privacy", "Limits"]
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@given(names(3, printable=True), names(3), names(3))
@MANY
def test_a_model_card_shows_names_as_text(
    classes: list[str], others: list[str], facts: list[str]
) -> None:
    model = model_of(classes)
    gaussians, method, mechanism = (text[:40] for text in facts)
    model = replace(
        model,
        manifest=model.manifest.model_copy(
            update={
                "gaussians": gaussians,
                "method": method,
                "settings": {**model.manifest.settings, "backbone": mechanism},
            }
        ),
    )
    with tempfile.TemporaryDirectory() as home:
        run = Path(home)
        row = {"records": {"value": 3, "low": 2, "high": 4}}
        (run / "metrics.json").write_text("{}")
        found = {"kind": "evaluation", "model": payload_of(model.classifier)[1], "sites": 2}
        found |= {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}}
        found["classes"] = dict.fromkeys(others, row)
        (run / "evaluation.json").write_text(json.dumps(found))
        card = model_card(model, run)
    assert unsafe(card) == set()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["tags"][-1] == for_terminal(method)
    tokens = MARKDOWN.parse(body)
    titles = [b.content for a, b in pairwise(tokens) if a.type == "heading_open"]
    assert titles[1:] == HEADINGS
    inside = {child.type for token in tokens for child in token.children or []}
    assert inside <= {"text", "text_special", "softbreak", "code_inline"}, inside
    code = {c.content for token in tokens for c in token.children or [] if c.type == "code_inline"}
    assert code <= {
        "site predict",
        "site evaluate",
        "site evaluate --temperature --store",
        "coordinator evaluate",
    }
    assert sum(token.type == "tr_open" for token in tokens) == 1 + len(
        set(map(for_terminal, others))
    )
    assert {token.type for token in tokens if token.type.startswith("html")} == set()


@given(hostile_texts().filter(lambda text: not text.isprintable()))
@MANY
def test_a_model_whose_class_does_not_print_is_refused(text: str) -> None:
    try:
        model = model_of(["a", text])
    except (FedSurrogateError, ValueError):
        return
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "x.fedsurrogate"
        file.write_bytes(save_signed_model(model))
        with pytest.raises(SurrogateError):
            read_signed_model(file)


@given(names(3, printable=True))
@MANY
def test_the_list_of_models_shows_names_as_text(classes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as home:
        node = NodeConfig(state_dir=home)
        keep_model(node, model_of(classes), "file")
        done = site("models", "list", "--node-config", f'state-dir="{home}"')
    assert done.code == 0
    assert unsafe(done.stdout) == set()


@given(hostile_texts(), hostile_texts())
@MANY
def test_a_log_has_one_line_for_a_message_and_a_trace_is_indented(message: str, why: str) -> None:
    try:
        raise ValueError(why)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("fedsurrogate.site", logging.ERROR, "", 0, "%s", (message,), error)
    first, *trace = TextLines("%(asctime)s %(levelname)s %(message)s").format(record).split("\n")
    assert first.endswith(f"ERROR {for_terminal(message)}")
    assert all(line.startswith("  ") for line in trace)
    assert not unsafe("".join([first, *trace]), "")
    assert in_one_line(record)
    assert record.getMessage() == for_terminal(message)


@given(names(2))
@MANY
def test_an_error_on_a_terminal_controls_nothing(found: list[str]) -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        done = site("models", "use", found[0], "--node-config", f"site=x {found[1]!r}")
    assert unsafe(out.getvalue() + done.stdout + done.stderr) == set()
