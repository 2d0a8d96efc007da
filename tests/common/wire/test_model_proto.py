"""Updates and classifiers of every kind in messages and files: they come back, and malformed ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from fedsurrogate.common.models.generators import Generator, fresh_generator, tensors_of
from fedsurrogate.common.models.networks import convnet, parameters_of
from fedsurrogate.common.models.parameters import Parameters, check_update, largest
from fedsurrogate.common.privacy.shares import ALL, STATED
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import (
    pack_generator,
    read_generator,
    write_synthetic_set,
)
from fedsurrogate.common.wire.model_proto import (
    classifier_of,
    file_content,
    load_model,
    pack_classifier,
    pack_parameters,
    pack_relay,
    save_model,
    unpack_classifier,
    unpack_parameters,
    unpack_relay,
)

CLASSES = ("a", "b", "c")
HEADER = Header("fedavg", "0123456789abcdef", "s", "f" * 16, CLASSES)


def update(**tensors: torch.Tensor) -> Parameters:
    return Parameters(HEADER, 2, tensors, 5)


def test_an_update_comes_back_within_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = update(
        weight=1e-6 * torch.randn(3, 40, generator=generator),
        bias=1e6 * torch.randn(3, generator=generator),
    )
    back = unpack_parameters(pack_parameters(sent))
    assert (back.header, back.round, back.records, back.claim) == (HEADER, 2, 5, None)
    for name, tensor in sent.tensors.items():
        assert torch.allclose(
            back.tensors[name], tensor, rtol=1e-3, atol=float(tensor.abs().max()) * 1e-7
        )
    assert (
        pack_parameters(sent)
        == pack_parameters(back)
        == pack_parameters(replace(sent, tensors=dict(sent.tensors)))
    )


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 1.0])
def test_zeros_do_not_travel(keep: float) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(30, 40, generator=generator)
    tensor = torch.where(torch.rand(30, 40, generator=generator) < keep, dense, 0.0)
    payload = pack_parameters(update(weight=tensor))
    assert len(payload) < 150 + 1200 // 8 + 2 * int((tensor != 0).sum()) + (0 if keep < 1 else 10)
    assert torch.allclose(unpack_parameters(payload).tensors["weight"], tensor, rtol=1e-3)


def test_the_largest_entries_are_chosen_over_all_tensors() -> None:
    found = largest(
        {"a": torch.tensor([1.0, -5.0, 2.0]), "b": torch.tensor([[4.0], [0.5], [3.0]])}, 0.5
    )
    assert found["a"].tolist() == [0, -5, 0]
    assert found["b"].tolist() == [[4], [0], [3]]
    same = {"a": torch.tensor([1.0, 0.0])}
    assert torch.equal(largest(same, 1.0)["a"], same["a"])


def test_every_kind_of_model_predicts_the_same_after_the_journey() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(50, 64, generator=generator)
    heads = [
        Head(HEADER, torch.randn(3, 64, generator=generator), torch.randn(3, generator=generator))
        for _ in range(3)
    ]
    models = [
        heads[0],
        *(replace(heads[0], mean_over_columns=each) for each in STATED.values()),
        Ensemble(tuple(heads)),
        Ensemble(tuple(heads), highest=True),
        Network(HEADER, "convnet", 64, parameters_of(convnet(64, 3, 4))),
        *(
            Quadratic(HEADER, features[:3], torch.randn(3, *shape, generator=generator), bias)
            for shape, bias in (((64,), torch.arange(3.0)), ((64, 64), torch.zeros(3)))
        ),
    ]
    for model in models:
        back = unpack_classifier(pack_classifier(model))
        assert type(back) is type(model)
        assert back.dimension == 64
        assert back.arrays().keys() == model.arrays().keys()
        for name, tensor in model.arrays().items():
            torch.testing.assert_close(back.arrays()[name], tensor, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(
            back.scores(features), model.scores(features), rtol=0.02, atol=0.05
        )


def test_malformed_updates_are_refused() -> None:
    good = pb.Parameters()
    good.ParseFromString(pack_parameters(update(weight=torch.tensor([0.0] * 30 + [1.0, 2.0]))))

    def edited(**changes: object) -> bytes:
        message = pb.Parameters()
        message.CopyFrom(good)
        for name, value in changes.items():
            setattr(message.tensors[0], name, value)
        return message.SerializeToString()

    unpack_parameters(edited())
    for payload in (b"\xff", edited(kept=b"1"), edited(kept=b"\xff" * 4), edited(name="x" * 300)):
        with pytest.raises(SurrogateError):
            unpack_parameters(payload)
    huge = pb.Parameters()
    huge.CopyFrom(good)
    huge.tensors[0].shape[:] = [2**31, 2**31]
    with pytest.raises(SurrogateError, match="do not mark"):
        unpack_parameters(huge.SerializeToString())
    for shape, kept in (
        ([2**32 - 1] * 40, b"\xff"),
        ([2**31, 2**31, 4], b""),
        ([2**31, 2**31, 4], b"\xff"),
    ):
        huge.tensors[0].CopyFrom(
            pb.Tensor(name="weight", kept=kept, shape=shape, values=pb.Halves(shape=shape, scale=1))
        )
        with pytest.raises(SurrogateError):
            unpack_parameters(huge.SerializeToString())
    twice = pb.Parameters()
    twice.CopyFrom(good)
    twice.tensors.append(good.tensors[0])
    with pytest.raises(SurrogateError, match="twice"):
        unpack_parameters(twice.SerializeToString())


def test_a_network_that_cannot_be_built_is_refused_before_memory_is_taken() -> None:
    network = Network(HEADER, "convnet", 64, parameters_of(convnet(64, 3, 4)))
    for broken in (
        replace(network, inputs=65),
        replace(network, tensors={}),
        replace(
            network,
            tensors=dict(network.tensors) | {"convolution1.weight": torch.zeros(2000, 1, 3, 3)},
        ),
        replace(network, tensors=dict(network.tensors) | {"linear.bias": torch.zeros(4)}),
        replace(network, tensors=dict(network.tensors) | {"more": torch.zeros(4)}),
    ):
        with pytest.raises(SurrogateError):
            unpack_classifier(pack_classifier(broken))


def test_an_update_must_fit_the_model_and_the_round() -> None:
    shapes = {"weight": (3, 4), "bias": (3,)}
    good = update(weight=torch.zeros(3, 4), bias=torch.zeros(3))
    check_update(good, shapes, 2, private=False)
    for bad, private, reason in (
        (update(weight=torch.zeros(3, 4)), False, "tensors that are not this run's"),
        (update(weight=torch.zeros(4, 3), bias=torch.zeros(3)), False, "tensors that are not this run's"),
        (update(weight=torch.full((3, 4), torch.nan), bias=torch.zeros(3)), False, "not finite"),
        (update(weight=torch.full((3, 4), 1e20), bias=torch.zeros(3)), False, "beyond"),
        (replace(good, round=3), False, "round 3"),
        (replace(good, records=0), False, "0 records"),
        (replace(good, records=10**12), False, "records"),
        (good, True, "5 records"),
    ):  # fmt: skip
        with pytest.raises(SurrogateError, match=reason):
            check_update(bad, shapes, 2, private)


def test_a_relay_is_a_list_of_payloads() -> None:
    assert unpack_relay(pack_relay([b"a", b"", b"ccc"])) == [b"a", b"", b"ccc"]
    with pytest.raises(SurrogateError, match="not a valid relay"):
        unpack_relay(b"\xff")


@pytest.mark.parametrize(("length", "fine"), [(1, True), (200, True), (201, False)])
def test_a_tensors_name_has_at_most_200_characters(length: int, fine: bool) -> None:
    sent = pack_parameters(update(**{"n" * length: torch.ones(2)}))
    if fine:
        assert list(unpack_parameters(sent).tensors) == ["n" * length]
        return
    with pytest.raises(SurrogateError, match="too long"):
        unpack_parameters(sent)


@given(st.integers(0, 2**20), st.floats(1e3, 1e5))
def test_what_all_classes_have_in_common_takes_no_bits_of_what_tells_them_apart(
    seed: int, common: float
) -> None:
    """Discriminant analysis with a nearly singular covariance leaves such heads; at 16 bits their
    decisions became those of the largest class.
    """
    random = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(3, 8, generator=random), torch.randn(3, generator=random)
    features = torch.randn(200, 8, generator=random)
    header = Header("fedpft", "run", "", "print", ("a", "b", "c"))
    plain, shifted = Head(header, weight, bias), Head(header, weight, bias + common)
    released = unpack_classifier(pack_classifier(shifted))
    best, second = plain.scores(features).topk(2, 1).values.T
    # Of the differences, single precision keeps this much next to the common part.
    clear = best - second > 0.05 + common * 1e-6
    assert clear.any()
    assert torch.equal(released.predict(features)[clear], plain.predict(features)[clear])
    assert pack_classifier(plain) == pack_classifier(Head(header, weight, bias))


FILE_HEADER = Header("", "", "coordinator", "print", ("a", "b, c", "ü"))
COUNT, DIMENSION, INNER = 3, 4, 2


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


@st.composite
def heads(draw: st.DrawFn) -> Head:
    projection = random(INNER, DIMENSION) if draw(st.booleans()) else None
    return Head(
        FILE_HEADER,
        random(COUNT, DIMENSION if projection is None else INNER),
        random(COUNT),
        draw(st.sampled_from([None, 0.0, 1e-6, 0.5, 1e6])),
        random(DIMENSION) if draw(st.booleans()) else None,
        projection,
        mean_over_columns=draw(st.sampled_from([ALL, *STATED.values()])),
    )


PLAIN = st.builds(lambda: Head(FILE_HEADER, random(COUNT, DIMENSION), random(COUNT)))
MODELS = st.one_of(
    heads(),
    st.builds(Ensemble, st.lists(PLAIN, min_size=1, max_size=3).map(tuple), st.booleans()),
    st.builds(
        lambda: Quadratic(
            FILE_HEADER,
            random(COUNT, DIMENSION),
            random(COUNT, DIMENSION, DIMENSION),
            random(COUNT),
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
    about = form | {"classes": json.dumps(FILE_HEADER.classes), "fingerprint": "print"}
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
    about: dict[str, Any] = form | {
        "classes": json.dumps(FILE_HEADER.classes),
        "fingerprint": "print",
    }
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
    about = {"classes": json.dumps(FILE_HEADER.classes), "fingerprint": "print"}
    tensors = {"weight": random(heads, COUNT, DIMENSION), "bias": random(biases, COUNT)}
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


HEAD_HEADER = Header("fedpft", "r", "coordinator", "f", ("a", "b", "c"))


def head_of(dimension: int = 4, classes: tuple[str, ...] = HEAD_HEADER.classes) -> Head:
    draw = torch.Generator().manual_seed(dimension)
    weight = torch.randn(len(classes), dimension, generator=draw)
    return Head(replace(HEAD_HEADER, classes=classes), weight, torch.ones(len(classes)))


@pytest.mark.parametrize(
    "other", [head_of(5), head_of(4, ("a", "b", "d")), head_of(4, ("a", "c", "b"))]
)
def test_heads_of_an_ensemble_have_the_same_classes_and_features(other: Head) -> None:
    fine = unpack_classifier(pack_classifier(Ensemble((head_of(), head_of()))))
    assert isinstance(fine, Ensemble)
    assert fine.dimension == 4
    with pytest.raises(SurrogateError, match="heads of different classes or dimensions"):
        unpack_classifier(pack_classifier(Ensemble((head_of(), other))))


def test_a_generator_of_a_file_has_the_budget_and_the_shape_of_its_run(tmp_path: Path) -> None:
    own = {"method": "dpcvae", "seed": 9, "epsilon": 6.0, "delta": 1e-4}
    run = parse_run(own | {"dpcvae.latent": 2, "dpcvae.hidden": 3})
    tensors = tensors_of(fresh_generator(run.settings, run.method.adversarial, 3, 5))
    header = Header("dpcvae", run.digest, "coordinator", "f", ("a", "b", "c"))
    file = tmp_path / "generator.safetensors"
    file.write_bytes(pack_generator(Generator(header, run, tensors)))
    found = read_generator(file)
    settings: Any = found.run.settings
    assert (settings.method, settings.seed) == ("dpcvae", 9)
    assert (settings.epsilon, settings.delta) == (6.0, 1e-4)
    assert settings.dpcvae == run.settings.dpcvae
    assert found.header == header
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor)

    drawn = write_synthetic_set(tmp_path / "set", found, torch.tensor([0, 2, 2]), 3, {"own": 1})
    torch.testing.assert_close(
        drawn, found.draw(torch.tensor([0, 2, 2]), torch.Generator().manual_seed(3))
    )
    with safe_open(tmp_path / "set", "pt") as content:
        facts = content.metadata()
        assert torch.equal(content.get_tensor("x"), drawn.half())
        assert content.get_tensor("y").tolist() == [0, 2, 2]
    assert (facts["classes"], facts["fingerprint"]) == ("a,b,c", "f")
    described = json.loads(facts["manifest"])
    assert (described["own"], described["seed"]) == (1, 3)
    assert described["records"] == {"a": 1, "b": 0, "c": 2}
