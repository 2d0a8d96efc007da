"""Heads of sites with any classes in any order are combined class by class, and what reads a public
head refuses everything that is no matrix.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import Ensemble
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.heads import Heads, average_head, ensemble, highest_ensemble
from fedsurrogate.strategies.pooling.class_means import read_map

CLASSES = ("a", "b", "c", "d")
SITES = st.lists(
    st.tuples(
        st.lists(st.sampled_from((*CLASSES, "other")), min_size=1, unique=True).filter(
            lambda names: set(names) & set(CLASSES)
        ),
        st.integers(1, 90),
    ),
    min_size=1,
    max_size=4,
)


def updates(sites: list[tuple[list[str], int]], seed: int) -> list[Parameters]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, (names, records) in enumerate(sites):
        tensors = {
            "weight": torch.randn(len(names), 3, generator=generator),
            "bias": torch.randn(len(names), generator=generator),
        }
        header = Header("average", "r", f"s{number}", "f", tuple(names))
        found.append(Parameters(header, 1, tensors, records))
    return found


def row(update: Parameters, name: str) -> tuple[Tensor, float | None]:
    """A site's weight and bias of a class; None where it does not know the class."""
    names = update.header.classes
    if name not in names:
        return torch.zeros(3), None
    at = names.index(name)
    return update.tensors["weight"][at], float(update.tensors["bias"][at])


@settings(max_examples=40)
@given(sites=SITES, seed=st.integers(0, 99))
def test_the_average_is_that_of_each_class_by_its_name(
    sites: list[tuple[list[str], int]], seed: int
) -> None:
    given_ = updates(sites, seed)
    found = average_head(given_, CLASSES, "none")
    assert found.header == Header("average", "r", "coordinator", "f", CLASSES)
    share = torch.tensor([float(each.records) for each in given_])
    share /= share.sum()
    for at, name in enumerate(CLASSES):
        rows = [row(each, name) for each in given_]
        known = [[b for n in CLASSES if (b := row(each, n)[1]) is not None] for each in given_]
        biases = [min(own) if b is None else b for (_, b), own in zip(rows, known, strict=True)]
        weight = sum(s * w for s, (w, _) in zip(share, rows, strict=True))
        torch.testing.assert_close(found.weight[at], weight)
        assert float(found.bias[at]) == pytest.approx(float(share @ torch.tensor(biases)), abs=1e-5)


@settings(max_examples=30)
@given(sites=SITES, seed=st.integers(0, 99))
def test_an_ensemble_has_the_mean_or_the_most_that_a_site_says_of_its_own_classes(
    sites: list[tuple[list[str], int]], seed: int
) -> None:
    given_ = updates(sites, seed)
    model = ensemble(given_, CLASSES, "none")
    assert isinstance(model, Ensemble)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    wanted, most = torch.zeros(5, 4), torch.zeros(5, 4)
    for each in given_:
        scores = torch.full((5, 4), -1e9)
        for at, name in enumerate(CLASSES):
            weight, bias = row(each, name)
            if bias is not None:
                scores[:, at] = x @ weight + bias
        wanted += scores.softmax(1) / len(given_)
        most = torch.maximum(most, scores.softmax(1))
    torch.testing.assert_close(model.scores(x).exp(), wanted, rtol=1e-4, atol=1e-5)
    highest = highest_ensemble(given_, CLASSES, "none")
    torch.testing.assert_close(highest.scores(x).exp(), most, rtol=1e-4, atol=1e-5)


SECURE: dict[str, Any] = {
    "secure-aggregation": True, "classes": "a,b", "fedpft.covariance": "gram", "epsilon": 1.0, "delta": 1e-5,
    "features.power-transform": 1, "features.dimensions": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fc.weight", torch.ones(3)),
        ("fc.weight", torch.ones(2, 2, 2)),
        ("fc.weight", torch.tensor(1.0)),
        ("fc.weight", torch.tensor([[1.0, float("nan")], [0.0, 1.0]])),
        ("fc.weight", torch.tensor([[1.0, float("inf")], [0.0, 1.0]])),
        ("another", torch.eye(3)),
    ],
)
def test_a_public_head_that_is_no_finite_matrix_is_refused(
    tmp_path: Path, name: str, tensor: Tensor
) -> None:
    file = tmp_path / "head.safetensors"
    save_file({name: tensor}, file)
    with pytest.raises(ConfigError, match="needs a finite matrix"):
        read_map(parse_run(SECURE | {"features.projection": str(file)}))
    file.write_bytes(b"no file of tensors")
    with pytest.raises(ConfigError, match="no readable"):
        read_map(parse_run(SECURE | {"features.projection": str(file)}))


def test_a_public_head_alone_gives_its_leading_directions(tmp_path: Path) -> None:
    head = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    save_file({"fc.weight": head}, tmp_path / "head.safetensors")
    chosen = {"features.projection": str(tmp_path / "head.safetensors")}
    found = read_map(parse_run(SECURE | chosen)).projection
    assert found is not None
    leading = torch.linalg.svd((head - head.mean(0)).double())[2][:2]
    overlap = (leading @ found.double().T).abs()
    torch.testing.assert_close(overlap, torch.eye(2).double(), rtol=0, atol=2e-3)


@settings(max_examples=40)
@given(sites=SITES, kept=st.sets(st.sampled_from((*CLASSES, "other")), min_size=1))
def test_a_head_keeps_the_rows_of_named_classes_or_there_is_none(
    sites: list[tuple[list[str], int]], kept: set[str]
) -> None:
    strategy = Heads(parse_run({"method": "average"}), Unrecorded())
    for sent in updates(sites, 0):
        found = strategy.restricted(sent, sorted(kept))
        names = [name for name in sent.header.classes if name in kept]
        if not names:
            assert found is None
            continue
        assert found is not None
        assert list(found.header.classes) == names
        for at, name in enumerate(names):
            row = sent.header.classes.index(name)
            assert torch.equal(found.tensors["weight"][at], sent.tensors["weight"][row])
            assert torch.equal(found.tensors["bias"][at], sent.tensors["bias"][row])
