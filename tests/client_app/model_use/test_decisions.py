"""What a site decides with a model, over generated probabilities and scores: threshold, limit to
abstain, the score that it is for, and which model a calibration belongs to.
"""

from __future__ import annotations

import csv
import math
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from fedsurrogate.client_app.model_use.adaptation import Adapted, adapted_classifier, store_adapted
from fedsurrogate.client_app.model_use.calibration import (
    Calibration,
    abstain_limit,
    own_gaussians,
    read_calibration,
    store_calibration,
)
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import ConfigError, SealError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    make_signed_model,
    sign_model,
)
from fedsurrogate.common.surrogates.surrogates import Header
from tests.client_app.model_use.hospitals import (
    CLASSES,
    federation,
    rows_of_classes,
    site,
    text,
    write_images,
)

KEY = bytes(range(32))
NAMES = ("a", "b", "c", "d")


@st.composite
def chances(draw: st.DrawFn) -> np.ndarray:
    """Probabilities (n, C) of two to four classes; many are on the grid of the thresholds."""
    count, classes = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    parts = st.lists(st.integers(0, 20), min_size=classes, max_size=classes).filter(sum)
    rows = [draw(parts) for _ in range(count)]
    return np.array([[part / sum(row) for part in row] for row in rows])


@given(chances(), st.data())
@settings(max_examples=200)
def test_the_positive_class_wins_from_its_threshold_on_and_never_below(
    probabilities: np.ndarray, data: DataObject
) -> None:
    names = NAMES[: probabilities.shape[1]]
    positive = data.draw(st.integers(0, len(names) - 1))
    exact = sorted({value for value in probabilities[:, positive].tolist() if 0 < value < 1})
    threshold = data.draw(st.sampled_from(exact) if exact else st.just(0.5)) * data.draw(
        st.sampled_from([1.0, 1.0, 1 - 1e-9, 1 + 1e-9])
    )
    assume(0 < threshold < 1)
    calibration = Calibration(positive=names[positive], threshold=threshold).checked(names)
    for row, found in zip(
        probabilities.tolist(), calibration.decisions(probabilities, names), strict=True
    ):
        others = {k: value for k, value in enumerate(row) if k != positive}
        assert (found == positive) == (row[positive] >= threshold)
        if found != positive:
            assert others[int(found)] == max(others.values())


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=120, unique=True),
    st.integers(1, 199),
)
@settings(max_examples=200)
def test_the_limit_is_an_order_statistic(values: list[float], part: int) -> None:
    """The ceil((n + 1) (1 - share))-th smallest, in exact arithmetic."""
    share = Fraction(part, 200)
    place = math.ceil((len(values) + 1) * (1 - share))
    scores = torch.tensor(values)
    if place > len(values):
        with pytest.raises(ConfigError, match="needs"):
            abstain_limit(scores, float(share))
        return
    assert abstain_limit(scores, float(share)) == sorted(scores.tolist())[place - 1]


def records(seed: int, count: int = 80, dimension: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of different spread, for which the two scores order records differently."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    spread = torch.tensor([0.3, 1.0, 3.0])[labels][:, None]
    means = 2 * torch.randn(3, dimension, generator=generator)
    return means[labels] + spread * torch.randn(count, dimension, generator=generator), labels


def head(seed: int, dimension: int = 6) -> Head:
    weight = torch.randn(3, dimension, generator=torch.Generator().manual_seed(seed))
    header = Header("fedpft", "run", "coordinator", "f" * 64, ("a", "b", "c"))
    return Head(header, weight, torch.zeros(3), None)


def renamed(model: SignedModel, name: str) -> SignedModel:
    manifest = model.manifest.model_copy(update={"name": name})
    return sign_model(model.classifier, model.gaussians, manifest, KEY)


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0.1, 0.9))
@settings(max_examples=25)
def test_what_is_stored_for_a_model_is_not_used_for_another_of_its_name(
    seed: int, step: int, threshold: float
) -> None:
    older, newer = (
        renamed(
            make_signed_model(head(each), parse_run({}), None, "1", 2, KEY), "20260101-fedpft-x"
        )
        for each in (seed, seed + step)
    )
    own = fit_gaussians(*records(seed))
    with tempfile.TemporaryDirectory() as state:
        node = NodeConfig(state_dir=state)
        chosen = Calibration(temperature=2.0, positive="b", threshold=threshold)
        store_calibration(node, older, chosen, own)
        own_part = Adapted(older.classifier, torch.ones(1), head(seed + 7).weight, torch.zeros(3))
        store_adapted(node, older, own_part, "chosen")
        assert read_calibration(node, older) == chosen
        kept = own_gaussians(node, older)
        assert kept is not None
        assert torch.equal(kept.means, own.means)
        assert adapted_classifier(node, older) is not None
        assert read_calibration(node, newer) == Calibration()
        assert own_gaussians(node, newer) is None
        with pytest.raises(SealError, match="its digest does not fit"):
            adapted_classifier(node, newer)


def test_the_stored_threshold_decides_in_the_command(tmp_path: Path) -> None:
    """At a threshold that some images reach: every other rule gives other decisions."""
    nodes, _ = federation(tmp_path)
    write_images(tmp_path / "new", rows_of_classes()[240:320], labelled=False)
    node = parse_node_config(nodes[0])
    from fedsurrogate.client_app.model_use.store import open_model

    model = open_model("in-use", node)

    def decided(calibration: Calibration) -> list[dict[str, str]]:
        store_calibration(node, model, calibration)
        out = ("--out", tmp_path / "p.csv", "--overwrite", "--node-config", text(nodes[0]))
        done = site("predict", "--data-dir", tmp_path / "new", *out)
        assert done.code == 0, done
        with (tmp_path / "p.csv").open(newline="") as stream:
            return list(csv.DictReader(stream))

    hot = Calibration(temperature=60.0)
    plain = decided(hot)
    chance = sorted(float(row["p_7"]) for row in plain)
    threshold = (chance[20] + chance[21]) / 2
    rows = decided(replace(hot, positive="7", threshold=threshold))
    assert [row["p_7"] for row in rows] == [row["p_7"] for row in plain]
    rest = tuple(name for name in CLASSES if name != "7")
    assert [row["decision"] for row in rows] == [
        "7"
        if float(row["p_7"]) >= threshold
        else max(rest, key=lambda name: float(row[f"p_{name}"]))
        for row in rows
    ]
    most = [max(CLASSES, key=lambda name: float(row[f"p_{name}"])) for row in rows]
    assert [row["decision"] for row in rows] != most
    assert {row["decision"] for row in rows} == set(CLASSES)
