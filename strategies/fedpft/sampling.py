"""Learn a head from mixtures: sample synthetic features in a stream and train on them. No Flower
types.

Source: FedPFT (Beitollahi et al. 2024), algorithm 1, lines 13 to 17.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.training_parts import Batch, shuffled_batches, train_head
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.settings.heads import MANY_COLUMNS
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Surrogate, class_order
from fedsurrogate.common.wire.tensors import check_class_number

# Memory for samples at a time. It does not depend on the number of samples in a run.
POOL_BYTES = 64 * 2**20
# Training sweeps over a pool before new samples replace it: sampling costs more than training.
SWEEPS = 4
# With fewer than MANY_COLUMNS a step costs little, and samples do not run out: so many times the
# fewest steps are taken, at most.
MORE_STEPS = 4


@dataclass(frozen=True)
class Share:
    """One site's part in a pass.

    The stream of a (site, class) is independent of all other streams and of the other sites in the
    run. The reference code differs: it seeds all samplers alike, so every class gets the same
    normal draws.

    Attributes:
        mixtures: of the site.
        counts: number of samples of each class of the site in a pass.
        streams: random stream of each class.
        classes: their indices in the run, (C_k,).
        offsets: of the rounding of each class's part of a chunk.
    """

    mixtures: Mixtures
    counts: list[int]
    streams: list[torch.Generator]
    classes: Tensor
    offsets: list[int]

    def chunk(self, index: int, chunks: int) -> list[int]:
        """Samples of each class in a chunk; over all chunks they sum to `counts`.

        Args:
            index: of the chunk, counted from zero.
            chunks: their number in a pass.
        """

        def until(count: int, offset: int, chunk: int) -> int:
            return (chunk * count + offset) // chunks

        return [
            until(n, o, index + 1) - until(n, o, index)
            for n, o in zip(self.counts, self.offsets, strict=True)
        ]


def learn(
    surrogates: Sequence[Surrogate],
    settings: HeadSettings,
    seed: int,
    classes: Sequence[str] = (),
    device: str = "cpu",
) -> Head:
    """Train one linear head on samples from all surrogates, one sample per record of each site and
    class.

    Every pass draws new samples. Memory does not grow with their number.

    Args:
        surrogates: of the sites, with features of the same dimension.
        settings: of the training.
        seed: of all random streams.
        classes: of the head, in its order; if empty, all classes that occur.
        device: on which the samples are drawn.

    Raises:
        RunError: without surrogates.
    """
    if not surrogates:
        raise RunError("no surrogate to learn from")
    names = tuple(classes) or class_order(surrogates)
    check_class_number(names)
    rows = POOL_BYTES // (4 * surrogates[0].mixtures.means.shape[1])
    shares = _shares(surrogates, names, seed, settings.max_samples, device)
    mean, variance = _moments([share.mixtures for share in shares])
    total = sum(sum(share.counts) for share in shares)
    chunks = -(-total // max(1, rows))
    per_pass = sum(
        -(-sum(sum(share.chunk(index, chunks)) for share in shares) // settings.batch_size)
        for index in range(chunks)
    )
    few_columns = min(MORE_STEPS, max(1, MANY_COLUMNS // len(mean)))
    passes = settings.passes(per_pass, few_columns)
    batches = _batches(shares, chunks, passes, settings.batch_size, stream(seed, "", "order"))
    weight, bias = train_head(batches, passes * per_pass, mean, variance, len(names), settings)
    first = surrogates[0].header
    return Head(
        replace(first, site="coordinator", classes=names),
        weight.cpu(),
        bias.cpu(),
    )


def sample(surrogates: Sequence[Surrogate], classes: Sequence[str], seed: int, limit: int) -> Batch:
    """Draw features at once, for figures.

    Args:
        surrogates: of the sites.
        classes: of the labels, which hold all of the sites'.
        seed: of all random streams.
        limit: at most about so many features.

    Returns:
        Features (n, d), and labels (n,): indices into `classes`.
    """
    shares = _shares(surrogates, tuple(classes), seed, limit, "cpu")
    return _draw(shares, 0, 1)


def _shares(
    surrogates: Sequence[Surrogate], classes: tuple[str, ...], seed: int, limit: int, device: str
) -> list[Share]:
    total = sum(int(s.mixtures.counts.sum()) for s in surrogates)
    factor = min(1.0, limit / total)
    shares = []
    for surrogate in surrogates:
        site, names, mixtures = surrogate.header.site, surrogate.header.classes, surrogate.mixtures
        counts = [max(1, round(count * factor)) for count in mixtures.counts.tolist()]
        # Each stream has its own rounding offset, so that no chunk gets all remainders.
        offsets = [
            int.from_bytes(hashlib.sha256(f"{site}\0{name}".encode()).digest()[:4], "little")
            for name in names
        ]
        indices = torch.tensor([classes.index(name) for name in names], device=device)
        streams = [stream(seed, site, name) for name in names]
        shares.append(Share(mixtures.to(device), counts, streams, indices, offsets))
    return shares


def _moments(tables: Sequence[Mixtures]) -> tuple[Tensor, Tensor]:
    """Mean and variance of every dimension over all sites, in closed form: (d,) and (d,)."""
    sizes = [float(table.counts.sum()) for table in tables]
    moments = [table.moments() for table in tables]
    total = sum(sizes)
    mean = sum(
        (size / total * m for size, (m, _) in zip(sizes, moments, strict=True)),
        torch.zeros_like(moments[0][0]),
    )
    variance = sum(
        (
            size / total * (v + (m - mean).square())
            for size, (m, v) in zip(sizes, moments, strict=True)
        ),
        torch.zeros_like(mean),
    )
    return mean, variance


def _draw(shares: Sequence[Share], index: int, chunks: int) -> Batch:
    drawn = [
        (share, *share.mixtures.draw(share.chunk(index, chunks), share.streams)) for share in shares
    ]
    return torch.cat([x for _, x, _ in drawn]), torch.cat(
        [share.classes[y] for share, _, y in drawn]
    )


def _batches(
    shares: Sequence[Share], chunks: int, passes: int, size: int, generator: torch.Generator
) -> Iterator[Batch]:
    for start in range(0, passes, SWEEPS):
        for index in torch.randperm(chunks, generator=generator).tolist():
            features, labels = _draw(shares, index, chunks)
            for _ in range(min(SWEEPS, passes - start)):
                yield from shuffled_batches(features, labels, size, generator)
