"""A model file gives the classifier that was written, and nothing else is a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Quadratic
from fedsurrogate.common.privacy.shares import ALL, KEPT, MEAN_ALONE, REMOVED
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import classifier_of, file_content, load_model, save_model

HEADER = Header("", "", "coordinator", "print", ("a", "b, c", "ü"))
CLASSES, DIMENSION, INNER = 3, 4, 2


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


@st.composite
def heads(draw: st.DrawFn) -> Head:
    projection = random(INNER, DIMENSION) if draw(st.booleans()) else None
    return Head(
        HEADER,
        random(CLASSES, DIMENSION if projection is None else INNER),
        random(CLASSES),
        draw(st.sampled_from([None, 0.0, 1e-6, 0.5, 1e6])),
        random(DIMENSION) if draw(st.booleans()) else None,
        projection,
        mean_over_columns=draw(st.sampled_from([ALL, KEPT, MEAN_ALONE, REMOVED])),
    )


PLAIN = st.builds(lambda: Head(HEADER, random(CLASSES, DIMENSION), random(CLASSES)))
MODELS = st.one_of(
    heads(),
    st.builds(Ensemble, st.lists(PLAIN, min_size=1, max_size=3).map(tuple), st.booleans()),
    st.builds(
        lambda: Quadratic(
            HEADER,
            random(CLASSES, DIMENSION),
            random(CLASSES, DIMENSION, DIMENSION),
            random(CLASSES),
        )
    ),
)


@settings(max_examples=30)
@given(MODELS)
def test_a_file_gives_the_model_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, model: Classifier
) -> None:
    file = tmp_path_factory.mktemp("models") / "model.safetensors"
    save_model(model, file)
    found = load_model(file)
    assert type(found) is type(model)
    assert found.header == model.header
    for name in ("clip", "mean_over_columns"):
        assert getattr(found, name, None) == getattr(model, name, None)
    assert found.arrays().keys() == model.arrays().keys()
    for name, tensor in model.arrays().items():
        assert torch.equal(found.arrays()[name], tensor), name
    x = random(5, DIMENSION)
    assert torch.equal(found.scores(x), model.scores(x))
    # Numbers of 16 bits give the same model with their rounding, in numbers of 32 bits.
    form, tensors = file_content(model)
    about = form | {"classes": json.dumps(HEADER.classes), "fingerprint": "print"}
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        again = classifier_of(about, {name: each.to(kind) for name, each in tensors.items()})
        for name, each in again.arrays().items():
            assert each.itemsize >= 4
            assert torch.equal(each, tensors[name].to(kind).to(each.dtype))


WRONG: list[dict[str, Any]] = [
    {"classes": None}, {"classes": "["}, {"classes": '"abc"'}, {"classes": '{"a": 1}'}, {"classes": "[1, 2, 3]"},
    {"classes": "[" * 10_000}, {"classes": '["a"]'}, {"classes": '["a", "b", "c", "d"]'},
    {"clip": "-1"}, {"clip": "nan"}, {"clip": "inf"}, {"clip": "wide"}, {"kind": "tree"}, {"columns": "sorted"},
    {"kind": "linear"}, {"kind": "linear", "inputs": "many"},
]  # fmt: skip


@settings(max_examples=60)
@given(
    heads(),
    st.sampled_from(WRONG) | st.sampled_from(["weight", "bias", "centre", "projection"]),
    st.booleans(),
)
def test_a_file_of_another_form_is_refused(head: Head, wrong: Any, gone: bool) -> None:
    form, tensors = file_content(head)
    about: dict[str, Any] = form | {"classes": json.dumps(HEADER.classes), "fingerprint": "print"}
    classifier_of(about, tensors)
    if isinstance(wrong, dict):
        about = {name: each for name, each in (about | wrong).items() if each is not None}
    elif wrong not in tensors:
        return
    elif gone and wrong in ("weight", "bias"):
        tensors = {name: each for name, each in tensors.items() if name != wrong}
    else:
        whole = torch.ones(tensors[wrong].shape, dtype=torch.int64)
        tensors = tensors | {wrong: whole if gone else tensors[wrong][:-1]}
    with pytest.raises(SurrogateError):
        classifier_of(about, tensors)


@pytest.mark.parametrize(("heads", "biases"), [(0, 0), (2, 1), (0, 1)])
def test_an_ensemble_has_a_bias_for_each_of_its_heads(heads: int, biases: int) -> None:
    about = {"classes": json.dumps(HEADER.classes), "fingerprint": "print"}
    tensors = {"weight": random(heads, CLASSES, DIMENSION), "bias": random(biases, CLASSES)}
    with pytest.raises(SurrogateError):
        classifier_of(about, tensors)


@pytest.mark.parametrize("content", [b"", b"no model", bytes(100)])
def test_what_is_no_file_of_tensors_is_refused_with_its_name(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "m").write_bytes(content)
    for name in ("m", "missing"):
        with pytest.raises(SurrogateError, match=f"{name}' is not a readable model"):
            load_model(tmp_path / name)
