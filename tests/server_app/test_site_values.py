"""Values of hospitals: they add up, and swapped labels, inverted images and an honest but different
site are seen.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.server_app.counting import CountingBudget
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.site_values import value_of_sites, value_settings
from fedsurrogate.strategies.robustness.site_values import site_values
from tests.strategies.counting.targets import KINDS as TARGETS_OF
from tests.strategies.counting.targets import records, write

KINDS = ("usual-1", "usual-2", "usual-3", "usual-4", "sketch", "swapped", "inverted")
CLASSES = ("0", "1", "2", "3", "4")


def sketch(image: Any) -> Any:
    """The outlines of a digit."""
    return np.abs(np.gradient(image)[0]) + np.abs(np.gradient(image)[1])


def write_hospitals(root: Path) -> Path:
    """Images of seven hospitals and a table: label as the hospital writes it, site, and a test
    split with true labels.
    """
    digits = load_digits()
    rows = np.flatnonzero(np.isin(digits.target.astype(str), CLASSES))
    lines = ["path,label,site,split"]
    (root / "images").mkdir(parents=True)
    for number, row in enumerate(rows):
        site, label, image = (
            KINDS[number % len(KINDS)],
            str(digits.target[row]),
            digits.images[row] / 16,
        )
        split = "test" if number % 5 == 0 and site not in ("swapped", "inverted") else "train"
        if site == "swapped":
            label = {"1": "2", "2": "1", "3": "4", "4": "3"}.get(label, label)
        image = 1 - image if site == "inverted" else sketch(image) if site == "sketch" else image
        path = f"images/{row:04}.png"
        Image.fromarray((255 * np.clip(image, 0, 1)).astype(np.uint8)).save(root / path)
        lines.append(f"{path},{label},{site},{split}")
    (root / "table.csv").write_text("\n".join(lines) + "\n")
    return root


def simulated(home: Path, **more: Any) -> Path:
    settings = {
        "data": "imagefolder",
        "data-dir": str(home / "data"),
        "partition": "column",
        "site-column": "site",
    }
    settings |= {
        "backbone": "pixels",
        "image-size": 8,
        "classes": ",".join(CLASSES),
        "output-dir": str(home / "runs"),
    }
    return simulate_here(
        len(KINDS), settings | {"device": "cpu"} | more, lambda event: None, report=False
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("values")
    write_hospitals(home / "data")
    return home


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"epsilon": 8.0, "delta": 1e-5}], ids=["exact", "private"]
)
def test_swapped_labels_and_inverted_images_are_worth_least_and_an_honest_other_site_is_not_accused(
    home: Path, settings: dict[str, Any]
) -> None:
    folder = simulated(home, **settings)
    result = value_of_sites(folder)
    # Sites have the order of the column's values in the run.
    names = dict(zip(map(str, range(7)), sorted(KINDS), strict=True))
    shares = {names[each["site"]]: each["shapley"] for each in result["sites"]}
    alone = {names[each["site"]]: each["leave_one_out"] for each in result["sites"]}
    order = sorted(shares, key=shares.__getitem__)
    assert set(order[:2]) == {"swapped", "inverted"}
    assert shares["swapped"] < 0
    assert shares["sketch"] > max(shares["swapped"], shares["inverted"])
    assert min(alone, key=alone.__getitem__) in ("swapped", "inverted")
    assert sum(shares.values()) == pytest.approx(result["all"] - result["none"])
    assert result["models"] == 2 ** len(KINDS)
    page = write_report(folder).read_text()
    assert "Value of each hospital" in page
    assert "The model is worse with site" in page


def test_exact_shapley_values_are_those_of_all_orders() -> None:
    worth = {"": 0.1, "a": 0.5, "b": 0.4, "c": 0.1, "ab": 0.8, "ac": 0.45, "bc": 0.5, "abc": 0.75}

    def measure(some: frozenset[str]) -> float:
        return worth["".join(sorted(some))]

    found = {each.site: each for each in site_values("abc", measure)}
    for site in "abc":
        gains = []
        for order in itertools.permutations("abc"):
            before = order[: order.index(site)]
            gains.append(measure(frozenset((*before, site))) - measure(frozenset(before)))
        assert found[site].shapley == pytest.approx(sum(gains) / 6)
    assert found["c"].leave_one_out == pytest.approx(0.75 - 0.8)


def test_beyond_ten_sites_orders_are_drawn_and_the_truth_is_within_four_standard_errors() -> None:
    sites = [f"s{k:02}" for k in range(14)]

    def measure(some: frozenset[str]) -> float:
        return 1 - 0.8 ** sum(int(site[1:]) for site in some) / 2

    drawn = site_values(sites, measure)
    known = {each.site: each for each in site_values(sites, measure, seed=1, orders=4000)}
    for each in drawn:
        assert (
            abs(each.shapley - known[each.site].shapley)
            <= 4 * (each.error + known[each.site].error) + 1e-9
        )
        assert each.error > 0 or each.site == "s00"


def test_only_a_simulation_has_test_records(home: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(
        json.dumps({"config": {"method": "fedpft"}, "simulated": False})
    )
    with pytest.raises(RunError, match="no test records"):
        value_of_sites(tmp_path)


def test_noisy_values_of_a_run_of_numbers_are_refused(tmp_path: Path) -> None:
    """Right decisions of a model of numbers mean nothing; the refusal comes before sites are asked."""
    draw = np.random.default_rng(0)
    sites = [(x := draw.normal(size=(60, 3)), x[:, 0]) for _ in range(2)]
    run = fs.simulate(sites, target="number", target_range=(-3, 3), output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"learned target = 'number'; `coordinator relearn RUN"):
        value_settings(run.folder, privacy=CountingBudget(1.0, 1e-5))


@pytest.mark.parametrize(("kind", "guess"), [("number", 0.0), ("labels", 0.5), ("time", 0.5)])
def test_a_site_with_false_values_is_worth_least(kind: str, guess: float, tmp_path: Path) -> None:
    given = (
        TARGETS_OF[kind] | {"time-head": "cells", "bins": 2} if kind == "time" else TARGETS_OF[kind]
    )
    for site in range(3):
        tables = records(200, site)
        if site == 2:
            tables["x"] = -tables["x"]
        write(tmp_path / "data" / str(site), tables)
    names = ",".join(f"{site}/records" for site in range(3))
    run = simulate_here(
        3,
        {"data": "safetensors", "data-dir": str(tmp_path / "data"), "dataset": names}
        | {"output-dir": str(tmp_path / "runs"), "device": "cpu", "test-fraction": 0.2}
        | given,
        lambda event: None,
        report=False,
    )
    result = value_of_sites(run)
    shares = {each["site"]: each["shapley"] for each in result["sites"]}
    assert min(shares, key=shares.__getitem__) == "2"
    assert result["none"] == guess
    assert sum(shares.values()) == pytest.approx(result["all"] - guess)
