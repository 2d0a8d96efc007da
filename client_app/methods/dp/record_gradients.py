"""A site's gradient under differential privacy: per-record clipping, noise added once to the sum, or none
where all sites add theirs together; and DP-SGD of Poisson samples (Abadi et al. 2016).

The unit is a record, or a patient with all of that patient's records. A patient is drawn with all of its
records, and each of them weighs one over their number. A record's gradient is no longer than the clip C, so
the sum over a patient is not either: |sum_i w_i g_i| <= sum_i w_i |g_i| <= C. This holds to the last digit,
because weights and contributions are rounded toward zero. So a step costs the same for patients as for
records: all that changes is what is added or removed.

Networks of linear layers are clipped without storing per-record gradients ("ghost clipping").
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.models.training_parts import Change
from fedsurrogate.common.privacy.exact_sums import ExactSum, IntegerSum, clip_factors
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, system_uniforms, unit_weights
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import FedAvgSettings

from ..local_training import PLAIN, Losses, Variant, class_losses

# Number of records in a chunk. A power of two: rows of a chunk then begin at even addresses.
TOGETHER = 64
ORDERS = 4
# Kernels use other code for the last few rows or columns of narrow layers; 16 numbers fill a vector
# register.
WIDTH = 16
# Bytes to which torch aligns memory of its own.
ALIGNED = 64
# Maps inputs of records, each (n, ...), to results for every record, each (n, ...).
PerRecord = Callable[..., list[Tensor]]


class WideLinear(TorchFunctionMode):
    """Computes linear layers with inputs and outputs zero-padded to a multiple of WIDTH."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return _wide_linear(*args, **(kwargs or {}))


def _wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out, into = weight.shape
    more, further = -into % WIDTH, -out % WIDTH
    product = pad(input, (0, more)) @ pad(weight, (0, more, 0, further)).T
    return product[..., :out] if bias is None else product[..., :out] + bias


@dataclass(frozen=True)
class Way:
    """How records go through a model.

    Attributes:
        rows: number of records in a call.
        wide: whether layers are widened.
    """

    rows: int
    wide: bool = False

    def open(self) -> AbstractContextManager[object]:
        """A context in which linear layers are computed in this way."""
        return WideLinear() if self.wide else nullcontext()


# The way chosen for each kind of model on this machine.
_known: dict[Hashable, Way] = {}


def per_record(
    each: PerRecord,
    inputs: Sequence[Tensor],
    kind: object,
    parameters: Sequence[Tensor],
    chunks: int = 1,
    larger: int = 1,
) -> Iterator[list[Tensor]]:
    """Compute results for all records, so that none depends on another record.

    Args:
        each: maps inputs (n, ...) to results (n, ...).
        inputs: tensors (n, ...) of the records.
        kind: identifies the computation in `each`, for example by its module.
        parameters: those that `each` uses; the test of a new kind fills them with random numbers
            and then restores them.
        chunks: number of chunks whose results are yielded at a time.
        larger: a chunk has so many times TOGETHER records; for cheap models, where a call costs
            more than its arithmetic.

    Yields:
        The results of `each`, those of `chunks` chunks at a time.
    """
    rows = larger * TOGETHER
    count, group = len(inputs[0]), chunks * rows
    way = way_of(each, inputs, kind, parameters, rows) if count else Way(1)
    for start in range(0, count, group):
        ends = range(start, min(start + group, count), way.rows)
        parts = [
            _chunk(each, [tensor[at : at + way.rows] for tensor in inputs], way) for at in ends
        ]
        yield (
            parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]
        )


def _chunk(each: PerRecord, inputs: Sequence[Tensor], way: Way) -> list[Tensor]:
    count = len(inputs[0])
    filled = [_filled(part, way.rows) for part in inputs]
    with way.open():
        results = each(*filled)
    return results if count == way.rows else [result[:count] for result in results]


def _filled(part: Tensor, rows: int) -> Tensor:
    """The records, with zeros behind them, at an address where fresh memory could be."""
    if len(part) == rows and part.is_contiguous() and part.data_ptr() % ALIGNED == 0:
        return part
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def aligned(rows: Tensor) -> Tensor:
    """Rows whose norms do not depend on their place: a GPU adds up a long row in another order where
    it begins at an odd address, so zeros widen it there.

    Args:
        rows: (n, d), on any device.
    """
    more = 0 if rows.device.type == "cpu" else -rows.shape[1] % WIDTH
    return pad(rows, (0, more)) if more else rows


