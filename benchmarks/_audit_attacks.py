"""Attackers of an audit: scores (m,) of canaries, higher where one was more likely in the data,
from what is seen of a run.

They know all canaries, the settings and the models that the site received. Where a release is a
noisy sum of clipped gradients, the score is its product with the gradient of the canary, clipped as
at the site: the likelihood ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks._audit_site import OWN_BINS, Canaries, Seen
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import residuals, with_constant
from fedsurrogate.client_app.methods.local_training import network
from fedsurrogate.common.methods.training import first_round_shares
from fedsurrogate.common.models.generators import COUNTS, SUMS
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.networks import split_input
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.privacy.gaussian_mechanism import weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import weight_of
from fedsurrogate.common.secure_aggregation.rules import numbers_of
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate, Surrogate
from fedsurrogate.common.wire.model_proto import unpack_parameters, unpack_synthetic
from fedsurrogate.common.wire.records import unpack_surrogate
from fedsurrogate.common.wire.surrogate_proto import unpack_counts
from tests.totals import unpack_total

Attack = Callable[[Canaries, Seen], Tensor]
# Canaries whose gradients are computed at a time.
TOGETHER = 256


def by_sums(canaries: Canaries, seen: Seen) -> Tensor:
    """The likelihood ratio of Gaussian noise on counts, sums and second moments, for canaries that
    are alone in these.
    """
    surrogate = unpack_surrogate(seen.rounds[0][1])
    assert isinstance(surrogate, SumsSurrogate)
    sums = surrogate.sums
    weight = weight_of(surrogate.claim.centre)
    canaries = replace(canaries, x=weigh_mean_over_columns(canaries.x, weight))
    return of_sums(
        canaries, {"counts": sums.counts, "sums": sums.sums, "squares": sums.squares}, sums.sigmas
    )


def of_sums(
    canaries: Canaries, released: Mapping[str, Tensor | None], noise: Mapping[str, float]
) -> Tensor:
    """The likelihood ratio of these released statistics with this noise; each canary is alone in
    its part of them.
    """
    x, y = torch.nn.functional.normalize(canaries.x), canaries.y
    counts, sums, squares = (released[name] for name in ("counts", "sums", "squares"))
    assert counts is not None
    assert sums is not None
    scores = (counts[y] - 0.5) / noise["counts"] ** 2
    scores = scores + ((sums[y] * x).sum(1) - 0.5) / noise["sums"] ** 2
    if squares is None:
        return scores
    if len(squares) == x.shape[1]:
        along, length = x.square() @ squares, x.square().square().sum(1)
    else:
        along, length = ((x @ unfold(squares, x.shape[1])) * x).sum(1), torch.ones(len(x))
    return scores + (along - length / 2) / noise["squares"] ** 2


def by_total(canaries: Canaries, seen: Seen) -> Tensor:
    """The same from the sum over all sites, which is all that the coordinator of secure aggregation can
    read.
    """
    _, names, numbers, claim = unpack_total(seen.totals[0])
    assert claim is not None
    decoded = numbers_of(seen.run.plan, seen.run.settings, len(names))
    c, d = canaries.classes, canaries.x.shape[1]
    parts = {"counts": numbers[:c], "sums": numbers[c : c + c * d], "squares": numbers[c + c * d :]}
    released = {name: decoded[name].decode(part).float() for name, part in parts.items()}
    released["sums"] = released["sums"].reshape(c, d)
    return of_sums(canaries, released, {name: sigma for name, (sigma, _) in claim.noise.items()})


def by_summed_gradients(canaries: Canaries, seen: Seen) -> Tensor:
    """DP-FedAvg with distributed noise: the product of the sum over all sites, in one round, with each
    canary's clipped gradient.

    The model is linear and begins at zero. All canaries share the bias, which tells little of one.
    """
    _, names, numbers, _ = unpack_total(seen.totals[0])
    c, d, settings = canaries.classes, canaries.x.shape[1], seen.run.settings.fedavg
    decoded = (
        numbers_of(seen.run.plan, seen.run.settings, len(names))["gradients"]
        .decode(numbers[1:])
        .float()
    )
    received = {"weight": torch.zeros(c, d), "bias": torch.zeros(c)}
    # In the order of their names, after the number of records.
    direction = {"bias": torch.zeros(c), "weight": decoded[c:].reshape(c, d)}
    records = LandscapeRecords(
        torch.nn.functional.normalize(canaries.x), canaries.y, torch.ones(len(canaries.x))
    )
    return _along(network("linear", d, c, received), received, records, settings.clip, direction)


def by_bins(canaries: Canaries, seen: Seen) -> Tensor:
    """The number of records in a canary's own bins: all that a head can show of one."""
    table = unpack_counts(seen.rounds[0][1]).tables["labels"]
    return table[0, 1].double().reshape(-1, OWN_BINS)[: len(canaries.x)].sum(1).float()


