"""The linear head, compared with scikit-learn's logistic regression; and its invariances."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.training_parts import (
    shuffled_batches,
    train_head,
    train_on_features,
)
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.surrogates.surrogates import Header

CLASSES = tuple("0123456789")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train features and labels, test features and labels."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    features, labels = torch.from_numpy(x).float()[order], torch.from_numpy(y)[order]
    return features[:1200], labels[:1200], features[1200:], labels[1200:]


def head(weight: Tensor, bias: Tensor, classes: tuple[str, ...] = CLASSES) -> Head:
    return Head(Header("fedpft", "run", "coordinator", "print", classes), weight, bias)


def trained(factor: float = 1.0, seed: int = 0, shift: float = 0.0) -> Head:
    x, y, _, _ = digits()
    return head(
        *train_on_features(x * factor + shift, y, 10, HeadSettings(learning_rate=5e-3), seed)
    )


@pytest.fixture(scope="module")
def plain() -> Head:
    return trained()


def test_digits_are_classified_as_well_as_by_logistic_regression(plain: Head) -> None:
    x, y, x_test, y_test = digits()
    mean, deviation = x.mean(0), x.std(0).clamp_min(1e-6)
    theirs = LogisticRegression(max_iter=1000).fit(((x - mean) / deviation).numpy(), y.numpy())
    correct, tested = plain.accuracy(x_test, CLASSES, y_test)
    assert tested == len(y_test)
    assert (
        correct / tested
        >= theirs.score(((x_test - mean) / deviation).numpy(), y_test.numpy()) - 0.02
    )


@pytest.mark.parametrize("load", [load_iris, load_wine, load_breast_cancer, load_digits])
def test_defaults_are_as_good_as_logistic_regression_with_few_columns(
    load: Callable[..., Any],
) -> None:
    x, y = (torch.from_numpy(each) for each in load(return_X_y=True))
    right, theirs = 0, 0.0
    for seed in range(2):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        known, rest = order.chunk(2)
        weight, bias = train_on_features(x[known], y[known], int(y.max()) + 1, HeadSettings(), 0)
        right += int(((x[rest].float() @ weight.T + bias).argmax(1) == y[rest]).sum())
        oracle = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        theirs += oracle.fit(x[known].numpy(), y[known].numpy()).score(x[rest], y[rest]) * len(rest)
    assert right >= theirs - 0.025 * len(y)


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_predictions_do_not_depend_on_the_scale_of_features(plain: Head, factor: float) -> None:
    _, _, x_test, _ = digits()
    agreed = trained(factor).predict(x_test * factor) == plain.predict(x_test)
    assert agreed.float().mean() > 0.995


def test_predictions_do_not_depend_on_the_origin_of_features(plain: Head) -> None:
    _, _, x_test, _ = digits()
    agreed = trained(shift=1000.0).predict(x_test + 1000.0) == plain.predict(x_test)
    assert agreed.float().mean() > 0.995


def test_same_seed_gives_the_same_head(plain: Head) -> None:
    again, other = trained(), trained(seed=1)
    assert torch.equal(again.weight, plain.weight)
    assert torch.equal(again.bias, plain.bias)
    assert not torch.equal(other.weight, plain.weight)


def test_constant_features_get_no_weight() -> None:
    x, y, x_test, y_test = digits()
    x, x_test = (torch.cat([part, torch.full((len(part), 2), 0.1)], 1) for part in (x, x_test))
    found = head(*train_on_features(x, y, 10, HeadSettings(min_steps=300, learning_rate=0.01), 0))
    # Rounding alone must not change them: with a weight of 1e5, all others would lose their digits
    # at 16 bits.
    assert not found.weight[:, -2:].any()
    assert found.weight.abs().max() < 100
    assert found.accuracy(x_test, CLASSES, y_test)[0] > 0.9 * len(y_test)
    flat = head(
        *train_on_features(
            torch.ones(20, 3), torch.arange(20) % 2, 2, HeadSettings(min_steps=10), 0
        )
    )
    assert not flat.weight.any()


def test_one_pass_brings_every_record_once() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    batches = list(shuffled_batches(x, y, 4, torch.Generator().manual_seed(0)))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    labels = torch.cat([labels for _, labels in batches])
    assert torch.equal(torch.cat([features for features, _ in batches])[:, 0], labels.float())
    assert torch.equal(labels.sort().values, y)
    assert not torch.equal(labels, y)


def test_without_batches_nothing_is_preferred() -> None:
    weight, bias = train_head([], 0, torch.zeros(3), torch.ones(3), 2, HeadSettings())
    assert not weight.any()
    assert not bias.any()


def test_accuracy_counts_by_name_and_unknown_classes_as_wrong() -> None:
    cat_or_dog = head(torch.tensor([[1.0], [-1.0]]), torch.zeros(2), ("cat", "dog"))
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert cat_or_dog.accuracy(x, ("dog", "cat"), torch.tensor([1, 0, 1, 0])) == (4, 4)
    assert cat_or_dog.accuracy(x, ("cat", "yeti"), torch.tensor([0, 1, 0, 1])) == (2, 4)
    assert cat_or_dog.accuracy(x[:0], ("cat", "dog"), torch.tensor([], dtype=torch.int64)) == (0, 0)


def test_plane_has_the_directions_that_matter_most_and_a_settled_sign() -> None:
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=rng)).Q
    left = torch.linalg.qr(torch.randn(4, 4, generator=rng)).Q
    weight = left @ torch.diag(torch.tensor([9.0, 4.0, 1.0, 0.5])) @ basis[:4]
    plane = head(weight, torch.zeros(4), CLASSES[:4]).plane()
    torch.testing.assert_close((plane.T @ basis[:2].T).abs(), torch.eye(2), atol=1e-5, rtol=0)
    assert (plane.gather(0, plane.abs().argmax(0, keepdim=True)) > 0).all()
    # Reversing all weights, or another order of classes, gives the same result.
    torch.testing.assert_close(head(-weight, torch.zeros(4), CLASSES[:4]).plane(), plane)
    torch.testing.assert_close(head(weight.flip(0), torch.zeros(4), CLASSES[:4]).plane(), plane)
