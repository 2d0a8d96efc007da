"""What travels at the edges of what may travel: the last value that is taken and the first that is
not, in numbers and not in the names of limits; and tables whose entries differ by many magnitudes.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.models.classifiers import Head, Network, Quadratic
from fedsurrogate.common.models.networks import convnet, parameters_of
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.shares import ALL, STATED
from fedsurrogate.common.surrogates.covariances import (
    AnyCovariance,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
)
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate, Synthetic
from fedsurrogate.common.wire import generator_files
from fedsurrogate.common.wire.generator_files import read_synthetic_set
from fedsurrogate.common.wire.model_proto import (
    classifier_of,
    file_content,
    load_model,
    pack_classifier,
    pack_parameters,
    pack_synthetic,
    unpack_classifier,
    unpack_parameters,
    unpack_synthetic,
)
from fedsurrogate.common.wire.records import (
    check_form,
    from_record,
    pack_surrogate,
    to_record,
    unpack_surrogate,
)
from fedsurrogate.common.wire.tensors import (
    pack,
    pack_covariance,
    pack_levels,
    unpack_covariance,
    unpack_levels,
)

CLASSES = ("a", "b", "c")
HEADER = Header("fedpft", "run", "site", "print", CLASSES)
few = settings(max_examples=40, deadline=None)
EXPONENTS = st.integers(-12, 6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def carried(covariance: AnyCovariance, total: int, dimension: int, bits: int = 16) -> AnyCovariance:
    tables, levels = pack_covariance(covariance, bits)
    family = {Full: "full", LowRank: "lowrank", Gram: "gram"}[type(covariance)]  # type: ignore[index]
    return unpack_covariance(
        pb.Mixtures(covariance=family, spread=tables, levels=levels), total, dimension
    )


def matrices(covariance: Any) -> Tensor:
    """(M, d, d), double precision."""
    match covariance:
        case Full(cholesky):
            return cholesky.double() @ cholesky.double().mT
        case LowRank(factor, variances):
            return (factor.double() @ factor.double().T + variances.double().diag())[None]
        case Gram(matrix):
            return matrix.double()[None]
    raise TypeError(covariance)


@few
@given(st.integers(0, 99), st.integers(1, 4), st.lists(EXPONENTS, min_size=4, max_size=4))
def test_a_covariance_of_any_magnitudes_comes_back(
    seed: int, dimension: int, exponents: list[int]
) -> None:
    """Also where a dimension has next to no variance of its own, or all dimensions have one size."""
    random = generator(seed)
    sizes = 10.0 ** torch.tensor(exponents[:dimension], dtype=torch.float64)
    rank = max(1, dimension - 1)
    loadings = torch.randn(dimension, rank, generator=random, dtype=torch.float64)
    lower = torch.randn(2, dimension, dimension, generator=random, dtype=torch.float64).tril(-1)
    root = torch.randn(dimension, 2 * dimension, generator=random, dtype=torch.float64)
    frame = sizes.max() * torch.ones(dimension, dtype=torch.float64)
    cases: list[tuple[AnyCovariance, int]] = [
        (Full(lower + torch.diag_embed(sizes.expand(2, -1))), 2),
        (Full(frame[:, None] * lower + torch.diag_embed(sizes.expand(2, -1))), 2),
        (LowRank(loadings * frame[:, None], sizes.square()), 1),
        (LowRank(loadings * sizes[:, None], sizes.square()), 1),
        (Gram(root @ root.T * sizes.max() ** 2), 1),
    ]
    for covariance, total in cases:
        before = matrices(covariance)
        after = matrices(carried(covariance, total, dimension))
        deviations = before.diagonal(dim1=1, dim2=2).sqrt()
        error = (after - before) / deviations[:, :, None] / deviations[:, None, :]
        # A logarithm of 16 bits is off by up to a hundredth, and a variance is its square.
        assert float(error.abs().max()) < 0.03, covariance


@few
@given(st.integers(0, 99), st.floats(-6, 2))
def test_variances_make_up_for_rounded_loadings_and_stay_positive(
    seed: int, exponent: float
) -> None:
    random = generator(seed)
    factor = torch.randn(5, 3, generator=random) * torch.logspace(-2, 2, 5)[:, None]
    variances = 10.0**exponent * (0.1 + torch.rand(5, generator=random))
    rounded = unpack_levels(pack_levels(factor), (5, 3))
    wanted = [
        max(float(own + (exact**2).sum() - (kept**2).sum()), 1e-3 * float(own))
        for own, exact, kept in zip(variances, factor, rounded, strict=True)
    ]
    found = carried(LowRank(factor, variances), 1, 5, 8)
    assert isinstance(found, LowRank)
    assert torch.equal(found.factor, rounded)
    assert found.variances.tolist() == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e9])
def test_a_dimension_that_never_varies_has_a_billionth_of_the_mean_variance(size: float) -> None:
    matrix = size * torch.tensor([[2.0, 0.5, 0.0], [0.5, 4.0, 0.0], [0.0, 0.0, 0.0]]).double()
    found = carried(Gram(matrix), 1, 3)
    assert isinstance(found, Gram)
    assert float(found.matrix[2, 2]) == pytest.approx(2e-9 * size, rel=1e-3)
    assert found.matrix[:2, :2].flatten().tolist() == pytest.approx(
        (size * torch.tensor([2.0, 0.5, 0.5, 4.0])).tolist(), rel=1e-3
    )
    # Without any variance, and of rounding that is below zero.
    for none in (torch.zeros(2, 2), -1e-3 * torch.eye(2)):
        found = carried(Gram(none), 1, 2)
        assert isinstance(found, Gram)
        assert found.matrix.diagonal().tolist() == pytest.approx([1e-30] * 2, rel=1e-2)


@pytest.mark.parametrize("correction", [0.901, 1.0, 1.099, 0.899, 1.101, -1.0, 0.0, math.nan])
def test_a_variance_is_corrected_by_less_than_a_tenth(correction: float) -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    tables, _ = pack_covariance(Gram(matrix))
    exact = pack(torch.ones(2))
    exact.data = np.array([1.0, correction], "<f2").tobytes()
    tables[1].CopyFrom(exact)
    body = pb.Mixtures(covariance="gram", spread=tables)
    if abs(correction - 1) < 0.1:
        found = unpack_covariance(body, 1, 2)
        assert isinstance(found, Gram)
        assert float(found.matrix[1, 1]) == pytest.approx(2 * correction, rel=0.01)
        return
    with pytest.raises(SurrogateError, match="correction of a variance"):
        unpack_covariance(body, 1, 2)


@pytest.mark.parametrize("family", ["spherical", "diag", "lowrank", "full", "gram", "tied"])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("dimension", [1, 2])
def test_a_family_has_its_number_of_tables_and_only_lowrank_has_levels(
    family: str, number: int, levels: bool, dimension: int
) -> None:
    below = torch.zeros(dimension * (dimension - 1) // 2)
    own = pack(torch.ones(dimension), logarithm=True)
    tables = {
        "spherical": [pack(torch.ones(1), logarithm=True)],
        "diag": [pack(torch.ones(1, dimension), logarithm=True)],
        "lowrank": [own, pack(torch.ones(dimension, 1))],
        "full": [pack(torch.ones(1, dimension), logarithm=True), pack(below[None])],
        "gram": [own, pack(torch.ones(dimension)), pack(below)],
    }.get(family, [])
    body = pb.Mixtures(covariance=family, spread=(tables + [own] * 4)[:number])
    if levels:
        body.levels.CopyFrom(pack_levels(torch.ones(dimension, 1)))
    needed = len(tables) - (levels or (dimension == 1 and family in ("full", "gram")))
    if number == needed > 0 and (family == "lowrank" or not levels):
        kinds = {
            "spherical": Spherical,
            "diag": Diagonal,
            "lowrank": LowRank,
            "full": Full,
            "gram": Gram,
        }
        assert type(unpack_covariance(body, 1, dimension)) is kinds[family]
        return
    with pytest.raises(SurrogateError, match=f"covariance {family!r}"):
        unpack_covariance(body, 1, dimension)


@pytest.mark.parametrize("shape", [(), (2,), (2, 0), (2, 1, 1), (2, 1)])
def test_loadings_are_a_matrix_of_one_column_or_more(shape: tuple[int, ...]) -> None:
    entries = math.prod(shape)
    loadings = pb.Halves(shape=shape, scale=1.0, data=bytes(2 * entries))
    own = pack(torch.ones(2), logarithm=True)
    body = pb.Mixtures(covariance="lowrank", spread=[own, loadings])
    if shape == (2, 1):
        assert isinstance(unpack_covariance(body, 1, 2), LowRank)
        return
    with pytest.raises(SurrogateError, match="loadings of shape"):
        unpack_covariance(body, 1, 2)


# Bundles.


# Models.


def update(**tensors: Tensor) -> Parameters:
    return Parameters(HEADER, 2, tensors, 5)


@few
@given(st.integers(0, 30), st.integers(0, 9), st.integers(0, 40))
def test_numbers_of_all_tensors_together_are_at_most_those_asked_for(
    first: int, second: int, most: int
) -> None:
    """Whether their zeros travel or not."""
    tensors = {"a": torch.zeros(first), "b": torch.arange(1.0, second + 1), "c": torch.ones(2)}
    payload = pack_parameters(update(**tensors))
    if first + second + 2 <= most:
        found = unpack_parameters(payload, most).tensors
        assert found.keys() == tensors.keys()
        assert all(torch.allclose(found[name], own, rtol=1e-3) for name, own in tensors.items())
        return
    with pytest.raises(SurrogateError, match="more numbers than were asked for"):
        unpack_parameters(payload, most)


@pytest.mark.parametrize("zeros", [0, 1, 2, 40])
def test_a_tensor_has_eight_dimensions_at_most(zeros: int) -> None:
    tensor = torch.ones(1, 1, 1, 1, 1, 1, 2, 20)
    tensor.view(-1)[:zeros] = 0
    found = unpack_parameters(pack_parameters(update(w=tensor))).tensors["w"]
    assert torch.equal(found, tensor)
    with pytest.raises(SurrogateError, match="a tensor of 9 dimensions; at most 8"):
        unpack_parameters(pack_parameters(update(w=tensor[None])))


@few
@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    labels=st.lists(st.integers(0, 4), max_size=3),
    classes=st.integers(0, 3),
)
def test_synthetic_records_have_a_known_class_each_in_rising_order(
    shape: list[int], labels: list[int], classes: int
) -> None:
    header = replace(HEADER, classes=CLASSES[:classes])
    values = torch.randn(shape, generator=generator(1))
    sent = Synthetic(header, 3, values, torch.tensor(labels, dtype=torch.int64), 1.5, 9, None)
    fits = len(shape) == 2 and shape[1] > 0 and shape[0] == len(labels) > 0
    if not fits or labels != sorted(labels) or max(labels) >= classes:
        with pytest.raises(SurrogateError, match="synthetic records"):
            unpack_synthetic(pack_synthetic(sent))
        return
    found = unpack_synthetic(pack_synthetic(sent))
    assert torch.allclose(found.values, values, atol=1e-2)
    assert found.labels.tolist() == labels
    assert replace(found, values=values, labels=sent.labels) == sent


def test_synthetic_records_are_a_mebi_at_most() -> None:
    zeros = bytes(2 * (2**20 + 1))
    message = pb.Synthetic(header=pb.Header(schema=1, classes=["a"]))
    for count in (2**20, 2**20 + 1):
        message.values.CopyFrom(pb.Halves(shape=[count, 1], scale=1.0, data=zeros[: 2 * count]))
        message.labels[:] = [0] * count
        if count == 2**20:
            assert len(unpack_synthetic(message.SerializeToString()).labels) == count
            continue
        with pytest.raises(SurrogateError):
            unpack_synthetic(message.SerializeToString())


@few
@given(st.data())
def test_a_head_comes_back_with_all_its_parts(data: st.DataObject) -> None:
    projected, centred = data.draw(st.booleans()), data.draw(st.booleans())
    random = generator(data.draw(st.integers(0, 99)))
    clip = data.draw(st.sampled_from([None, 0.0, 0.5, 3.0]))
    target = data.draw(st.sampled_from(["", json.dumps({"name": "multilabel", "columns": ["a"]})]))
    sent = Head(
        HEADER,
        torch.randn(3, 2 if projected else 4, generator=random),
        torch.randn(3, generator=random),
        clip,
        torch.randn(4, generator=random) if centred else None,
        torch.randn(2, 4, generator=random) if projected else None,
        target,
        data.draw(st.sampled_from([ALL, *STATED.values()])),
    )
    found = unpack_classifier(pack_classifier(sent))
    assert isinstance(found, Head)
    for name in ("header", "clip", "target", "mean_over_columns", "dimension"):
        assert getattr(found, name) == getattr(sent, name)
    for name in ("weight", "bias", "centre", "projection"):
        one, other = getattr(found, name), getattr(sent, name)
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=3e-3)
    wrong = data.draw(st.sampled_from([math.nan, math.inf, -1.0, -1e-9]))
    with pytest.raises(SurrogateError, match="not finite"):
        unpack_classifier(pack_classifier(replace(sent, clip=wrong)))
    if centred:
        with pytest.raises(SurrogateError, match="a centre of dimension 5 for features"):
            unpack_classifier(pack_classifier(replace(sent, centre=torch.ones(5))))


@few
@given(
    classes=st.integers(0, 3),
    biases=st.integers(0, 3),
    shape=st.lists(st.integers(1, 3), max_size=4),
    bad=st.sampled_from(["", "means", "whiteners", "bias"]),
)
def test_quadratic_discriminants_have_a_square_whitener_or_a_scale_for_each_class(
    classes: int, biases: int, shape: list[int], bad: str
) -> None:
    tables = {
        "means": torch.ones(classes, shape[-1] if shape else 1),
        "whiteners": torch.ones(classes, *shape),
        "bias": torch.ones(biases),
    }
    if bad and tables[bad].numel():
        tables[bad].view(-1)[-1] = math.nan if bad == "bias" else 1.0
    message = pb.Quadratic(
        header=pb.Header(schema=1, classes=CLASSES[:classes]),
        means=pack(tables["means"]),
        whiteners=pack(tables["whiteners"]),
        bias=tables["bias"].tolist(),
    )
    if bad in ("means", "whiteners") and tables[bad].numel():
        halves = np.frombuffer(getattr(message, bad).data, "<f2").copy()
        halves[-1] = np.nan
        getattr(message, bad).data = halves.tobytes()
    payload = pb.Classifier(quadratic=message).SerializeToString()
    square = len(shape) == 1 or (len(shape) == 2 and shape[0] == shape[1])
    if not classes or biases != classes or not square or bad:
        with pytest.raises(SurrogateError):
            unpack_classifier(payload)
        return
    found = unpack_classifier(payload)
    assert isinstance(found, Quadratic)
    for name, table in found.arrays().items():
        assert torch.equal(table, tables[name])


def test_a_model_of_no_known_kind_is_refused() -> None:
    network = Network(HEADER, "convnet", 64, parameters_of(convnet(64, 3, 4)))
    message = pb.Classifier.FromString(pack_classifier(network))
    assert isinstance(unpack_classifier(message.SerializeToString()), Network)
    count = sum(each.numel() for each in network.tensors.values())
    assert unpack_classifier(message.SerializeToString(), count).dimension == 64
    with pytest.raises(SurrogateError, match="more numbers than were asked for"):
        unpack_classifier(message.SerializeToString(), count - 1)
    message.network.kind = "tree"
    for wrong, reason in (
        (message, "a network of unknown kind 'tree'"),
        (pb.Classifier(), "a model of no known kind"),
        (pb.Classifier(heads=pb.Heads()), "a model of no known kind"),
    ):
        with pytest.raises(SurrogateError, match=reason):
            unpack_classifier(wrong.SerializeToString())


# Files of models.


@few
@given(
    offset=st.none() | st.lists(st.integers(0, 3), max_size=2),
    scale=st.none() | st.lists(st.integers(0, 3), max_size=2),
    odd=st.sampled_from([0.0, math.nan, -1.0]),
)
def test_a_frame_in_a_file_has_an_offset_and_a_scale_for_each_column(
    offset: list[int] | None, scale: list[int] | None, odd: float
) -> None:
    form, tensors = file_content(Head(HEADER, torch.ones(3, 2), torch.ones(3)))
    about = form | {"classes": json.dumps(CLASSES), "fingerprint": "print"}
    frame = {"frame-offset": offset, "frame-scale": scale}
    sizes = {"frame-offset": 5.0, "frame-scale": 2.0}
    for name, shape in frame.items():
        if shape is not None:
            tensors[name] = torch.full(shape, sizes[name])
    if scale == [2] and odd:
        tensors["frame-scale"][1] = odd
    if offset is None and scale is None:
        assert classifier_of(about, tensors).header.frame == b""
    elif offset == scale == [2] and not odd:
        model = classifier_of(about, tensors)
        plain = classifier_of(about, {name: tensors[name] for name in ("weight", "bias")})
        features = torch.tensor([[5.0, 9.0]])
        assert torch.equal(model.scores(features), plain.scores((features - 5) / 2))
    else:
        with pytest.raises(SurrogateError):
            classifier_of(about, tensors)


def test_a_file_without_metadata_or_of_a_shape_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "plain")
    with pytest.raises(SurrogateError, match=r"is no model of a run: it has no 'classes'"):
        load_model(tmp_path / "plain")
    shape = b'{"x":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'
    for content in (b"noise", len(shape).to_bytes(8, "little") + shape):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(SurrogateError, match="is not a readable model"):
            load_model(tmp_path / "other")


@few
@given(
    rows=st.integers(0, 3),
    answers=st.lists(st.integers(-1, 3), max_size=3),
    odd=st.sampled_from([0.0, math.nan, math.inf]),
    flat=st.booleans(),
    kinds=st.sampled_from([(torch.float16, torch.int64), (torch.float32, torch.int64), (torch.float16, torch.int32)]),
)  # fmt: skip
def test_a_synthetic_set_has_a_known_class_for_each_finite_row(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    answers: list[int],
    odd: float,
    flat: bool,
    kinds: tuple[torch.dtype, torch.dtype],
) -> None:
    file = tmp_path_factory.mktemp("set") / "s.safetensors"
    features = torch.ones((rows, 2) if not flat else (rows,), dtype=kinds[0])
    if features.numel():
        features.view(-1)[-1] += odd
    tensors = {"x": features, "y": torch.tensor(answers, dtype=kinds[1])}
    manifest = {"format": 1, "kind": "synthetic embeddings", "classes": ["a", "b", "c"], "fingerprint": "p"}  # fmt: skip
    save_file(tensors, file, {"manifest": json.dumps(manifest)})
    fits = rows == len(answers) and not flat and all(0 <= each < 3 for each in answers)
    if fits and kinds == (torch.float16, torch.int64) and (not odd or not rows):
        found = read_synthetic_set(file)
        assert (found.classes, found.fingerprint, found.manifest) == (CLASSES, "p", manifest)
        assert found.features.tolist() == features.tolist()
        assert found.features.dtype == torch.float32
        assert found.labels.tolist() == answers
        return
    with pytest.raises(DataError):
        read_synthetic_set(file)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2}, {"format": "1"}, {"kind": "generator"}, {"classes": []}, {"classes": "abc"},
        {"classes": [1]}, {"classes": None}, {"fingerprint": None}, {"fingerprint": 3},
    ],
)  # fmt: skip
def test_a_synthetic_set_of_another_manifest_is_refused(tmp_path: Path, changed: Any) -> None:
    assert generator_files.FORMAT == 1
    file = tmp_path / "s.safetensors"
    manifest = {"format": 1, "kind": "synthetic embeddings", "classes": ["a"], "fingerprint": "p"}
    tensors = {"x": torch.zeros(1, 2).half(), "y": torch.zeros(1, dtype=torch.int64)}
    for own in (manifest, manifest | changed):
        save_file(tensors, file, {"manifest": json.dumps(own)})
        if own == manifest:
            assert len(read_synthetic_set(file).labels) == 1
    with pytest.raises(DataError):
        read_synthetic_set(file)
    for text in (None, "[" * 100_000, "3", "{"):
        save_file(tensors, file, None if text is None else {"manifest": text})
        with pytest.raises(DataError, match="is no file of a synthetic embeddings"):
            read_synthetic_set(file)


# Records of Flower.


def test_a_record_has_256_values_and_four_mebibytes_of_them_at_most() -> None:
    check_form(to_record(None, {f"{at}": at for at in range(256)}))
    with pytest.raises(SurrogateError, match="257 values next to the payload; at most 256"):
        check_form(to_record(None, {f"{at}": at for at in range(257)}))
    check_form(to_record(None, {"a": "x" * (2**22 - 1)}))
    with pytest.raises(SurrogateError, match=f"more than {4 * 1024 * 1024} bytes"):
        check_form(to_record(None, {"a": "x" * 2**22}))


@pytest.mark.parametrize(
    ("info", "size"),
    [({"abc": 1.5}, 11), ({"a": "xyz"}, 4), ({"a": [1, 2]}, 17), ({"a": ["xy", "z", ""]}, 4)],
)
def test_values_have_the_size_that_they_take(
    info: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsurrogate.common.wire.records.LARGEST_INFO", size)
    check_form(to_record(None, info))
    monkeypatch.setattr("fedsurrogate.common.wire.records.LARGEST_INFO", size - 1)
    with pytest.raises(SurrogateError, match="values next to the payload"):
        check_form(to_record(None, info))


@pytest.mark.parametrize("announced", [3.0, [3], "3", 2, 4, True, None])
def test_only_a_whole_number_announces_a_payload(announced: Any) -> None:
    info = {} if announced is None else {"bytes": announced}
    with pytest.raises(SurrogateError, match="were announced"):
        from_record(to_record(b"abc", info), 3)
    assert from_record(to_record(b"abc", {"bytes": 3}), 3) == (b"abc", {"bytes": 3})


@few
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.floats(0.9, 1.1), st.integers(0, 99))
def test_weights_are_made_to_sum_to_one_where_only_rounding_is_missing(
    components: list[int], share: float, seed: int
) -> None:
    total = sum(components)
    labels = torch.arange(len(components)).repeat_interleave(torch.tensor(components))
    weights = torch.rand(total, generator=generator(seed)) + 0.1
    sums = torch.zeros(len(components)).index_add_(0, labels, weights)[labels]
    sent = Mixtures(
        torch.full((len(components),), 7),
        labels,
        share * weights / sums,
        torch.randn(total, 2, generator=generator(seed)),
        Full(torch.eye(2).expand(total, -1, -1)),
    )
    header = replace(HEADER, classes=CLASSES[: len(components)])
    found = unpack_surrogate(pack_surrogate(Surrogate(header, sent))).mixtures  # type: ignore[union-attr]
    after = torch.zeros(len(components)).index_add_(0, labels, found.weights)
    if abs(share - 1) < 0.009:
        assert after.tolist() == pytest.approx([1.0] * len(components), abs=1e-6)
    elif abs(share - 1) > 0.011:
        assert after.tolist() == pytest.approx([share] * len(components), abs=2e-3)
    assert found.labels.tolist() == labels.tolist()
