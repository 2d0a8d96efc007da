"""The methods of the tutorial *Add a method*, as they stand on the page: each runs in every way
that the page promises.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sklearn.neighbors import NearestCentroid

from fedsurrogate.common.costs import costs
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import load_model
from tests.children import ok, ran
from tests.documents import check_shown, masked, shown_after, words
from tests.grid import ROOT, InProcessGrid, metrics_of, run_federation, sites

PAGE = ROOT / "docs" / "tutorials" / "add-a-method.md"
BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```", re.S)
MOST_LINES = 80
CLASSES = ",".join(map(str, range(10)))
PRIVATE = {"epsilon": 2.0, "delta": 1e-5}
SUMMED = {"secure-aggregation": True, "classes": CLASSES}
"""Settings of the four ways to run the first method, and the least accuracy on the digits."""
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "exact": ({}, 0.85),
    "private": (PRIVATE, 0.75),
    "secure aggregation": (SUMMED, 0.85),
    "private secure aggregation": (SUMMED | PRIVATE, 0.8),
}


def model_of(folder: Path) -> Head:
    model = load_model(folder / "model.safetensors")
    assert isinstance(model, Head)
    return model


def blocks() -> dict[str, str]:
    """The files of the page, by path."""
    return dict(BLOCK.findall(PAGE.read_text()))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The page's modules, imported, and its methods in the registry."""
    made: dict[str, ModuleType] = {}
    for path, text in blocks().items():
        name = "fedsurrogate." + path.removesuffix(".py").replace("/", ".")
        made[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
        exec(compile(text, path, "exec"), made[name].__dict__)
    for name, variable in (("nearest_mean", "NEAREST_MEAN"), ("fedavgm", "FEDAVGM")):
        method = getattr(made[f"fedsurrogate.common.methods.{name}"], variable)
        monkeypatch.setitem(METHODS, method.name, method)
    return made


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of the repository with the four files of the page, as a reader has them."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    for path, text in blocks().items():
        (copy / path).write_text(text)
    registry = copy / "common" / "methods" / "__init__.py"
    names = {"nearest_mean": "NEAREST_MEAN", "fedavgm": "FEDAVGM"}
    imports = "".join(
        f"from fedsurrogate.common.methods.{file} import {name}\n" for file, name in names.items()
    )
    listed = registry.read_text().replace("*TRAINED,", f"*TRAINED, {', '.join(names.values())},")
    registry.write_text(listed.replace("\nMETHODS:", f"\n{imports}METHODS:"))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    pairs = [(lines, text) for lines, text in shown_after(PAGE) if text]
    assert len(pairs) == 3
    commands = {
        "coordinator": [sys.executable, "-m", "fedsurrogate.server_app.cli.main"],
        "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts="],
    }
    for (line,), expected in pairs:
        program, *given = words(line)
        done = ok(ran([*commands[program], *given], cwd=copy))
        # Above a minute, pytest says it in minutes as well.
        printed = re.sub(r"=| \(\d+:\d\d:\d\d\)", "", done.stdout)
        assert check_shown(expected, printed) == len(masked(expected))


def test_each_method_is_two_files_of_less_than_eighty_lines() -> None:
    files = blocks()
    assert len(files) == 4
    for name in ("nearest_mean", "fedavgm"):
        own = [text for path, text in files.items() if name in path]
        assert len(own) == 2
        assert sum(len(text.splitlines()) for text in own) < MOST_LINES


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("added")
def test_the_nearest_mean_runs_in_every_way_and_costs_what_the_plan_says(
    tmp_path: Path, way: str
) -> None:
    own, least = WAYS[way]
    settings = {"method": "nearest-mean"} | own
    grid = InProcessGrid(sites(3))
    metrics = metrics_of(run_federation(tmp_path, grid, partition="iid", **settings))
    assert metrics["status"] == "ok"
    assert metrics["accuracy"]["model"] > least
    assert (metrics["privacy"] is None) == ("epsilon" not in own)
    if "epsilon" in own:
        assert metrics["privacy"]["epsilon"] == pytest.approx(2.0)
        assert set(metrics["privacy"]["per_site"]) == {"0", "1", "2"}
    planned = costs(parse_run({"sites": 3} | settings), 64, 10, 479, 20)[0]
    kinds = {message.metadata.message_type for message in grid.sent} - {
        "query.compare",
        "query.name",
    }
    sent = sum(grid.counted(node, tuple(kinds))[0] for node in range(3)) / 3
    assert 0.85 * planned.up < sent < 1.1 * planned.up


@pytest.mark.usefixtures("added")
def test_the_head_is_scikit_learns_nearest_centroid() -> None:
    learn = sys.modules["fedsurrogate.strategies.nearest_mean"].learn
    from fedsurrogate.strategies.closed_form.statistics import of_noisy_sums

    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 7, generator=generator, dtype=torch.float64)
    labels = torch.arange(300) % 4
    features += labels[:, None]
    # The fifth class has no records; the first one's mean is close to the zero that stands there.
    sums = torch.zeros(5, 7, dtype=torch.float64).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=5).double()
    statistics = of_noisy_sums({"counts": counts, "sums": sums})
    head, facts = learn(statistics, Header("nearest-mean", "r", "coordinator", "f", tuple("abcde")))
    assert isinstance(head, Head)
    assert not facts
    known = NearestCentroid().fit(features.numpy(), labels.numpy())
    assert torch.equal(
        head.predict(features.float()), torch.tensor(known.predict(features.float().numpy()))
    )


@pytest.mark.usefixtures("added")
def test_momentum_at_the_coordinator_trains_and_differs_from_fedavg(tmp_path: Path) -> None:
    settings = {"fedavg.rounds": 4, "alpha": 1.0}
    own = run_federation(tmp_path / "own", sites(3), method="fedavgm", **settings)
    usual = run_federation(tmp_path / "usual", sites(3), method="fedavg", **settings)
    assert metrics_of(own)["accuracy"]["model"] > 0.75
    assert not torch.equal(model_of(own).weight, model_of(usual).weight)
