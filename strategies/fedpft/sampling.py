"""Learn a head from mixtures: sample synthetic features in a stream and train on them. No Flower type in here.

Source: FedPFT (Beitollahi et al. 2024), algorithm 1, lines 13 to 17.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.sections import HeadConfig
from common.errors import RunError
from common.models.classifiers import Head
from common.models.head_training import Batch, shuffled_batches, train_head
from common.randomness import stream
from common.surrogates.mixtures import Mixtures
from common.surrogates.surrogates import Header, Surrogate, class_order
from common.wire.validation import check_class_number

# Samples held in memory at a time. The number of samples a run draws does not matter, only this does.
POOL_BYTES = 64 * 2**20
# How often a pool is trained on before fresh samples replace it: drawing them costs more than training on them.
SWEEPS = 4


@dataclass(frozen=True)
class Share:
    """One site's part in a pass: how many samples of each class, from which streams, and its labels among the run's.

    The stream of a (site, class) is independent of all others, and of which other sites take part. Differs from the
    reference code, which seeds every sampler alike and so draws the same normals for every class.
    """

    mixtures: Mixtures
    counts: list[int]
    streams: list[torch.Generator]
    classes: Tensor
    offsets: list[int]

    def chunk(self, index: int, chunks: int) -> list[int]:
        """Samples of each class in chunk `index` of `chunks`; over all chunks they sum to `counts`."""

        def until(count: int, offset: int, chunk: int) -> int:
            return (chunk * count + offset) // chunks

        return [until(n, o, index + 1) - until(n, o, index) for n, o in zip(self.counts, self.offsets, strict=True)]


def learn(
    surrogates: Sequence[Surrogate], settings: HeadConfig, seed: int, classes: Sequence[str] = (), device: str = "cpu"
) -> Head:
    """Train one linear head on features sampled from all surrogates, as many of each site and class as it has records.

    Every pass draws fresh samples. Memory does not grow with their number. `classes` fixes the classes and their order;
    without it they are all that occur. Raises RunError when there is nothing to learn from.
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
        -(-sum(sum(share.chunk(index, chunks)) for share in shares) // settings.batch_size) for index in range(chunks)
    )
    passes = settings.passes(per_pass)
    batches = _batches(shares, chunks, passes, settings.batch_size, stream(seed, "", "order"))
    weight, bias = train_head(batches, passes * per_pass, mean, variance, len(names), settings)
    first = surrogates[0].header
    return Head(Header(first.method, first.run, "coordinator", first.fingerprint, names), weight.cpu(), bias.cpu())


def sample(surrogates: Sequence[Surrogate], classes: Sequence[str], seed: int, limit: int) -> Batch:
    """Draw at most about `limit` features in one piece, for pictures: (n, d) and labels (n,) among `classes`."""
    shares = _shares(surrogates, tuple(classes), seed, limit, "cpu")
    return _draw(shares, 0, 1)


def _shares(surrogates: Sequence[Surrogate], classes: tuple[str, ...], seed: int, limit: int, device: str) -> list[Share]:
    total = sum(int(s.mixtures.counts.sum()) for s in surrogates)
    factor = min(1.0, limit / total)
    shares = []
    for surrogate in surrogates:
        site, names, mixtures = surrogate.header.site, surrogate.header.classes, surrogate.mixtures
        counts = [max(1, round(count * factor)) for count in mixtures.counts.tolist()]
        # Different streams round at different chunks, so that no chunk collects all remainders.
        offsets = [int.from_bytes(hashlib.sha256(f"{site}\0{name}".encode()).digest()[:4], "little") for name in names]
        indices = torch.tensor([classes.index(name) for name in names], device=device)
        streams = [stream(seed, site, name) for name in names]
        shares.append(Share(mixtures.to(device), counts, streams, indices, offsets))
    return shares


def _moments(tables: Sequence[Mixtures]) -> tuple[Tensor, Tensor]:
    """Mean and variance of every dimension over all sites, in closed form: (d,) and (d,)."""
    sizes = [float(table.counts.sum()) for table in tables]
    moments = [table.moments() for table in tables]
    total = sum(sizes)
    mean = sum((size / total * m for size, (m, _) in zip(sizes, moments, strict=True)), torch.zeros_like(moments[0][0]))
    variance = sum(
        (size / total * (v + (m - mean).square()) for size, (m, v) in zip(sizes, moments, strict=True)),
        torch.zeros_like(mean),
    )
    return mean, variance


def _draw(shares: Sequence[Share], index: int, chunks: int) -> Batch:
    drawn = [(share, *share.mixtures.draw(share.chunk(index, chunks), share.streams)) for share in shares]
    return torch.cat([x for _, x, _ in drawn]), torch.cat([share.classes[y] for share, _, y in drawn])


def _batches(shares: Sequence[Share], chunks: int, passes: int, size: int, generator: torch.Generator) -> Iterator[Batch]:
    for start in range(0, passes, SWEEPS):
        for index in torch.randperm(chunks, generator=generator).tolist():
            features, labels = _draw(shares, index, chunks)
            for _ in range(min(SWEEPS, passes - start)):
                yield from shuffled_batches(features, labels, size, generator)
