"""Values of hospitals in a deployment: right decisions of models of some sites, counted with noise
at every hospital.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.model_use.held_out import Source, held_out
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Ensemble, Head
from fedsurrogate.common.signed_models.run_folders import settings_of_run
from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.server_app.counting import CountingBudget
from fedsurrogate.server_app.site_values import (
    model_of,
    noisy_values,
    stored,
    subsets_of,
    value_settings,
)
from fedsurrogate.strategies.counting.evaluated import bounded, read_model
from fedsurrogate.strategies.robustness.site_values import site_values
from tests.client_app.model_use.hospitals import CLASSES
from tests.grid import NodeConfig
from tests.strategies.counting.hospitals import allow, counted, entries, learned

SITES = ["clinic-0", "clinic-1", "clinic-2"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NodeConfig], Path]:
    home = tmp_path_factory.mktemp("values")
    return home, *learned(home)


def exact_shares(nodes: list[NodeConfig], run: Path) -> dict[frozenset[str], float]:
    """Accuracy of the models of all subsets on all held-out records, with the 16-bit heads that
    sites received.
    """
    signed, config = read_signed_model(run / "model.fedsurrogate"), settings_of_run(run)
    strategy, sent = stored(config, run)
    received = read_model(run / "value-heads.pb")
    assert isinstance(received, Ensemble)
    records = [
        held_out(signed, parse_node_config(n), Source(str(n["held-out-dir"]), "imagefolder"))
        for n in nodes
    ]
    found = {frozenset[str](): 1 / 3}
    for some, model in zip(subsets_of(SITES), received.heads, strict=True):
        learned_again = model_of(strategy, sent, some, config.settings.classes)
        assert isinstance(learned_again, Head)
        both = [
            torch.cat([each.weight, each.bias[:, None]], 1)
            for each in (bounded(learned_again), model)
        ]
        # What all classes have in common tells none apart, and is taken out before 16 bits.
        apart = [(each - each.mean(0)).flatten() for each in both]
        assert torch.cosine_similarity(*apart, dim=0) > 1 - 1e-5
        counts = [model.accuracy(each.features, CLASSES, each.labels) for each in records]
        found[some] = sum(right for right, _ in counts) / sum(tested for _, tested in counts)
    return found


def asked(home: Path, nodes: list[NodeConfig], run: Path, epsilon: float) -> dict[str, Any]:
    settings, _ = value_settings(run, CountingBudget(epsilon, 1e-5))
    folder = counted(home, nodes, settings)
    return noisy_values(run, SITES, json.loads((folder / "values.json").read_text()), len(CLASSES))


def test_exact_counts_give_the_values_that_the_models_have(
    hospitals: tuple[Path, list[NodeConfig], Path],
) -> None:
    home, nodes, run = hospitals
    for k in range(3):
        allow(home, k, 'exact-counts = ["values"]\n')
    result = asked(home, nodes, run, 0.0)
    assert result["schema"] == 1
    true = {each.site: each for each in site_values(SITES, exact_shares(nodes, run).__getitem__)}
    for each in result["sites"]:
        assert each["shapley"] == pytest.approx(true[each["site"]].shapley)
        assert each["leave_one_out"] == pytest.approx(true[each["site"]].leave_one_out)
        assert each["error"] == 0


def test_noisy_values_are_charged_and_as_near_as_their_errors(
    hospitals: tuple[Path, list[NodeConfig], Path],
) -> None:
    home, nodes, run = hospitals
    before = len(entries(nodes[0]))
    result = asked(home, nodes, run, 8.0)
    true = {
        each.site: each.shapley for each in site_values(SITES, exact_shares(nodes, run).__getitem__)
    }
    for each in result["sites"]:
        # The number of tested records is noisy too; five deviations, and a twentieth for that.
        assert each["shapley"] == pytest.approx(true[each["site"]], abs=5 * each["error"] + 0.05)
        assert each["error"] > 0
    assert len(entries(nodes[0])) == before + 1
    last = entries(nodes[0])[-1]
    assert (last["method"], last["sensitivities"]["right"]) == ("values", pytest.approx(8**0.5))


def test_noise_that_hides_the_values_is_an_error(
    hospitals: tuple[Path, list[NodeConfig], Path],
) -> None:
    _, _, run = hospitals
    with pytest.raises(RunError, match="the noise hides the values"):
        noisy_values(run, SITES, {"right": [20, *[10] * 7], "noise": 9.0}, 3)


def test_of_many_sites_only_single_ones_are_left_out() -> None:
    many = [f"s{k}" for k in range(9)]
    assert len(subsets_of(many)) == 10
    assert len(subsets_of(SITES)) == 7
    assert subsets_of(SITES)[0] == frozenset(SITES)
