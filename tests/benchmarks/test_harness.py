"""What benchmarks share: results go on, seeds share data, works take turns, samples may be missing."""

import doctest
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import commands, federation, options, plots, results, samples, seeds, timing
from fedsurrogate.common.run import parse_run

MODULES = [f"benchmarks.harness.{each.name}" for each in pkgutil.iter_modules(harness.__path__)]
SMALL = {"partition": "iid", "head.min-steps": 10, "head.epochs": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of benchmarks/results."""
    for module in (results, plots):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_harness_run(name: str) -> None:
    assert not doctest.testmod(importlib.import_module(name)).failed


def test_a_result_is_read_as_it_was_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.report(
        "some",
        "a title",
        ("row", "value"),
        [("one", 0.123456), ("two", None)],
        settings={"alpha": 0.1},
    )
    content = results.stored("some")
    assert list(content) == ["title", "machine", "columns", "rows", "settings"]
    assert content["machine"]["torch"] == torch.__version__
    assert content["rows"] == [["one", 0.123456], ["two", None]]
    assert "0.1235" in capsys.readouterr().out


def test_rows_that_are_measured_anew_are_not_kept(folder: Path) -> None:
    assert results.kept_rows("some", lambda row: False) == []
    results.report("some", "a title", ("row", "value"), [("one", 1), ("two", 2)])
    assert results.kept_rows("some", lambda row: row[0] == "one") == [("two", 2)]


def test_the_rows_of_a_seed_share_its_data_which_is_loaded_once() -> None:
    loaded: list[int] = []

    def load(seed: int) -> list[int]:
        loaded.append(seed)
        return [seed]

    names = {"first": 1, "second": 2}
    given: list[tuple[int, int]] = []
    made = seeds.over_seeds(
        3, load, lambda data: names, lambda seed, data, row: given.append((id(data), row)) or seed
    )
    assert loaded == [0, 1, 2]
    assert made == {"first": [0, 1, 2], "second": [0, 1, 2]}
    assert all(one[0] == two[0] for one, two in zip(given[::2], given[1::2], strict=True))


def test_works_are_timed_in_turn_and_only_after_they_are_warm() -> None:
    calls: list[str] = []
    now = [0.0]

    def work(name: str, seconds: float) -> Any:
        def run() -> None:
            calls.append(name)
            now[0] += seconds

        return run

    works = {"ours": work("ours", 1.0), "theirs": work("theirs", 3.0)}
    times = timing.in_turn(works, repeats=2, warm=1, clock=lambda: now[0])
    assert calls == ["ours", "theirs"] * 3
    assert times == {"ours": [1.0, 1.0], "theirs": [3.0, 3.0]}
    assert timing.paired(*works.values(), clock=lambda: now[0]) == (1.0, 3.0, 3.0)


def test_a_script_without_its_sample_data_ends_politely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "sample_folder", lambda: tmp_path)
    (tmp_path / "here").touch()
    assert samples.shared("here") == tmp_path / "here"
    with pytest.raises(SystemExit) as ended:
        samples.stored_features("cifar10")
    assert ended.value.code == 0
    assert "skipped: needs features/cifar10-train.safetensors" in capsys.readouterr().out


def test_own_data_replace_the_sample_data_and_its_places_are_left_out_of_the_description() -> None:
    words = ["-c", 'data="safetensors" data-dir="/data"', "-c", "alpha=0.1"]
    chosen = options.arguments("A benchmark.", "name").parse_args(words)
    settings, message = options.settings_of(chosen, {"dataset": "cifar10"})
    assert settings == {"data": "safetensors", "data-dir": "/data", "alpha": 0.1}
    assert message == "data=safetensors, alpha=0.1"


@pytest.mark.slow
def test_commands_run_as_users_run_them_and_a_mistake_ends_the_script() -> None:
    settings = {"fedpft.covariance": "gram", "seed": 3}
    words = ("-c", commands.text_of(settings), "--classes", "10", "--dimension", "8")
    planned = commands.json_of("coordinator", "plan", *words)
    assert planned
    with pytest.raises(SystemExit, match="coordinator plan ended with exit code"):
        commands.run_command("coordinator", "plan", "-c", "no-such-setting=1")


def test_a_child_answers_with_what_it_prints_last(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text('import json, sys\nprint("loaded")\nprint(json.dumps(sys.argv[1:]))\n')
    assert commands.result_of(commands.start_child(str(script), "one", "two")) == ["one", "two"]
    script.write_text("raise SystemExit(3)")
    with pytest.raises(AssertionError):
        commands.result_of(commands.start_child(str(script)))


def test_a_row_is_a_run_with_its_own_settings_and_none_is_the_head_on_all_records() -> None:
    rows = {"all": None, "diag": {"fedpft.covariance": "diag"}, "local": {"method": "local"}}
    measured = federation.run_rows(
        SMALL, rows, 2, lambda seed: federation.load_seed(SMALL, 2, seed)
    )
    assert {name: len(each) for name, each in measured.items()} == dict.fromkeys(rows, 2)
    for seed in range(2):
        data = federation.load_seed(SMALL, 2, seed)
        run = parse_run({**SMALL, "seed": seed, "fedpft.covariance": "diag"})
        alone = federation.federate(run, data)
        assert (measured["diag"][seed].accuracy, measured["diag"][seed].bytes) == (
            alone.accuracy,
            alone.bytes,
        )
        assert measured["all"][seed].bytes == 2 * data.sites[0].train.features.shape[1] * sum(
            data.sizes
        )


def test_only_a_budget_makes_the_class_names_public() -> None:
    data = federation.load_seed(SMALL, 2, 0)
    assert data.named({"fedpft.rank": 4}) == {"fedpft.rank": 4}
    assert data.named({"epsilon": 1.0})["classes"] == ",".join(data.classes)


@pytest.mark.parametrize("rows", [slice(5), torch.arange(5), torch.arange(100) < 5])
def test_a_site_with_some_rows_has_these_records_and_all_else_of_the_whole(rows: Any) -> None:
    (whole, _), test = (data := federation.load_seed(SMALL, 2, 0)).sites, data.test
    whole = federation.with_rows(whole, slice(100))
    part = federation.with_rows(whole, rows, test)
    assert torch.equal(part.train.features, whole.train.features[:5])
    assert torch.equal(part.train.labels, whole.train.labels[:5])
    assert (part.classes, part.fingerprint, part.test) == (whole.classes, whole.fingerprint, test)
    assert federation.with_rows(whole, rows).test is whole.test


def test_what_a_site_releases_has_its_class_means() -> None:
    labels = torch.arange(40) % 2
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) + 5 * labels[:, None]
    sent: Any = federation.released(
        parse_run({"fedpft.covariance": "diag"}), features, labels, ("a", "b")
    )
    means = torch.stack([features[labels == label].mean(0) for label in range(2)])
    order = sent.mixtures.labels.argsort()
    torch.testing.assert_close(sent.mixtures.means[order].float(), means, rtol=2e-3, atol=2e-3)


def test_every_plot_is_written_next_to_the_results(folder: Path) -> None:
    axes = plots.axes_of(3, 2)
    axes.plot([1, 2], [1, 2], label="a line")
    plots.draw(axes, "line")
    plots.draw_growth("growth", [1, 10], {"all": [1.0, 9.0], "some": [0.5, 4.0]}, [0.1, 0.2])
    plots.draw_images("images", [("one", torch.rand(20, 3, 8, 8)), ("two", torch.rand(3, 3, 8, 8))])
    assert {file.name for file in folder.glob("*.png")} == {"line.png", "growth.png", "images.png"}
