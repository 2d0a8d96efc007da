"""Experiments with fewer bytes: a basis of few directions that all sites share, so that a site
sends an r x r covariance in place of a d x r one; and entropy coding of packed loadings. Offline,
from the statistics of `gram`; no setting does this.

A site sends its class means and its covariance in the basis, as a triangle of correlations with
variances; the head lies in the basis. Two messages: the basis has the first eigenvectors of all
records' covariance, means included, pooled from a first message of low rank, whose bytes count. One
message: it has the first right singular vectors of the ImageNet head of the backbone, which are
public.
"""

import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.covariances import Gram
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn

Point = tuple[str, float, int]
# Directions, and bits of a correlation.
PUBLIC = [(r, bits) for r, bits in ((128, 16), (256, 8), (256, 16), (384, 8), (512, 8))]


def measured_points(
    whole: Sequence[AnySurrogate],
    run: Run,
    classes: tuple[str, ...],
    judge: Callable[..., float],
    weights: Path,
) -> Iterator[Point]:
    """Line, accuracy in percent and bytes of all sites, of every variant.

    whole: surrogates of `gram`. weights: a file with the head
    of the backbone.
    """
    given = [each for each in whole if isinstance(each, Surrogate)]
    rows = sum(len(each.mixtures.means) for each in given)

    def measure(basis: Tensor, bits: int) -> tuple[float, int]:
        r = basis.shape[1]
        head = learn([_in_basis(each, basis, bits) for each in given], run, "cpu", classes).model
        assert isinstance(head, Head)
        covariances = len(given) * ((r * (r - 1) // 2 * bits + 7) // 8 + 2 * r)
        return judge(
            replace(head, weight=head.weight @ basis.T.float())
        ), 2 * rows * r + covariances + 200 * len(given)

    table = load_file(weights)["classifier.1.weight"].double()
    directions = torch.linalg.svd(table - table.mean(0), full_matrices=False).Vh.T
    for r, bits in PUBLIC:
        yield f"public basis, {r} x {r} at {bits} bits", *measure(directions[:, :r], bits)


def _in_basis(surrogate: Surrogate, basis: Tensor, bits: int) -> Surrogate:
    """The surrogate with the covariance that a coordinator rebuilds from what the site sends in the
    basis (d, r).
    """
    assert isinstance(surrogate.mixtures.covariance, Gram)
    matrix = surrogate.mixtures.covariance.matrix.double()
    inside = basis.T @ matrix @ basis
    scale = inside.diagonal().clamp_min(1e-12).sqrt()
    correlations = inside / scale / scale[:, None]
    if bits == 16:
        correlations = correlations.half().double()
    else:
        most = 2 ** (bits - 1) - 1
        correlations = (correlations * most).round() / most
    correlations.fill_diagonal_(1)
    values, vectors = torch.linalg.eigh(correlations * scale * scale[:, None])
    rebuilt = Gram(((vectors * values.clamp_min(0)) @ vectors.T).float())
    means = (surrogate.mixtures.means.double() @ basis).half().float()
    return replace(surrogate, mixtures=replace(surrogate.mixtures, means=means, covariance=rebuilt))


def entropy_coded(surrogates: Sequence[AnySurrogate], bits: int) -> tuple[int, int, int]:
    """Bytes of the packed surrogates, and of these after zlib and after lzma."""
    payloads = [pack_surrogate(each, bits) for each in surrogates]
    return (
        sum(map(len, payloads)),
        sum(len(zlib.compress(payload, 9)) for payload in payloads),
        sum(len(lzma.compress(payload, preset=9)) for payload in payloads),
    )
