"""`site evaluate` of labels, numbers and times says what it says of classes: a table, and JSON with the
page.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsurrogate.common.targets.metrics import IN_WORDS, metric_text
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from tests import commands

SETTINGS: dict[str, dict[str, Any]] = {
    "regression": {"value-columns": "size", "target-range": "0,1"},
    "multilabel": {"label-columns": "bright,dark"},
    "survival": {
        "time-column": "years",
        "event-column": "seen",
        "horizon": 3.0,
        "time-unit": "years",
    },
}


def write_images(folder: Path, count: int, seed: int) -> Path:
    """Images whose brightness says all that the table has of them."""
    folder.mkdir()
    drawn = np.random.default_rng(seed)
    sizes = drawn.uniform(0.1, 0.9, count)
    rows = []
    for at, size in enumerate(sizes):
        pixels = 255 * (size + 0.05 * drawn.standard_normal((8, 8))).clip(0, 1)
        Image.fromarray(pixels.astype("uint8")).save(folder / f"{at}.png")
        years = float(drawn.exponential(4 * (1 - size))) + 0.01
        row = {
            "path": f"{at}.png",
            "size": size,
            "bright": int(size > 0.6),
            "dark": int(size < 0.3),
        }
        rows.append(row | {"years": min(years, 4.0), "seen": int(years < 4.0)})
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return folder


@pytest.mark.parametrize("task", SETTINGS)
def test_the_terminal_has_the_score_and_json_the_page(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = write_images(tmp_path / "learned", 160, 1)
    settings = SETTINGS[task] | {"task": task, "data": "imagefolder", "data-dir": str(learned)}
    settings |= {"backbone": "pixels", "image-size": 8, "partition": "iid"}
    settings["output-dir"] = str(tmp_path / "runs")
    run = simulate_here(2, settings, lambda _: None, report=False)
    new = write_images(tmp_path / "new", 50, 2)
    words = ("evaluate", run, "--data-dir", new, "--out", tmp_path / "page")
    assert commands.site(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert commands.site(monkeypatch, *words, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert Path(shown.pop("page")).is_file()
    assert shown.pop("stored") is None
    written = json.loads((tmp_path / "page" / "evaluation.json").read_text())
    assert shown == written
    score = TARGETS[task].score
    for answer, own in written["metric_values"].items():
        if score in own:
            line = next(each for each in printed.splitlines() if f" {answer} " in each)
            assert f" {IN_WORDS.get(score, score)} " in line
            assert f" {metric_text(score, own[score]['value'])} " in line