def way_of(
    each: PerRecord,
    inputs: Sequence[Tensor],
    kind: object,
    parameters: Sequence[Tensor],
    rows: int = TOGETHER,
) -> Way:
    """The fastest way in which the place of a record does not matter.

    Args:
        each: as for `per_record`.
        inputs: as for `per_record`.
        kind: as for `per_record`.
        parameters: as for `per_record`.
        rows: of a chunk.
    """
    shapes = tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in inputs)
    place = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in parameters)
    key = (each.__qualname__, str(kind), shapes, place, torch.get_num_threads(), rows)
    if key not in _known:
        ways = Way(rows), Way(rows, wide=True)
        alike = (way for way in ways if _places_are_alike(each, inputs, parameters, way))
        _known[key] = next(alike, Way(1))
    return _known[key]


def _places_are_alike(
    each: PerRecord, inputs: Sequence[Tensor], parameters: Sequence[Tensor], way: Way
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: torch.Size, like: Tensor) -> Tensor:
        # Any class works as a label; zeros are one.
        random = torch.zeros(shape)
        if like.is_floating_point():
            random = torch.randn(shape, generator=generator)
        return random.to(like)

    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                # Keeps outputs near one: in a saturated loss a gradient would not show their last
                # digits.
                size = max(1, parameter[0].numel() if parameter.ndim else 1) ** 0.5
                parameter.copy_(drawn(parameter.shape, parameter) / size)
        probe = [drawn(torch.Size((way.rows, *tensor.shape[1:])), tensor) for tensor in inputs]
        with way.open():
            results = [part.detach().clone() for part in each(*probe)]
        for _ in range(ORDERS):
            order = torch.randperm(way.rows, generator=generator)
            with way.open():
                moved = each(*(tensor[order.to(tensor.device)] for tensor in probe))
            if not all(
                torch.equal(part[order.to(part.device)], other)
                for part, other in zip(results, moved, strict=True)
            ):
                return False
        return True
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)


@dataclass(frozen=True)
class Units:
    """The unit that each record belongs to.

    Attributes:
        count: number of units.
        owners: index of each record's patient, (n,); None where each record is a unit of its own.
        weights: of each record, (n,), float64; those of a patient sum to at most one. None where
            each record is a unit of its own.
    """

    count: int
    owners: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, patients: Sequence[str] | None, count: int) -> Units:
        """The units of records.

        Args:
            patients: of each record, (n,); None where a record is the unit.
            count: n, number of records, used without patients.

        Example:
            >>> Units.of(["ann", "bob", "ann"], 3).weights.tolist(), Units.of(None, 3).count
            ([0.5, 1.0, 0.5], 3)
        """
        if patients is None:
            return cls(count)
        places: dict[str, int] = {}
        owners = [places.setdefault(name, len(places)) for name in patients]
        weights = unit_weights(patients, count)
        return cls(len(places), torch.tensor(owners, dtype=torch.int64), weights)

    def sample(self, rate: float) -> tuple[Tensor, Tensor | None]:
        """A Poisson sample of units, each with all of its records.

        Args:
            rate: probability with which each unit is taken, independently.

        Returns:
            Indices of the records that take part, (m,), and the weight of each, (m,), float64; None
            where each is a unit of its own.
        """
        taken = poisson_sample(self.count, rate)
        if self.owners is None or self.weights is None:
            return taken, None
        chosen = torch.zeros(self.count, dtype=torch.bool)
        chosen[taken] = True
        rows = chosen[self.owners].nonzero().squeeze(1)
        return rows, self.weights[rows]


def poisson_sample(count: int, rate: float) -> Tensor:
    """Poisson sample of units, by numbers as secret as noise.

    They have 53 bits: with 24 bits every smaller rate would become 6e-8.

    Args:
        count: number of units.
        rate: probability with which each is taken, independently.

    Returns:
        Indices of the sample's units.
    """
    return (system_uniforms(count) < rate).nonzero().squeeze(1)


