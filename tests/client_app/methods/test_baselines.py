"""Baselines of a simulation are the accuracies that scikit-learn gives for heads of the same
records, and the bytes of what they would send.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score

from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.methods.baselines import _of_all, compare
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header

SITES = 3
SETTINGS: dict[str, Any] = {
    "backbone": "pixels",
    "data": "digits",
    "head.min-steps": 20,
    "head.epochs": 1,
    "test-fraction": 0.5,
    "partition": "dirichlet",
    "alpha": 0.3,
}


def run(**more: Any) -> Run:
    return parse_run(SETTINGS | more)


def node(folder: Path, site: int = 0) -> NodeConfig:
    return NodeConfig(partition_id=site, num_partitions=SITES, cache_dir=str(folder))


def test_baselines_are_those_of_the_sites_own_records(tmp_path: Path) -> None:
    """For a model that does not know all classes: records of the others are wrong for all."""
    config, known = run(compare=True), 7
    names = tuple(map(str, range(known)))[::-1]
    own = [load_site(config, node(tmp_path, site), 512.0) for site in range(SITES)]
    every = [label for each in own for label in each.test.labels.tolist()]
    test = torch.cat([each.test.features for each in own]).float()
    truth = [own[0].classes[label] for label in every]

    def accuracy(scores: torch.Tensor) -> float:
        decided = [names[index] for index in scores.argmax(1).tolist()]
        return float(accuracy_score(truth, decided))

    parts = []
    for each in own:
        labels = torch.tensor(
            [names.index(each.classes[k]) if each.classes[k] in names else -1
             for k in each.train.labels.tolist()]
        )  # fmt: skip
        parts.append((each.train.features[labels >= 0], labels[labels >= 0]))
    heads = [
        train_on_features(x, y, known, config.settings.head, config.settings.seed) for x, y in parts
    ]
    means = [torch.stack(each).mean(0) for each in zip(*heads, strict=True)]
    header = Header("fedpft", "r", "coordinator", "f", names)
    model = Head(header, *heads[0])
    found: Any = compare(model, config, node(tmp_path), baselines=True)
    assert found["accuracy.model"] == pytest.approx(accuracy(test @ heads[0][0].T + heads[0][1]))
    largest = max(truth.count(name) for name in names) / len(truth)
    assert found["accuracy.majority"] == pytest.approx(largest)
    assert found["accuracy.average"] == pytest.approx(accuracy(test @ means[0].T + means[1]))
    chances = torch.stack([(test @ w.T + b).softmax(1) for w, b in heads]).mean(0)
    assert found["accuracy.ensemble"] == pytest.approx(accuracy(chances))
    # One head on all records.
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    weight, bias = train_on_features(x, y, known, config.settings.head, config.settings.seed)
    assert found["accuracy.centralized"] == pytest.approx(accuracy(test @ weight.T + bias))
    assert found["accuracy.centralized"] >= found["accuracy.average"]
    numbers = sum(tensor.numel() for head in heads for tensor in head)
    assert found["bytes.ensemble"] == found["bytes.average"] == 2 * numbers
    assert found["bytes.centralized"] == 2 * sum(x.numel() for x, _ in parts)
    shown = torch.tensor([found["points.x"], found["points.y"]])
    assert shown.shape[1] == sum(name in names for name in truth) == len(found["points.label"])
    plane = model.plane()
    assert plane is not None
    places = (test @ plane)[[name in names for name in truth]]
    assert torch.allclose(shown.sort(1).values, places.T.sort(1).values, atol=1e-3)
    assert set(compare(model, config, node(tmp_path), baselines=False)) == {"accuracy.model"}
    alone = compare(model, run(), node(tmp_path), baselines=True)
    assert not any(key.startswith("bytes") for key in alone)
    assert alone["accuracy.majority"] == found["accuracy.majority"]


def test_a_site_with_data_of_its_own_compares_nothing(tmp_path: Path) -> None:
    model = Head(Header("fedpft", "r", "c", "f", ("0",)), torch.zeros(1, 64), torch.zeros(1))
    with pytest.raises(DataError, match="in a simulation only"):
        compare(model, run(), NodeConfig(data="digits", cache_dir=str(tmp_path)), baselines=True)


@given(st.lists(st.none() | st.lists(st.sampled_from("ab"), max_size=4), max_size=4))
def test_patients_of_two_data_sets_are_two(sets: list[list[str] | None]) -> None:
    """So that an interval takes no two people for one; without IDs somewhere there are none."""
    found = _of_all([None if names is None else tuple(names) for names in sets])
    if None in sets:
        assert found is None
        return
    whole = [(at, name) for at, names in enumerate(sets) for name in names or ()]
    assert found is not None
    assert [found.index(each) for each in found] == [whole.index(each) for each in whole]