def by_steps(canaries: Canaries, seen: Seen) -> Tensor:
    """A logistic head in rounds: the product of the last round's sum, whose head is zero in a run of
    one step, with what each canary adds. Of the site's own sum where the coordinator sees it.
    """
    rows = with_constant(torch.nn.functional.normalize(canaries.x.double()))
    head = torch.zeros(canaries.classes, rows.shape[1], dtype=torch.float64)
    if seen.totals:
        _, names, numbers, _ = unpack_total(seen.totals[0])
        decoded = numbers_of(seen.run.plan, seen.run.settings, len(names), 2)["sums"]
        sums = decoded.decode(numbers[: head.numel()])
    else:
        sums = unpack_parameters(seen.rounds[-1][1]).tensors["sums"]
    added = residuals(rows, canaries.y, head)
    return ((added @ sums.reshape(head.shape).double()) * rows).sum(1).float()


def by_mixtures(canaries: Canaries, seen: Seen) -> Tensor:
    """The largest product with a component's sum (its mean times its count) of the canary's class.

    Only the last step of DP-EM is seen, with a quarter of the budget. A record is nearly always in
    one component.
    """
    surrogate = unpack_surrogate(seen.rounds[0][1])
    assert isinstance(surrogate, Surrogate)
    table, scores = surrogate.mixtures, torch.full((len(canaries.x),), -torch.inf)
    sums = table.means.float() * (table.counts[table.labels] * table.weights)[:, None]
    along = torch.nn.functional.normalize(canaries.x) @ sums.T
    return (
        along.masked_fill(canaries.y[:, None] != table.labels[None], -torch.inf)
        .amax(1)
        .maximum(scores)
    )


def by_gradients(canaries: Canaries, seen: Seen) -> Tensor:
    """FedAvg: how far the first layer moved against each canary's clipped gradient, over all
    rounds.

    All canaries share the other layers, which tell little of one.
    """
    settings, scores = seen.run.settings.fedavg, torch.zeros(len(canaries.x))
    for question, payload in seen.rounds:
        received, moved = (
            unpack_parameters(question or b"").tensors,
            unpack_parameters(payload).tensors,
        )
        x = torch.nn.functional.normalize(canaries.x) if settings.kind == "linear" else canaries.x
        module = network(settings.kind, x.shape[1], canaries.classes, received)
        first = "weight" if settings.kind == "linear" else "hidden.weight"
        direction = {
            name: -moved[name] if name == first else torch.zeros_like(moved[name])
            for name in received
        }
        scores += _along(
            module,
            received,
            LandscapeRecords(x, canaries.y, torch.ones(len(x))),
            settings.clip,
            direction,
        )
    return scores


def by_difference(canaries: Canaries, seen: Seen) -> Tensor:
    """FedAvg: whether the first layer's update differs between two rounds as each canary's clipped
    gradient does.

    Where both rounds have the same noise, it has none left in the difference.
    """
    settings, name, moved, gradients = seen.run.settings.fedavg, "hidden.weight", [], []
    records = LandscapeRecords(canaries.x, canaries.y, torch.ones(len(canaries.x)))
    for question, payload in seen.rounds[:2]:
        received = unpack_parameters(question or b"").tensors
        module = network(settings.kind, canaries.x.shape[1], canaries.classes, received)
        moved.append(unpack_parameters(payload).tensors[name].float().flatten())
        gradients.append(
            torch.cat(
                [each[name] for each in _clipped(module, received, records, settings.clip)]
            ).flatten(1)
        )
    expected = gradients[0] - gradients[1]
    length = expected.square().sum(1)
    return (
        expected @ (moved[1] - moved[0]) * settings.batch_size / settings.learning_rate - length / 2
    )


