"""Peers of the private heads: central, with all records in one place, with the same budget, the same
public map of the features and exact accounting of full batches.

Their settings are those that do best on a fifth of the training records of the first data set, for
each epsilon and in one draw. This choice is not charged, which favours the peers; no test record
takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.secure_aggregation_head import Data
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import with_constant
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.privacy.gaussian_mechanism import clip

DELTA, CLASSES = 1e-5, 10
# Largest norm of a record's gradient, and momentum of DP-SGD.
NORM, MOMENTUM = 1.0, 0.5
Peer = Callable[..., float]


def dp_sgd_opacus(data: Data, epsilon: float, draw: int, steps: int, rate: float) -> float:
    """Accuracy in % of Opacus's DP-SGD with ghost clipping.

    Args:
        data: features of norm one and labels, for training and for testing.
        epsilon: of all steps together.
        draw: seed of the noise.
        steps: number of steps, each with all records.
        rate: learning rate of the mean gradient.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    x, y, test_x, test_y = data
    x, test_x = x.float(), test_x.float()
    layer = torch.nn.Linear(x.shape[1], CLASSES)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    module = GradSampleModuleFastGradientClipping(
        layer, max_grad_norm=NORM, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), rate, momentum=MOMENTUM),
        noise_multiplier=gaussian_noise_multiplier(epsilon, DELTA) * steps**0.5,
        max_grad_norm=NORM,
        expected_batch_size=len(y),
        loss_reduction="mean",
        generator=torch.Generator().manual_seed(draw),
    )
    loss = DPLossFastGradientClipping(
        module, optimiser, torch.nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean"
    )
    for _ in range(steps):
        optimiser.zero_grad()
        loss(module(x), y).backward()
        optimiser.step()
    with torch.no_grad():
        return right(module(test_x), test_y)


def dp_sgd_jax(data: Data, epsilon: float, draw: int, steps: int, rate: float) -> float:
    """Accuracy in % of the same steps with clipped gradients of jax_privacy; arguments as there."""
    import jax
    import optax
    from jax import numpy as jnp
    from jax_privacy import clipped_grad

    x, test_x = (jnp.asarray(rows.float().numpy()) for rows in (data[0], data[2]))
    y, size = jnp.asarray(data[1].numpy()), len(data[1])

    def loss(model: tuple[jax.Array, jax.Array], rows: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            rows @ model[0] + model[1], labels
        ).mean()

    clipped = clipped_grad(loss, l2_clip_norm=NORM, batch_argnums=(1, 2), microbatch_size=100)
    gradient = jax.jit(clipped)
    sigma = NORM * gaussian_noise_multiplier(epsilon, DELTA) * steps**0.5
    model = (jnp.zeros((x.shape[1], CLASSES)), jnp.zeros(CLASSES))
    optimiser = optax.sgd(rate, momentum=MOMENTUM)
    state = optimiser.init(model)
    for key in jax.random.split(jax.random.key(draw), steps):
        parts = zip(gradient(model, x, y), jax.random.split(key), strict=True)
        noisy = tuple(
            (part + sigma * jax.random.normal(own, part.shape)) / size for part, own in parts
        )
        updates, state = optimiser.update(noisy, state)
        model = optax.apply_updates(model, updates)
    return right(torch.tensor((test_x @ model[0] + model[1]).tolist()), data[3])


def dp_fc(
    data: Data,
    epsilon: float,
    draw: int,
    steps: int,
    rate: float,
    dimensions: int,
    share: float,
    ridge: float,
) -> float:
    """Accuracy in % of DP-FC: steps of a logistic loss, preconditioned by one noisy second moment.

    Args:
        data: features of norm one and labels, for training and for testing.
        epsilon: of all steps together.
        draw: seed of the noise.
        steps: number of steps, each with all records.
        rate: of a step.
        dimensions: leading ones of the map that are kept.
        share: of the budget, for the second moment.
        ridge: in units of the largest eigenvalue of the noise on the second moment.

    Source: Mehta, Krichene, Thakurta, Kurakin & Cutkosky 2023, Differentially Private Image
        Classification from Features, algorithm 2.
    """
    rows, tests = (with_constant(clip(some[:, :dimensions], 0.0)[0]) for some in (data[0], data[2]))
    random, sigma = torch.Generator().manual_seed(draw), gaussian_noise_multiplier(epsilon, DELTA)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    size, deviation = rows.shape[1], sigma / share**0.5
    square = deviation * noise(size, size)
    values, vectors = torch.linalg.eigh(rows.T @ rows + (square + square.T) / 2)
    least = ridge * deviation * (2 * size) ** 0.5
    inverse = vectors / (values.clamp_min(0) + least) @ vectors.T
    head, ones = torch.zeros(CLASSES, size, dtype=torch.float64), one_hot(data[1], CLASSES)
    for _ in range(steps):
        residuals = (rows @ head.T).softmax(1) - ones
        residuals = residuals * (NORM / residuals.norm(dim=1, keepdim=True)).clamp_max(1)
        noisy = residuals.T @ rows + sigma * NORM * (steps / (1 - share)) ** 0.5 * noise(
            CLASSES, size
        )
        head = head - rate * noisy @ inverse
    return right(tests @ head.T, data[3])


def no_privacy(data: Data) -> float:
    """Accuracy in % of scikit-learn's logistic regression on features as they are."""
    from sklearn.linear_model import LogisticRegression

    x, test_x = data[0].float().numpy(), data[2].float().numpy()
    mean, spread = x.mean(0), x.std()
    model = LogisticRegression(C=0.01, max_iter=200).fit((x - mean) / spread, data[1].numpy())
    return 100 * float(model.score((test_x - mean) / spread, data[3].numpy()))


# Settings that are tried.
RATES = {"steps": (20, 40, 80), "rate": (10.0, 20.0, 40.0, 80.0)}
GRIDS: Mapping[str, tuple[Peer, Mapping[str, Sequence[float]]]] = {
    "DP-FC": (
        dp_fc,
        {
            "steps": (10, 20),
            "rate": (2.0, 4.0, 8.0),
            "dimensions": (256, 512),
            "share": (0.1, 0.2, 0.4),
            "ridge": (0.3, 1.0, 3.0),
        },
    ),
    "Opacus": (dp_sgd_opacus, RATES),
    "jax_privacy": (dp_sgd_jax, RATES),
}


def chosen(name: str, data: Data, epsilon: float) -> dict[str, float]:
    """The settings of a peer that do best on a fifth of the training records.

    Args:
        name: in GRIDS.
        data: as of the peers; its test records are not looked at.
        epsilon: of the run.
    """
    peer, grid = GRIDS[name]
    order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(1))
    train, held = order[len(order) // 5 :], order[: len(order) // 5]
    parts = data[0][train], data[1][train], data[0][held], data[1][held]
    tried = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return max(tried, key=lambda each: peer(parts, epsilon, 1, **each))


def right(scores: Tensor, labels: Tensor) -> float:
    """Share of right decisions, in %."""
    return 100 * float((scores.argmax(1) == labels).double().mean())
