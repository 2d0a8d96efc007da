"""What a site decides with a model, over generated probabilities and scores: threshold, limit to
abstain, the score that it is for, and which model a calibration belongs to.
"""

from __future__ import annotations

import json
import math
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from scipy.optimize import brentq
from scipy.special import expit, logit, softmax

from fedsurrogate.client_app.model_use.adaptation import Adapted, adapted_classifier, store_adapted
from fedsurrogate.client_app.model_use.calibration import (
    Calibration,
    Wish,
    abstain_limit,
    at_prevalence,
    calibration_file,
    decided_answers,
    fit_temperature,
    own_gaussians,
    read_calibration,
    store_calibration,
    threshold_for,
)
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, SealError, StateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.gaussians import Gaussians, fit_gaussians
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    make_signed_model,
    sign_model,
)
from fedsurrogate.common.surrogates.surrogates import Header

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


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.3, 5.0))
def test_at_the_temperature_the_expected_score_is_that_of_the_labels(
    seed: int, true: float
) -> None:
    """The derivative of the likelihood is zero there."""
    drawn = np.random.default_rng(seed)
    scores = 3 * drawn.normal(size=(300, 3))
    chance = softmax(scores / true, axis=1)
    labels = (drawn.random(300)[:, None] > chance.cumsum(1)).sum(1).clip(0, 2)

    def slope(power: float) -> float:
        expected = (softmax(scores / math.exp(power), axis=1) * scores).sum(1)
        return float((expected - scores[np.arange(300), labels]).mean())

    wanted = math.exp(brentq(slope, -4, 4))
    found = fit_temperature(torch.from_numpy(scores).float(), torch.from_numpy(labels))
    assert found == pytest.approx(wanted, rel=1e-3)


CHANCES = st.lists(
    st.tuples(st.sampled_from([0.0, 1e-7, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), st.booleans()),
    min_size=2,
    max_size=12,
)


@given(CHANCES, st.integers(1, 6), st.integers(1, 6))
def test_a_threshold_is_the_last_value_that_keeps_the_sensitivity_or_the_specificity(
    rows: list[tuple[float, bool]], part: int, whole: int
) -> None:
    wished = min(part, whole) / whole
    chances, truth = np.array([c for c, _ in rows]), np.array([t for _, t in rows])
    ill, well = chances[truth].tolist(), chances[~truth].tolist()
    if ill:
        kept = [v for v in sorted(set(chances)) if sum(c >= v for c in ill) / len(ill) >= wished]
        assert threshold_for(chances, truth, wished) == min(max(max(kept), 1e-6), 1 - 1e-6)
    if well:
        right = [
            v
            for v in sorted(set(chances))
            if sum(c < v for c in well) / len(well) >= wished - 1e-12
        ]
        last = min(right, default=math.inf)
        assert threshold_for(chances, truth, specificity=wished) == min(max(last, 1e-6), 1 - 1e-6)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"threshold": 0.0}, "threshold = 0: must be above 0 and below 1"),
        ({"threshold": 1.0}, "threshold = 1: must be above 0 and below 1"),
        ({"threshold": 0.5}, "threshold = 0.5: name the class"),
        ({"temperature": 0.0}, "temperature = 0: must be above 0"),
        ({"temperature": -1.0}, "temperature = -1: must be above 0"),
        ({"temperature": math.inf}, "temperature = inf: must be above 0"),
        ({"temperature": math.nan}, "temperature = nan: must be above 0"),
        ({"score": "other"}, "score = 'other': must be 'relative' or 'mahalanobis'"),
        ({"positive": "d"}, "positive = 'd': the model's classes are a, b, c"),
        ({"thresholds": {"a": 0.0}}, "thresholds: 'a' = 0; the model's labels are a, b, c"),
        ({"thresholds": {"a": 1.0}}, "thresholds: 'a' = 1; the model's labels are a, b, c"),
        ({"prevalence": {"b": 0.5, "d": 0.5}}, "prevalence: 'd' = 0.5; the model's labels"),
        ({"prevalence": {"b": 1.0}}, "prevalence: 'b' = 1; the model's labels"),
    ],
)
def test_a_calibration_that_fits_no_model_is_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Calibration(**changed).checked(("a", "b", "c"))