def by_synthetic(canaries: Canaries, seen: Seen) -> Tensor:
    """FedLAP: the product of the gradient of the released synthetic records with each canary's
    clipped gradient.
    """
    settings, scores = seen.run.settings.fedlap, torch.zeros(len(canaries.x))
    for question, payload in seen.rounds:
        received, made = unpack_parameters(question or b"").tensors, unpack_synthetic(payload)
        module = network(settings.kind, canaries.x.shape[1], canaries.classes, received)
        body, values = split_input(module, canaries.x)
        synthetic = LandscapeRecords(made.values.float(), made.labels, torch.ones(len(made.labels)))
        direction = _sum_of_gradients(body, received, synthetic)
        records = LandscapeRecords(values.float(), canaries.y, torch.ones(len(values)))
        scores += _along(body, received, records, settings.clip, direction)
    return scores


def by_decoder(canaries: Canaries, seen: Seen) -> Tensor:
    """DP-CVAE: the class sums of the first round, and the variances in the second.

    A canary far from all others in one dimension has nearly its whole gradient in the logarithm of
    this variance. It says that the variance is too small by a factor of d, so its clipped gradient
    is minus the clip. One step of plain descent.
    """
    run, claim = seen.run, seen.run.mechanism
    assert claim is not None
    first_round = unpack_parameters(seen.rounds[0][1]).tensors
    moved = unpack_parameters(seen.rounds[1][1]).tensors["variance.weight"][:, 0]
    step = (
        run.settings.dpcvae.rate(2, run.rounds, 0.0)
        * claim.clip
        / max(1.0, float(first_round[COUNTS].clamp_min(0).sum()))
    )
    return (
        _of_first_round(canaries, seen)
        + (moved[canaries.x.argmax(1)] / step - 0.5) / claim.noise_multiplier**2
    )


def _of_first_round(canaries: Canaries, seen: Seen) -> Tensor:
    """The likelihood ratio of the class sums that a generator's run releases first."""
    claim = seen.run.mechanism
    assert claim is not None
    sums, noise = (
        unpack_parameters(seen.rounds[0][1]).tensors[SUMS],
        claim.event(1).noise_multiplier,
    )
    along = (sums[canaries.y] * torch.nn.functional.normalize(canaries.x)).sum(1)
    return (along - 0.5) * first_round_shares(seen.run.settings.dpcvae)["sums"] / noise**2


def by_first_round(canaries: Canaries, seen: Seen) -> Tensor:
    """DP-CGAN: the class sums of the first round.

    The critic, whose gradients are noisy sums, stays at the site. The movement of the generator is
    not attacked.
    """
    return _of_first_round(canaries, seen)


def _along(
    module: torch.nn.Module, at: Tensors, records: LandscapeRecords, clip: float, direction: Tensors
) -> Tensor:
    """Products (m,) of each record's clipped gradient with a direction."""
    products = []
    for each in _clipped(module, at, records, clip):
        parts = [
            gradients.flatten(1) @ direction[name].flatten() for name, gradients in each.items()
        ]
        products.append(torch.stack(parts).sum(0))
    return torch.cat(products)


def _clipped(
    module: torch.nn.Module, at: Tensors, records: LandscapeRecords, clip: float
) -> Iterator[Tensors]:
    """The clipped gradient of each record, by parameter, for some records at a time."""

    def one(point: dict[str, Tensor], value: Tensor, label: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            functional_call(module, point, (value[None],)), label[None]
        )

    each_of = vmap(grad(one), in_dims=(None, 0, 0))
    for values, labels in zip(
        torch.split(records.values, TOGETHER), torch.split(records.labels, TOGETHER), strict=True
    ):
        each = each_of(dict(at), values, labels)
        square = sum(
            (part.flatten(1).square().sum(1) for part in each.values()), torch.zeros(len(values))
        )
        factor = (clip / square.sqrt().clamp_min(1e-12)).clamp_max(1)
        yield {
            name: part * factor.reshape(-1, *[1] * (part.dim() - 1)) for name, part in each.items()
        }


def _sum_of_gradients(module: torch.nn.Module, at: Tensors, records: LandscapeRecords) -> Tensors:
    asked = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    logits = functional_call(module, asked, (records.values,))
    loss = torch.nn.functional.cross_entropy(logits, records.labels, reduction="sum")
    return dict(zip(asked, torch.autograd.grad(loss, list(asked.values())), strict=True))
