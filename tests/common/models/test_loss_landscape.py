"""The matching loss, gradients and walks, compared with plain loops in float64 and plain training."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fedsurrogate.common.models.loss_landscape import (
    Descent,
    LandscapeRecords,
    distance,
    gradient,
    loss,
    mismatch,
    total_loss,
    walk,
)
from fedsurrogate.common.models.networks import convnet, linear, mlp, parameters_of, split_input
from fedsurrogate.common.models.training_parts import draw, draws
from fedsurrogate.common.settings.base import AUGMENTATIONS


def records(count: int = 12, seed: int = 0, weights: Tensor | None = None) -> LandscapeRecords:
    generator = torch.Generator().manual_seed(seed)
    values, labels = torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 3
    return (
        LandscapeRecords.evenly(values, labels)
        if weights is None
        else LandscapeRecords(values, labels, weights)
    )


def body_and_model(seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    module = convnet(64, 3, 4, seed)
    return split_input(module, torch.zeros(1, 64))[0], parameters_of(module)


def unchanged() -> Iterator[object]:
    return draws((), torch.Generator())


def by_hand(synthetic: list[Tensor], real: list[Tensor], weight: float) -> Tensor:
    """Equations 9 and 10 as a loop over every row, averaged over the rows of a tensor."""
    total = torch.zeros((), dtype=torch.float64)
    for mine, theirs in zip(synthetic, real, strict=True):
        rows = (
            [(mine, theirs)]
            if mine.dim() == 1
            else [(mine[i].flatten(), theirs[i].flatten()) for i in range(len(mine))]
        )
        for a, b in rows:
            total = total + (1 - torch.dot(a, b) / (a.norm() * b.norm())) / len(rows)
            total = total + weight * torch.dot(a - b, a - b)
    return total


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_the_mismatch_and_its_gradient_equal_a_plain_loop(weight: float) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3, 3, 3), (5,), (4, 20), (4,)]
    real = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    synthetic = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    ours, theirs = mismatch(synthetic, real, weight), by_hand(synthetic, real, weight)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, synthetic), torch.autograd.grad(theirs, synthetic), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


def test_the_derivative_through_the_network_is_right() -> None:
    body, model = body_and_model()
    body, at = (
        body.double(),
        {name: tensor.double().requires_grad_() for name, tensor in model.items()},
    )
    mine, real = records(4, 1), records(6, 2)
    target = list(
        gradient(body, at, LandscapeRecords.evenly(real.values.double(), real.labels)).values()
    )

    def wrong(values: Tensor) -> Tensor:
        found = loss(body, at, LandscapeRecords.evenly(values, mine.labels))
        return mismatch(
            torch.autograd.grad(found, list(at.values()), create_graph=True), target, 0.1
        )

    values = mine.values.double().requires_grad_()
    (slope,) = torch.autograd.grad(wrong(values), [values])
    # A difference quotient is wrong at a kink of ReLU, so most entries must agree, not all.
    right = 0
    for index in range(20):
        step = torch.zeros_like(values).flatten()
        step[index * 7] = 1e-6
        step = step.reshape(values.shape)
        quotient = float((wrong(values + step) - wrong(values - step)).detach()) / 2e-6
        right += math.isclose(
            quotient, float(slope.flatten()[index * 7]), rel_tol=1e-3, abs_tol=1e-7
        )
    assert right >= 18


def test_rounding_errors_of_a_gradient_that_is_zero_move_no_image() -> None:
    """GroupNorm cancels the bias of a convolution. In 32 bits its gradient is about 1e-8 of nothing
    but rounding.
    """
    module = convnet(256, 10, 16, 0)
    single, _ = split_input(module, torch.zeros(1, 256))
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(12) % 2
    real, mine = (torch.randn(12, 1, 16, 16, generator=generator) for _ in range(2))
    slopes = []
    for dtype in (torch.float32, torch.float64):
        body = single.to(dtype)
        at = {
            name: tensor.to(dtype).requires_grad_()
            for name, tensor in parameters_of(module).items()
        }
        target = list(gradient(body, at, LandscapeRecords.evenly(real.to(dtype), labels)).values())
        values = mine.to(dtype).requires_grad_()
        found = loss(body, at, LandscapeRecords.evenly(values, labels))
        wrong = mismatch(
            torch.autograd.grad(found, list(at.values()), create_graph=True), target, 0.1
        )
        slopes.append(torch.autograd.grad(wrong, [values])[0].double().flatten())
    assert float(torch.cosine_similarity(*slopes, dim=0)) > 0.999


def test_rows_of_noise_weigh_by_the_signal_left_in_them() -> None:
    generator = torch.Generator().manual_seed(3)
    signal = torch.zeros(200, 1000)
    signal[:100] = 3.0
    real = [signal + torch.randn(200, 1000, generator=generator)]
    # Opposite to a signal: 2 per row times 9 / 10 of its energy; noise alone has almost no weight.
    wrong = float(mismatch([-real[0]], real, 0.0, noise=1.0))
    assert wrong == pytest.approx((100 * 2 * 0.9 + 100 * 2 * 0.018) / 200, rel=0.03)
    assert float(mismatch([-real[0]], real, 0.0)) == pytest.approx(2.0)


def test_a_gradient_without_length_does_no_harm() -> None:
    zero = [torch.zeros(3, 4, requires_grad=True)]
    wrong = mismatch(zero, [torch.ones(3, 4)], 0.1)
    (slope,) = torch.autograd.grad(wrong, zero)
    assert slope.isfinite().all()


def test_gradients_in_parts_equal_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body, model = body_and_model()
    whole = gradient(body, model, records())
    monkeypatch.setattr("fedsurrogate.common.models.loss_landscape.TOGETHER", 5)
    for name, part in gradient(body, model, records()).items():
        assert torch.allclose(part, whole[name], atol=1e-6)
    assert total_loss(body, model, records()) == pytest.approx(
        float(loss(body, model, records()).detach()), rel=1e-5
    )


def test_pooled_sets_weigh_by_their_shares() -> None:
    body, model = body_and_model()
    one, other = records(6, 1), records(9, 2)
    pooled = LandscapeRecords.pool([one, other], [30, 10])
    assert float(pooled.weights.sum()) == pytest.approx(1)
    wanted = 0.75 * loss(body, model, one) + 0.25 * loss(body, model, other)
    assert float(loss(body, model, pooled).detach()) == pytest.approx(
        float(wanted.detach()), rel=1e-5
    )


@pytest.mark.parametrize("constant", [False, True])
def test_a_walk_is_gradient_descent(constant: bool) -> None:
    body, model = body_and_model()
    descent = Descent(0.1, 7, 100.0, plain=constant)
    *_, (here, outside) = walk(body, model, records(), descent, unchanged())
    plain = {name: tensor.clone() for name, tensor in model.items()}
    body.load_state_dict(plain)
    optimiser = torch.optim.SGD(body.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 7)
    for _ in range(7):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(body(records().values), records().labels).backward()
        optimiser.step()
        if not constant:
            schedule.step()
    assert not outside
    for name, parameter in body.named_parameters():
        assert torch.allclose(here[name], parameter, atol=1e-6)


def test_a_walk_never_leaves_its_ball_and_ends_on_the_surface_that_holds_it_back() -> None:
    body, model = body_and_model()
    *_, (free, _) = walk(body, model, records(), Descent(0.1, 20, 100.0), unchanged())
    radius = distance(free, model) / 2
    far = [
        (distance(here, model), outside)
        for here, outside in walk(body, model, records(), Descent(0.1, 20, radius), unchanged())
    ]
    assert len(far) == 20
    assert max(d for d, _ in far) <= radius * (1 + 1e-5)
    assert any(outside for _, outside in far)


def test_a_plain_walk_ends_with_the_first_step_out_of_its_ball() -> None:
    body, model = body_and_model()
    free = [
        here for here, _ in walk(body, model, records(), Descent(0.1, 20, 100.0, True), unchanged())
    ]
    lengths = [distance(here, model) for here in free]
    radius = lengths[8]
    path = list(walk(body, model, records(), Descent(0.1, 20, radius, True), unchanged()))
    assert len(path) == next(at for at, each in enumerate(lengths) if each > radius) + 1
    assert [outside for _, outside in path] == [False] * (len(path) - 1) + [True]
    assert distance(path[-1][0], free[len(path) - 1]) == 0


def test_a_walk_ends_before_a_step_that_is_no_number() -> None:
    body, model = body_and_model()
    broken = LandscapeRecords.evenly(torch.full((3, 1, 8, 8), torch.nan), torch.arange(3))
    assert list(walk(body, model, broken, Descent(0.1, 5, 1.0), unchanged())) == []


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_augmentation_treats_every_image_alike_and_lets_gradients_through(name: str) -> None:
    images = torch.randn(3, 3, 16, 16, requires_grad=True)
    for seed in range(6):
        change = draw((name,), torch.Generator().manual_seed(seed))
        changed = change(images)
        assert changed.shape == images.shape
        assert changed.isfinite().all()
        assert torch.allclose(change(images[1:2]), changed[1:2], atol=1e-6), (
            "a record's change depends on no other"
        )
        (slope,) = torch.autograd.grad(changed.square().sum(), [images])
        assert slope.isfinite().all()
        assert slope.abs().sum() > 0


def test_every_augmentation_changes_something_and_none_nothing() -> None:
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(draw((), torch.Generator())(images), images)
    for name in AUGMENTATIONS:
        assert any(
            not torch.equal(draw((name,), torch.Generator().manual_seed(s))(images), images)
            for s in range(5)
        )


def test_what_follows_the_first_step_is_the_same_network() -> None:
    features = torch.rand(5, 64) * 3
    for module in (convnet(64, 3, 4), mlp(64, 3, 8)):
        body, values = split_input(module, features)
        assert torch.allclose(body(values), module(features), atol=1e-6)
        assert [name for name, _ in body.named_parameters()] == [
            name for name, _ in module.named_parameters()
        ]
    assert torch.allclose(mlp(64, 3, 8)(features), mlp(64, 3, 8)(7 * features + 2), atol=1e-4), (
        "scale and offset say nothing"
    )
    _, unit = split_input(linear(64, 3), features)
    assert torch.allclose(unit.norm(dim=1), torch.ones(5), atol=1e-4)
