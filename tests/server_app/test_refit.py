import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.surrogates.surrogates import without_classes
from fedsurrogate.common.wire.records import unpack_surrogate
from fedsurrogate.server_app.refit import refit
from fedsurrogate.server_app.runs.reader import read_payloads
from fedsurrogate.strategies.fedpft.strategy import learn_from_samples as learn
from tests.grid import Fault, InProcessGrid, run_federation, sites

SETTINGS = {"head.min-steps": 20, "head.epochs": 2, "fedpft.components": 2, "partition": "iid"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_federation(tmp_path_factory.mktemp("run"), sites(3), **SETTINGS)


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of the run folder only, without the sites, their data and their caches."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def tensors(head: Head | Path) -> dict[str, Tensor]:
    return (
        {"weight": head.weight, "bias": head.bias}
        if isinstance(head, Head)
        else load_file(head / "model.safetensors")
    )


def same(first: Head | Path, second: Head | Path) -> bool:
    ours, theirs = tensors(first), tensors(second)
    return set(ours) == set(theirs) and all(ours[name].equal(theirs[name]) for name in ours)


def test_learning_again_from_all_sites_gives_the_same_head(run: Path) -> None:
    folder, head = refit(run)
    assert same(head, run)
    assert same(head, folder)
    assert folder.parent == run / "refitted"


def test_a_head_without_a_site_is_learned_from_the_others_alone(run: Path) -> None:
    folder, head = refit(run, without=["1"])
    others = [unpack_surrogate((run / "surrogates" / f"{name}.pb").read_bytes()) for name in "02"]
    config = json.loads((run / "manifest.json").read_text())["config"]
    settings = {"epochs": config["head.epochs"], "min_steps": config["head.min-steps"]}
    assert same(head, learn(others, HeadSettings(**settings), config["seed"]))
    assert not same(head, run)
    assert json.loads((folder / "manifest.json").read_text()) == {
        "sites": ["0", "2"],
        "without": ["1"],
        "classes": [str(digit) for digit in range(10)],
    }


def test_a_head_without_a_site_is_the_one_of_a_run_without_it(run: Path, tmp_path: Path) -> None:
    grid = InProcessGrid(sites(3), {1: Fault(offline=True)})
    assert same(
        refit(run, without=["1"])[1], run_federation(tmp_path, grid, deadline=0.2, **SETTINGS)
    )


STATISTICS = {
    "gram": {"fedpft.covariance": "gram"},
    "8 bits": {"fedpft.covariance": "lowrank", "fedpft.bits": 8},
    "ridge": {"fedpft.covariance": "gram", "head.solver": "ridge", "head.shrinkage": 0.1},
}


@pytest.mark.parametrize("settings", STATISTICS.values(), ids=STATISTICS)
def test_leaving_a_sum_of_statistics_is_exact_to_the_bit(
    settings: dict[str, str | int | float], tmp_path: Path
) -> None:
    whole = run_federation(tmp_path / "all", sites(3), partition="iid", **settings)
    grid = InProcessGrid(sites(3), {1: Fault(offline=True)})
    without = run_federation(tmp_path / "two", grid, deadline=0.2, partition="iid", **settings)
    assert same(refit(whole, without=["1"])[1], without)
    assert same(refit(whole)[1], whole)
    learned = json.loads((whole / "metrics.json").read_text())["learning"]
    assert learned["solver"] in ("lda", "ridge")
    assert 0 < learned["shrinkage"] <= 1


@pytest.mark.parametrize(
    "settings", [SETTINGS, {"fedpft.covariance": "gram"}, {"fedpft.bits": 8}], ids=str
)
def test_a_site_that_joins_later_gives_the_head_of_a_run_in_time_to_the_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings | {"partition": "iid"}
    whole = run_federation(tmp_path / "whole", sites(3), report=False, **settings)
    grid = InProcessGrid(sites(3), {1: Fault(late="evaluate")})
    late = run_federation(tmp_path / "late", grid, deadline=0.2, report=False, **settings)
    assert not same(late, whole)
    assert same(refit(late)[1], whole)


def test_a_head_can_be_learned_for_some_classes_only(run: Path) -> None:
    folder, head = refit(run, classes=["7", "1", "3"])
    assert head.header.classes == ("1", "3", "7"), "in the run's own order"
    assert head.weight.shape == (3, 64)
    parts = [
        without_classes(surrogate, ["1", "3", "7"])
        for surrogate in map(unpack_surrogate, read_payloads(run))
    ]
    assert [part.header.classes for part in parts if part] == [("1", "3", "7")] * 3
    assert json.loads((folder / "manifest.json").read_text())["classes"] == ["1", "3", "7"]


def test_a_class_that_left_with_its_only_site_is_gone(tmp_path: Path) -> None:
    run = run_federation(tmp_path, sites(5), **SETTINGS | {"partition": "classes"})
    only = unpack_surrogate(read_payloads(run)[2]).header.classes
    _, head = refit(run, without=["2"])
    assert set(head.header.classes) == {str(digit) for digit in range(10)} - set(only)
    with pytest.raises(RunError, match=f"class '{only[0]}' is not in this run"):
        refit(run, without=["2"], classes=[only[0]])


def test_what_does_not_exist_is_named_beside_what_does(run: Path) -> None:
    with pytest.raises(RunError, match="site 'clinic' is not in this run; it has 0, 1, 2"):
        refit(run, without=["0", "clinic"])
    with pytest.raises(RunError, match="class 'plague' is not in this run; it has 0, 1, 2"):
        refit(run, classes=["1", "plague"])
    with pytest.raises(RunError, match="no surrogate is left"):
        refit(run, without=["0", "1", "2"])
    assert not (run / "refitted").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        refit(tmp_path)
    for file in (run / "surrogates").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(SurrogateError, match="not a valid surrogate"):
        refit(run)