def test_a_calibration_that_fits_stays_and_of_two_classes_the_second_is_positive() -> None:
    chosen = Calibration(
        1e-6, "b", 1e-6, "mahalanobis", -1.0, "note", {"a": 1e-6, "c": 1 - 1e-6}, {"b": 1e-6}
    )
    assert chosen.checked(("a", "b", "c")) == chosen
    for names, positive in ((("a",), ""), (("a", "b"), "b"), (("a", "b", "c"), "")):
        assert Calibration().checked(names).positive == positive
    assert Calibration(positive="a").checked(("a", "b")).positive == "a"
    assert Calibration(threshold=0.5).checked(("a", "b")).positive == "b"


def test_a_choice_replaces_and_none_is_no_choice() -> None:
    kept = Calibration(score="relative", abstain_above=3.0, note="kept")
    assert kept.chosen(threshold=0.2, note=None) == Calibration(
        threshold=0.2, abstain_above=3.0, note="kept"
    )
    with pytest.raises(ConfigError, match=r"score = 'mahalanobis': the stored number.*'relative'"):
        kept.chosen(score="mahalanobis")
    for found in (
        kept.chosen(score="mahalanobis", abstain_above=4.0),
        Calibration(abstain_above=None).chosen(score="mahalanobis"),
    ):
        assert found.score == "mahalanobis"
    assert kept.chosen(score="relative") == kept


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.0, 1e-7, 1e-5, 0.1, 0.5, 0.9, 1.0]), min_size=2, max_size=2),
    st.sampled_from([None, 1e-7, 1e-5, 0.3]),
    st.sampled_from([None, 0.2, 0.5]),
    st.integers(0, 10**6),
)
def test_odds_of_a_label_are_multiplied_by_the_ratio_of_its_odds_here_and_there(
    learned: list[float], own: float | None, threshold: float | None, seed: int
) -> None:
    """Shares are kept a millionth from zero and one."""
    names = ("edema", "mass")
    scores = np.random.default_rng(seed).normal(size=(5, 2))
    target = json.dumps({"name": "multilabel", "columns": ["mass", "edema"], "prevalence": learned})
    chosen = Calibration(
        prevalence={} if own is None else {"mass": own},
        thresholds={} if threshold is None else {"mass": threshold},
        threshold=0.4,
        positive="edema",
    )
    wanted = scores.copy()
    if own is not None:
        shares = [min(max(each, 1e-6), 1 - 1e-6) for each in (own, learned[1])]
        wanted[:, 1] += logit(shares[0]) - logit(shares[1])
    single = at_prevalence(target, names, torch.from_numpy(scores).float(), chosen)
    assert single.dtype == torch.float64
    found = at_prevalence(target, names, torch.from_numpy(scores), chosen)
    assert found.numpy() == pytest.approx(wanted)
    answers = decided_answers(target, names, torch.from_numpy(scores), chosen)
    for at, (name, limit) in enumerate((("edema", 0.4), ("mass", threshold))):
        assert answers[name].numpy() == pytest.approx(expit(wanted[:, at]))
        if limit is None:
            assert f"{name} present" not in answers
        else:
            present = (answers[name].numpy() >= limit).astype(float).tolist()
            assert answers[f"{name} present"].tolist() == present


@pytest.fixture(scope="module")
def model() -> SignedModel:
    return make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)