class NoisyMeans:
    """Noisy means of clipped gradients, and facts about them that stay at the site.

    Args:
        clip: largest norm of one record's gradient, over all parameters.
        noise_multiplier: standard deviation of the noise over the clip.
        expected: public divisor of the sums.

    Attributes:
        clip: as above.
        noise: standard deviation in every entry of a mean.
    """

    def __init__(self, clip: float, noise_multiplier: float, expected: float) -> None:
        self.clip, self.noise = clip, noise_multiplier * clip / expected
        self._multiplier, self._expected = noise_multiplier, expected
        self._clipped = self._drawn = 0
        self._signal: list[float] = []

    def mean(
        self, total: Mapping[str, IntegerSum], like: Mapping[str, Tensor], cut: int, drawn: int
    ) -> dict[str, Tensor]:
        """The mean with noise.

        Args:
            total: the sum of clipped gradients, by parameter.
            like: tensors by the same names, whose shapes, types and devices the means have.
            cut: number of the gradients that were clipped.
            drawn: number of the records.

        Returns:
            By parameter.
        """
        flat = IntegerSum.joined(list(total.values()))
        noisy = BoundedSum("gradients", flat, self.clip).noisy(self._multiplier * self.clip)
        self._clipped, self._drawn = self._clipped + cut, self._drawn + drawn
        self._signal.append(float(flat.value.norm()) / (noisy.sigma * len(noisy.value) ** 0.5))
        sizes = [part.fine.numel() for part in total.values()]
        parts = torch.split(noisy.value / self._expected, sizes)
        return {
            name: part.reshape(like[name].shape).to(like[name])
            for name, part in zip(total, parts, strict=True)
        }

    def facts(self) -> dict[str, float]:
        """The share of clipped gradients in all means so far, and their signal-to-noise ratio."""
        return {
            "clip-fraction": self._clipped / max(1, self._drawn),
            "signal-to-noise-gradients": sum(self._signal) / max(1, len(self._signal)),
        }


class PrivateGradient(NoisyMeans):
    """Private gradients of Poisson samples of a site's units: records or patients.

    Each costs one sampled Gaussian release. A call takes each unit independently with probability
    `sample_rate`, and divides the noisy sum of clipped gradients by `expected`, a public number.

    Args:
        body: the network.
        records: of the site.
        clip: largest norm of one record's gradient, over all parameters.
        noise_multiplier: standard deviation of the noise over the clip.
        sample_rate: probability that a unit takes part in a call.
        expected: public divisor of the sum.
        units: of the records; by default each record is one.

    Source: FedLAP-DP, algorithm 3. Differs from the paper:
    - Noise is added once to the sum. The paper adds it for every record, which is many times what
    the accountant counts.
    - Sample and noise come from the operating system's generator. In the paper's code augmentation
    re-seeds it by the clock.
    - The divisor is not the actual size of the batch, which is private.
    """

    def __init__(
        self,
        body: nn.Module,
        records: LandscapeRecords,
        clip: float,
        noise_multiplier: float,
        sample_rate: float,
        expected: int,
        units: Units | None = None,
    ) -> None:
        super().__init__(clip, noise_multiplier, expected)
        self._units = units or Units(len(records.labels))
        self._body, self._records, self._rate = body, records, sample_rate

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """One private gradient, by name of the parameter."""
        rows, weights = self._units.sample(self._rate)
        taken = self._records.take(rows.to(self._records.labels.device))
        total, cut = clipped_sum(self._body, parameters, taken, self.clip, change, weights)
        return self.mean(total, parameters, cut, len(rows))


def unchanged(values: Tensor) -> Tensor:
    """Values without augmentation."""
    return values


