"""A sweep is the runs that `simulate` would do, in one table; a run that fails takes none of the
others with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines.utils import concordance_index
from scipy import stats
from sklearn import metrics as sk
from sklearn.datasets import load_digits

import fedsurrogate as fs
import fedsurrogate.server_app.deployment.local_engine
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.server_app.report.plots.sweep import draw_sweep
from fedsurrogate.server_app.runs.scores import SCORES
from fedsurrogate.server_app.sweep import Trial, summarise
from tests.commands import coordinator

DIGITS = load_digits()
X, Y = DIGITS.data / 16, DIGITS.target
SITES = [(X[k:600:2], Y[k:600:2]) for k in range(2)]
QUICK: dict[str, Any] = {"head__min_steps": 50, "head__epochs": 1}


def test_a_sweep_gives_what_single_runs_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fs.sweep(
        SITES, grid={"method": ["fedpft", "average"]}, seeds=[0, 1], output_dir=tmp_path, **QUICK
    )
    order = [(row["method"], row["seed"]) for row in found.rows]
    assert order == [(name, seed) for name in ("fedpft", "average") for seed in (0, 1)]
    for row in found.rows[1::2]:
        alone = fs.simulate(
            SITES, method=row["method"], seed=row["seed"], output_dir=tmp_path, **QUICK
        )
        assert (row["accuracy"], row["bytes"]) == (alone.accuracy, alone.bytes)
    first = found.summary()[0]
    assert first.runs == 2
    assert first.spreads["accuracy"].mean == pytest.approx(
        sum(row["accuracy"] for row in found.rows[:2]) / 2
    )
    assert list(found.to_frame()["accuracy"]) == [row["accuracy"] for row in found.rows]
    assert json.loads(found.file.read_text()) == found.rows
    assert "\n" not in repr(found)
    assert "4 of 4: method=average, seed=1" in capsys.readouterr().out
    found.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.parametrize("task", ["multilabel", "regression", "survival"])
def test_a_sweep_over_another_target_than_classes_has_its_score(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, z = X[:900], Y[:900] + X[:900, 20]
    table = {
        "multilabel": np.stack([z > 4, z < 7], 1).astype(float),
        "regression": np.stack([z, z**2], 1),
        "survival": np.stack([10 - z, z > 2], 1),
    }[task]
    own = {"regression": {"target_range": "0,10;0,100"}, "survival": {"horizon": 10.0}}.get(
        task, {}
    )
    data: dict[str, Any] = {"sites": [(x[k:600:2], table[k:600:2]) for k in range(2)]}
    data |= {"test": (x[600:], table[600:]), "task": task, "output_dir": tmp_path} | own
    result = fs.simulate(**data)
    answer, truth = result.model.predict(x[600:]), table[600:]
    name, wanted = {
        "multilabel": lambda: ("auroc", sk.roc_auc_score(truth, answer)),
        "regression": lambda: ("r2", sk.r2_score(truth, answer)),
        "survival": lambda: ("concordance", concordance_index(truth[:, 0], -answer, truth[:, 1])),
    }[task]()
    found = fs.sweep(grid={"shrinkage": [0.0, 0.1]}, seeds=[0, 1], **data)
    assert [row[name] for row in found.rows[2:]] == pytest.approx([wanted] * 2, abs=0.02)
    assert found.summary()[0].spreads[name] == (pytest.approx(wanted, abs=1e-3), 0.0, 2)
    printed = capsys.readouterr().out
    for text in (repr(result), repr(found), printed):
        assert re.search(rf"\b{SCORES[name]} 0\.\d{{4}}\b|best mean {SCORES[name]} 0", text)
    assert found.plot().axes[0].get_ylabel().startswith(SCORES[name])
    if task == "multilabel":
        assert result.auroc == pytest.approx(wanted, abs=1e-3)


@given(
    st.lists(
        st.lists(st.none() | st.floats(-1, 1), min_size=1, max_size=4), min_size=2, max_size=3
    ),
    st.sampled_from(["accuracy", "r2"]),
    st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_a_plot_has_the_interval_of_the_runs_with_a_score_within_its_range(
    values: list[list[float | None]], score: str, lines: int
) -> None:
    trials = [
        Trial({"epsilon": at + 1.0, "seed": seed} | kind, 1.0, scores={score: value})
        for kind in ([{"method": "a"}, {"method": "b"}] if lines == 2 else [{}])
        for at, own in enumerate(values)
        for seed, value in enumerate(own)
    ]
    axes = draw_sweep(summarise(trials), score=score).axes[0]
    known = [[value for value in own if value is not None] for own in values]
    shown = [own for own in known if own]
    if len(shown) < 2:
        return
    assert (axes.get_legend() is None) == (lines == 1)
    for drawn in axes.containers:
        ends = drawn.lines[2][0].get_segments()
        for own, ((_, low), (_, high)) in zip(shown, ends, strict=True):
            n, mean = len(own), np.mean(own)
            half = stats.t.ppf(0.975, n - 1) * np.std(own, ddof=1) / n**0.5 if n > 1 else 0.0
            wanted = (min(mean, max(0.0, mean - half)), min(1.0, mean + half))
            assert (low, high) == pytest.approx(wanted, abs=1e-9)


def test_a_failed_run_is_a_row_with_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fedsurrogate.server_app.deployment.local_engine.federate, []

    def breaks_once(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no memory")
        return real(*arguments, **options)

    monkeypatch.setattr(fedsurrogate.server_app.deployment.local_engine, "federate", breaks_once)
    grid = {"epsilon": [0.0, 2.0], "method": ["average"]}
    own: dict[str, Any] = {"delta": 1e-5, "output_dir": tmp_path, "progress": False}
    found = fs.sweep(SITES, grid=grid, seeds=[0, 1], **own)
    broken, fine, *refused = found.rows
    assert broken["error"] == "MemoryError: no memory"
    assert fine["accuracy"] > 0.8, "epsilon 0 takes no delta"
    assert all("does not support it" in row["error"] for row in refused)
    assert len(calls) == 2, "what settings refuse is not started"
    assert [(each.runs, each.failed) for each in found.summary()] == [(1, 1), (0, 2)]
    assert found.rows == json.loads(found.file.read_text())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"grid": {"rnk": [1]}}, "rnk"),
        ({"grid": {"rank": []}}, "rank has no values"),
        ({"grid": {"rank": [4, 4]}}, "twice"),
        ({"seeds": []}, "seed has no values"),
        ({"grid": {"seed": [1]}}, "give the seeds as seeds"),
        ({"grid": {"data": ["digits"]}}, "data cannot be part of a grid"),
        ({"method": "average", "epsilon": 1.0, "delta": 1e-5}, "does not support it"),
    ],
)
def test_a_sweep_in_which_nothing_could_run_is_refused_at_once(
    arguments: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        fs.sweep(SITES, output_dir=tmp_path / "runs", **arguments)
    assert not (tmp_path / "runs").exists()


def test_wrong_data_are_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="labels for 5 records"):
        fs.sweep([(X[:5], Y)], output_dir=tmp_path)


def test_the_command_prints_one_table_and_fails_if_a_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--sites", 2, "--seeds", 1, "-c", f'head.epochs=1 output-dir="{tmp_path}"']
    words += ["-g", 'method=["ensemble", "average"]', "-g", "head.min-steps=[20]"]
    assert coordinator(monkeypatch, *words) == 0
    printed = capsys.readouterr()
    for word in ("method", "ensemble", "average", "%", "rows", "plot"):
        assert word in printed.out
    assert "2 of 2: method=average" in printed.err
    (rows,), (picture,) = list(tmp_path.glob("sweep-*.json")), list(tmp_path.glob("sweep-*.png"))
    assert (len(json.loads(rows.read_text())), picture.stem) == (2, rows.stem)
    more = ("--json", "-g", "epsilon=[0.0, 1.0]", "-c", "delta=1e-5")
    assert coordinator(monkeypatch, *words, *more) == 1
    printed = capsys.readouterr()
    assert [bool(row["error"]) for row in json.loads(printed.out)] == [False, True, False, True]
    assert "2 of 4 runs failed" in printed.err
    assert coordinator(monkeypatch, "sweep", "-g", "epsilon=[2.0") == 1
    assert "write a key and its values" in capsys.readouterr().err


def test_a_sweep_over_numbers_of_sites_computes_features_once(tmp_path: Path) -> None:
    data, grid = (X[:300], Y[:300]), {"sites": [2, 5], "partition": ["iid"]}
    own: dict[str, Any] = {"covariance": "gram", "output_dir": tmp_path, "progress": False}
    found = fs.sweep(3, data=data, grid=grid, seeds=1, **own)
    assert not found.failed
    folders = [Path(row["folder"]) for row in found.rows]
    used = [json.loads((each / "metrics.json").read_text())["sites"]["used"] for each in folders]
    assert used == [2, 5]
    assert found.plot(over="sites").axes[0].get_xlabel() == "sites"
    with pytest.raises(ConfigError, match="numbers of sites that share data"):
        fs.sweep(SITES, grid={"sites": [2]}, output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"sites = 2\.5: must be a whole number"):
        fs.sweep(3, data=data, grid={"sites": [2.5]}, output_dir=tmp_path)