@pytest.fixture(scope="module")
def gaussians() -> Gaussians:
    return fit_gaussians(*records(1))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "5",
        "[]",
        '"text"',
        "{}",
        "[" * 100_000,
        '{"tensors": TENSORS, "other": 1}',
        '{"tensors": TENSORS, "temperature": "warm"}',
        '{"tensors": TENSORS, "threshold": [1]}',
    ],
)
def test_a_damaged_calibration_is_named(tmp_path: Path, model: SignedModel, content: str) -> None:
    node = NodeConfig(state_dir=str(tmp_path))
    file = calibration_file(node, model.manifest.name)
    file.parent.mkdir()
    file.write_text(content.replace("TENSORS", json.dumps(model.manifest.tensors)))
    with pytest.raises(StateError, match=r"cannot be read \(\w+\); remove it, and calibrate again"):
        read_calibration(node, model)
    assert own_gaussians(node, model) is None
    file.unlink()
    file.mkdir()
    with pytest.raises(StateError, match=r"cannot be read \(IsADirectoryError\)"):
        read_calibration(node, model)
    assert own_gaussians(node, model) is None


def test_own_gaussians_are_those_that_were_kept_or_none_or_a_fault(
    tmp_path: Path, model: SignedModel, gaussians: Gaussians
) -> None:
    node = NodeConfig(state_dir=str(tmp_path))
    assert own_gaussians(node, model) is None
    assert own_gaussians(None, model) is None
    file = store_calibration(node, model, Calibration(), gaussians)
    own = file.parent / f"{model.manifest.name}.gaussians.safetensors"
    found = own_gaussians(node, model)
    assert found is not None
    for name, tensor in gaussians.tensors().items():
        assert torch.equal(found.tensors()[name], tensor)
    whole = own.read_bytes()
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    # A side of zero next to a huge one is valid safetensors, and no tensor of torch.
    header = json.dumps({"x": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}})
    odd = len(header).to_bytes(8, "little") + header.encode()
    empty = (2).to_bytes(8, "little") + b"{}"
    for content in (changed, b"", whole[:20], odd, empty):
        own.write_bytes(content)
        with pytest.raises(SealError, match=r"gaussians\.safetensors was changed; run"):
            own_gaussians(node, model)
    own.unlink()
    assert own_gaussians(node, model) is None


@pytest.mark.parametrize("name", ["sensitivity", "specificity"])
def test_a_share_for_a_threshold_is_above_zero_and_at_most_one(name: str) -> None:
    for share in (-0.1, 1 + 1e-9, math.nan):
        with pytest.raises(ConfigError, match=rf"--{name} {share:g}: must be above 0, at most 1"):
            Wish(**{name: share})
    chances, truth = np.array([0.2, 0.8]), np.array([name == "specificity"] * 2)
    with pytest.raises(ConfigError, match=r"no record of the (positive|negative) class"):
        threshold_for(chances, truth, **{name: 0.5})


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.5])
def test_a_limit_needs_one_record_less_than_one_over_its_share(share: float) -> None:
    least = round(1 / share) - 1
    scores = torch.arange(float(least)).flip(0)
    assert abstain_limit(scores, share) == least - 1
    wanted = rf"abstain = {share:g}: needs {least} records to choose the limit, not {least - 1};"
    with pytest.raises(ConfigError, match=wanted):
        abstain_limit(scores[1:], share)
    # A share that is smaller, however little, needs the next score; only rounding is forgiven.
    whole = torch.arange(2.0 * (least + 1) - 1)
    assert abstain_limit(whole, share) == 2 * least - 1
    assert abstain_limit(whole, share - 1e-8) == 2 * least
    for other in (0.0, 1.0, -1.0):
        with pytest.raises(ConfigError, match="must be above 0 and below 1"):
            abstain_limit(scores, other)


@pytest.mark.parametrize("learned", [None, [0.5], [0.5, 0.5, 0.5], 0.5])
def test_a_model_that_does_not_say_its_prevalence_takes_none(learned: object) -> None:
    target = json.dumps({"name": "multilabel", "columns": ["mass"], "prevalence": learned})
    scores = torch.ones(2, 2)
    with pytest.raises(ConfigError, match="does not say which it has learned"):
        at_prevalence(target, ("a", "b"), scores, Calibration(prevalence={"a": 0.5}))
    assert torch.equal(at_prevalence(target, ("a", "b"), scores, Calibration()), scores.double())