def clipped_sum(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    clip: float,
    change: Change = unchanged,
    weights: Tensor | None = None,
    losses: Losses = class_losses,
) -> tuple[dict[str, IntegerSum], int]:
    """The sum of all records' gradients, each clipped and weighted.

    Args:
        body: the network.
        parameters: where the gradients are taken, by name.
        records: of the site.
        clip: largest norm of one record's gradient, over all parameters.
        change: augmentation.
        weights: of the records, (n,), see `units.Units`; None for one.
        losses: of records.

    Returns:
        The sum, by parameter, and the number of clipped gradients.
    """

    def one(at: dict[str, Tensor], value: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(body, at, (change(value[None]),))
        return losses(outputs, label[None]).sum()

    each_of = vmap(grad(one), in_dims=(None, 0, 0))
    at = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def gradients(values: Tensor, labels: Tensor) -> list[Tensor]:
        each = list(each_of(at, values, labels).values())
        return [*each, norms_of(each)]

    total, cut, start = sums_like(at.values(), clip), 0, 0
    for *each, norms in per_record(
        gradients, (records.values, records.labels), body, list(at.values())
    ):
        own = weights_of(weights, start, norms)
        cut, start = cut + add_clipped(total, each, norms, clip, own), start + len(norms)
    return {name: part.total for name, part in zip(at, total, strict=True)}, cut


def sums_like(tensors: Iterable[Tensor], clip: float) -> list[ExactSum]:
    """Empty sums, one for each tensor.

    Args:
        tensors: whose shapes the sums have.
        clip: largest norm of a gradient that is added.
    """
    return [ExactSum(tensor.shape, clip, tensor.device) for tensor in tensors]


def norms_of(each: Sequence[Tensor]) -> Tensor:
    """Norms (n,), float64, of records' gradients (n, ...) over all parameters."""
    parts = [
        torch.linalg.vector_norm(aligned(part.flatten(1)), dim=1, dtype=torch.float64)
        for part in each
    ]
    norms: Tensor = torch.stack(parts).norm(dim=0)
    return norms


def weights_of(weights: Tensor | None, start: int, norms: Tensor) -> Tensor | None:
    """The weights of the records whose gradients have these norms; None for one.

    Args:
        weights: of all records, (n,); None for one.
        start: index of the first of these records.
        norms: of their gradients, (m,).
    """
    return None if weights is None else weights[start : start + len(norms)].to(norms)


def add_clipped(
    total: Sequence[ExactSum],
    each: Sequence[Tensor],
    norms: Tensor,
    clip: float,
    weights: Tensor | None = None,
) -> int:
    """Clip records' gradients and add them to sums.

    In double precision: a tiny factor rounded to single precision may lose all its digits and be up
    to twice as large. Every step rounds each number by itself, independently of its neighbours.

    Args:
        total: the sums, by parameter.
        each: gradients (n, ...), by parameter.
        norms: of the gradients over all parameters, (n,).
        clip: largest norm.
        weights: of the records, (n,), float64, at most one; None for one.

    Returns:
        How many were clipped.
    """
    factors = clip_factors(norms, clip)
    if weights is not None:
        factors = factors * weights
    lengths = torch.where(factors > 0, norms * factors, 0.0)
    for sum_, gradients in zip(total, each, strict=True):
        scaled = gradients * factors.reshape(-1, *[1] * (gradients.ndim - 1))
        sum_.add(scaled.nan_to_num_(0.0, 0.0, 0.0), weights, lengths)
    return int((norms > clip).sum())


# From features, labels and weights (None for one) of records to the sum of their clipped gradients
# by parameter, and the number of clipped ones.
ClippedSums = Callable[[Tensor, Tensor, Tensor | None], tuple[dict[str, IntegerSum], int]]


class UnitRecords(NamedTuple):
    """Records of a site, and whose they are.

    Attributes:
        features: (n, d).
        labels: indices of classes, (n,), or the code of another target, (n, q).
        units: of privacy.
    """

    features: Tensor
    labels: Tensor
    units: Units


def train_privately(
    module: nn.Module,
    records: UnitRecords,
    settings: FedAvgSettings,
    claim: Mechanism,
    rate: float,
    variant: Variant = PLAIN,
) -> dict[str, float]:
    """Train a network in place by DP-SGD.

    A step takes each unit, a record or a patient, independently with probability
    `settings.sample_rate` and divides the noisy sum by `settings.batch_size`. Both are public; the
    number of units, or of those drawn, is private. So a site with more units takes longer steps,
    which agrees with FedAvg's weights.
    FedProx's term is added after the noise: it depends on public numbers only.

    Args:
        module: the network.
        records: of the site.
        settings: steps, sample rate and divisor.
        claim: its clip and noise multiplier are used.
        rate: learning rate.
        variant: the losses of records, and the weight of FedProx's term.

    Returns:
        Facts that stay at the site.

    Source: Abadi et al. 2016.
    """
    means = NoisyMeans(claim.clip, claim.noise_multiplier, settings.batch_size)
    summed = _sums_of(module, claim.clip, variant.losses)
    trained = dict(module.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in trained.items()}
    for _ in range(settings.private_steps):
        rows, weights = records.units.sample(settings.sample_rate)
        features, labels, _ = records
        if len(rows) < len(labels):
            features, labels = features[rows], labels[rows]
        total, cut = summed(features, labels, weights)
        mean = means.mean(total, trained, cut, len(rows))
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.sub_(rate * (mean[name] + variant.mu * (parameter - start[name])))
    return means.facts()


def clipped_gradients(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    clip: float,
    losses: Losses = class_losses,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """The sum of all records' gradients, each clipped and weighted.

    Args:
        module: the network.
        features: of the records, (n, d).
        labels: indices of classes, (n,), or the code of another target, (n, q).
        clip: largest norm of one record's gradient, over all parameters.
        losses: of records.
        weights: of the records, (n,), see `units.Units`; None for one.

    Returns:
        The sum (float64), by parameter.
    """
    total, _ = _sums_of(module, clip, losses)(features, labels, weights)
    return {name: part.value for name, part in total.items()}


def _sums_of(module: nn.Module, clip: float, losses: Losses) -> ClippedSums:
    """The function that sums clipped gradients. For linear layers no gradient of a single record is
    stored, which takes a small part of the time.
    """
    layers = [each for each in module.modules() if [*each.parameters(recurse=False)]]
    if not all(isinstance(each, nn.Linear) for each in layers):
        at = dict(module.named_parameters())
        return lambda some, truth, weights: clipped_sum(
            module, at, LandscapeRecords.evenly(some, truth), clip, unchanged, weights, losses
        )

    def each(some: Tensor, truth: Tensor) -> Tensor:
        return losses(module(some), truth)

    return lambda some, truth, weights: clipped_sums(module, each, (some, truth), clip, weights)


# A chunk of records is so many times as large as for other networks.
LARGER = 4
# Entries whose norm is computed in single precision, and the factor that rounds it up, see `_lengths`.
BLOCK = 128
UP = 1 + (BLOCK / 2 + 3) * 2.0**-24
# The bits of a double that are its exponent, and the shortest input whose digits count.
EXPONENT, SHORTEST = 0x7FF0000000000000, 2.0**-100


def clipped_sums(
    modules: nn.Module,
    losses: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    clip: float,
    weights: Tensor | None = None,
) -> tuple[dict[str, IntegerSum], int]:
    """The sum of records' gradients, each clipped over all parameters, and weighted.

    A record's gradient of a layer is the outer product of the layer's input a and the gradient g of
    its output. So its squared norm is |a|^2 |g|^2, and the clipped sum is one matrix product
    ("ghost clipping").

    Args:
        modules: all trained parameters of these belong to linear layers, each used once.
        losses: computes the loss (n,) of every record from `inputs`, with `modules`.
        inputs: tensors (n, ...) of the records.
        clip: largest norm of one record's gradient.
        weights: of the records, (n,), see `units.Units`; None for one.

    Returns:
        The sum, by parameter; and the number of clipped gradients.

    Raises:
        ValueError: for other parameters.

    Source: Goodfellow 2015; Li et al. 2022.
    """
    parameters = {
        name: parameter for name, parameter in modules.named_parameters() if parameter.requires_grad
    }
    sums = dict(zip(parameters, sums_like(parameters.values(), clip), strict=True))
    layers: list[tuple[str, nn.Linear]] = []

    def outer_products(*some: Tensor) -> list[Tensor]:
        each, seen = _watched(modules, lambda: losses(*some))
        layers[:] = [(name, module) for name, module, _, _ in seen]
        covered = [
            f"{name}{part}" for name, module in layers for part, _ in module.named_parameters()
        ]
        if sorted(covered) != sorted(parameters):
            raise ValueError(
                "parameters outside linear layers, or used twice: "
                f"{sorted(set(parameters) ^ set(covered))[:3]}"
            )
        backward = torch.autograd.grad(each.sum(), [output for *_, output in seen])
        # Rounded up: the bound must hold to the last digit.
        lengths = [_lengths(came) for _, _, came, _ in seen]
        squares = torch.zeros(len(each), dtype=torch.float64, device=each.device)
        for (_, module, *_), length, after in zip(seen, lengths, backward, strict=True):
            squares += _lengths(after).square() * (length.square() + (module.bias is not None))
        return [squares.sqrt(), *lengths, *(came for _, _, came, _ in seen), *backward]

    cut = start = 0
    for norms, *parts in per_record(
        outer_products, inputs, modules, list(parameters.values()), larger=LARGER
    ):
        factors, count = clip_factors(norms, clip), len(layers)
        if (own := weights_of(weights, start, norms)) is not None:
            factors = factors * own
        lengths = torch.where(factors > 0, norms * factors, 0.0)
        factors = factors[:, None]
        cut, start = cut + int((norms > clip).sum()), start + len(norms)
        # Where the norm is finite, all entries are; other records add nothing.
        odd = ~norms.isfinite()
        any_odd = bool(odd.any())
        for (name, module), length, came, after in zip(
            layers, parts[:count], parts[count : 2 * count], parts[2 * count :], strict=True
        ):
            if any_odd:
                came, after = (part.masked_fill(odd[:, None], 0) for part in (came, after))
                length = length.masked_fill(odd, 0)
            scaled = after * factors
            sums[f"{name}weight"].add_products(
                scaled, _in_single(came), _power_above(length), own, lengths
            )
            if module.bias is not None:
                sums[f"{name}bias"].add(scaled, own, lengths)
    return {name: sum_.total for name, sum_ in sums.items()}, cut


def _lengths(rows: Tensor) -> Tensor:
    """Norms (n,), float64, of the rows of a chunk (n, d): never below the exact ones by more than 1e-12 of
    them, and above by 1e-5 and sqrt(d) 2^-62 at most.

    On a processor, norms of blocks of b = BLOCK entries are in single precision, which takes a third of
    the time. Proof of the bound, with u = 2^-24: a square is computed as x^2 (1 + e) + t, |e| <= u, where
    |t| <= 2^-126 is what a tiny one loses. A sum of b terms that are not negative, added in any order, is
    at least (1 - u)^(b - 1) of theirs, and a root loses at most u. So l is computed for a block of norm L
    with l^2 >= (L^2 - b 2^-126) (1 - u)^(b + 2), and L <= (1 - u)^(-b / 2 - 1) l + sqrt(b) 2^-63. That
    power is at most 1 + (b / 2 + 2) u; UP has one u more, for the norm over all blocks in double
    precision. The norm of the parts that are added is sqrt(d) 2^-63, with d rounded up to blocks.
    """
    double = partial(torch.linalg.vector_norm, dim=1, dtype=torch.float64)
    # In another layout the norm of a record may depend on those beside it.
    rows, d = rows.contiguous(), rows.shape[1]
    if rows.device.type != "cpu" or rows.dtype != torch.float32 or d <= BLOCK:
        norms: Tensor = double(aligned(rows))
        return norms
    # Without the condition, a pad of nothing is a copy.
    blocks = (pad(rows, (0, -d % BLOCK)) if d % BLOCK else rows).reshape(len(rows), -1, BLOCK)
    norms = double(torch.linalg.vector_norm(blocks, dim=2)) * UP
    norms += (blocks.shape[1] * BLOCK) ** 0.5 * 2.0**-63
    # Squares that overflow are taken in double precision.
    huge = norms.isinf()
    return torch.where(huge, double(rows), norms) if huge.any() else norms


def _in_single(values: Tensor) -> Tensor:
    """Values in at least single precision, in which a power of two multiplies without rounding."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _power_above(lengths: Tensor) -> Tensor:
    """A power of two above each length (n,), as a column (n, 1), float64."""
    bits = lengths.clamp_min(SHORTEST).view(torch.int64) & EXPONENT
    return bits.view(torch.float64)[:, None] * 2


def _watched(
    modules: nn.Module, work: Callable[[], Tensor]
) -> tuple[Tensor, list[tuple[str, nn.Linear, Tensor, Tensor]]]:
    """The result of `work`, and the inputs and outputs of every linear layer during it."""
    seen: list[tuple[str, nn.Linear, Tensor, Tensor]] = []

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            seen.append((name, module, inputs[0].detach(), output))

        return hook

    with ExitStack() as hooks:
        for name, module in modules.named_modules():
            if isinstance(module, nn.Linear):
                hooks.callback(
                    module.register_forward_hook(remember(f"{name}." if name else "")).remove
                )
        return work(), seen
