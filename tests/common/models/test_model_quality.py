"""Metrics of a model on test records equal scikit-learn's, and only such texts are read again."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.class_metrics import (
    LONGEST,
    MOST_CLASSES,
    POINTS,
    packed_quality,
    quality_of,
    unpacked_quality,
)


def drawn(classes: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels, some of classes that the model does not know."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, classes, (count,), generator=random)
    scores = torch.randn(count, classes, generator=random)
    scores[torch.arange(count), labels.clamp_min(0)] += 1.5
    return scores, labels


@given(st.integers(2, 5), st.integers(60, 300), st.integers(0, 2**20))
def test_measures_are_those_of_scikit_learn(classes: int, count: int, seed: int) -> None:
    scores, labels = drawn(classes, count, seed)
    names = tuple(f"c{index}" for index in range(classes))
    found = quality_of(scores, labels, names, None)
    assert found is not None
    known = labels >= 0
    truth, chance = labels[known].numpy(), scores[known].double().softmax(1).numpy()
    decided = chance.argmax(1)
    assert (found.records, found.unknown) == (int(known.sum()), int((~known).sum()))
    matrix = sk.confusion_matrix(truth, decided, labels=range(classes))
    assert np.array_equal(np.array(found.confusion), matrix)
    assert found.averages["accuracy"].value == pytest.approx(sk.accuracy_score(truth, decided))
    assert found.majority == pytest.approx(np.bincount(truth).max() / len(truth))
    if classes == 2:
        assert list(found.curves or {}) == [names[int((truth == 1).sum() <= (truth == 0).sum())]]
    again = unpacked_quality(packed_quality(found))
    assert again.confusion == found.confusion
    assert again.averages.keys() == found.averages.keys()
    # The same text, so that metrics.json, the report and its CSV agree.
    assert packed_quality(again) == packed_quality(found)


@pytest.mark.parametrize("label", [-1, 0])
def test_nothing_is_judged_without_a_known_record_or_with_a_broken_score(label: int) -> None:
    scores = torch.full((20, 2), float("nan") if label == 0 else 1.0)
    assert quality_of(scores, torch.full((20,), label), ("a", "b"), None) is None


def test_texts_that_are_no_measures_are_refused() -> None:
    scores, labels = drawn(2, 100, 0)
    found = quality_of(scores, labels, ("a", "b"), None)
    assert found is not None
    facts = json.loads(packed_quality(found))
    for change in (
        {"confusion": [[1, 2, 3]]},
        {"records": "many"},
        {"averages": {"accuracy": {"value": "high"}}},
        {"curves": {"a": {"spiral": None}}},
        {"majority": float("nan")},
        {"classes": 3},
    ):
        with pytest.raises(SurrogateError, match="cannot be read"):
            unpacked_quality(json.dumps(facts | change))
    for text in ("", "[]", "{", "[" * 100_000, "0" * (LONGEST + 1)):
        with pytest.raises(SurrogateError, match="cannot be read"):
            unpacked_quality(text)


def test_many_classes_have_averages_only_and_curves_have_few_points() -> None:
    scores, labels = drawn(MOST_CLASSES + 1, 2500, 0)
    found = quality_of(scores, labels, tuple(map(str, range(MOST_CLASSES + 1))), None)
    assert found is not None
    assert (found.per_class, found.confusion) == ((), ())
    assert "macro_auroc" in found.averages
    assert len(packed_quality(found)) < LONGEST
    for curves in (found.curves or {}).values():
        for name, curve in curves.items():
            assert curve is not None
            # Of a rare class, all records may be in the first bin of the reliability curve.
            least = 1 if name == "reliability" else 2
            assert least <= len(curve[0]) == len(curve[1]) <= POINTS
            assert len(curve) == (3 if name == "reliability" else 2)
