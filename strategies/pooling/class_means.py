"""Statistics of many sites brought together: noisy class means pooled or shrunk, messages moved
into one frame of columns, the public mean, and rounds of sums.

Noisy class means whose differences are mostly chance along the mean over columns, or across it.

Where classes differ in their level alone, one direction tells them apart, and all others hold noise
that a head would give as much weight as it is large. The mean over columns is known to be one direction
(`common/privacy/gaussian_mechanism.py`), so both parts are judged alone.

Lengths of noisy class means, shrunk towards what all classes have in common.

A mean is a noisy sum over a noisy count. The noise of the count makes it longer or shorter, and a
head takes a long mean for a class that is far from the others. Lengths of all classes together are
known far better than that of one.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.serverapp import Grid
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.backbones.backbone_names import named_dimension
from fedsurrogate.common.backbones.own_backbones import HEADS, own_head
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.errors import ConfigError, RunError, SurrogateError
from fedsurrogate.common.methods.method import Field
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.privacy.gaussian_mechanism import own_lines
from fedsurrogate.common.privacy.shares import KEPT, OwnParts
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import dimensions_of, projected_dimensions
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.settings.heads import AUTO
from fedsurrogate.common.surrogates import covariances
from fedsurrogate.common.surrogates.class_sums import PRESENT, fold, unfold
from fedsurrogate.common.surrogates.mixtures import Frame, PublicMap
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.wire.surrogate_proto import (
    pack_centre,
    public_digest,
    unpack_centre,
    unpack_projection,
)
from fedsurrogate.common.wire.tensors import pack

from ..base.outcome import Defended
from ..base.rounds import RoundsOfParameters
from ..base.training import Training
from .site_weights import below_one, moment_shares, shares_kept


def _change(own: bytes, wanted: bytes) -> tuple[Tensor, Tensor]:
    """Factor and shift (d,) of each column from one frame to another, of which one may be empty."""
    first, last = (Frame.of(each) if each else None for each in (own, wanted))
    one = torch.ones_like((first or last).offset)  # type: ignore[union-attr]
    scale, offset = (one, 0 * one) if first is None else (first.divisor, first.offset)
    unit, centre = (one, 0 * one) if last is None else (last.divisor, last.offset)
    return scale / unit, (offset - centre) / unit


def moved_surrogate(surrogate: AnySurrogate, wanted: bytes) -> AnySurrogate:
    """A surrogate in another frame.

    One variance for all columns stays one: their mean. Noisy sums have no frame.

    Args:
        surrogate: of a site.
        wanted: the frame.
    """
    if isinstance(surrogate, SumsSurrogate) or surrogate.header.frame == wanted:
        return surrogate
    factor, shift = _change(surrogate.header.frame, wanted)
    table = surrogate.mixtures
    means = (table.means.double() * factor + shift).float()
    mixtures = replace(table, means=means, covariance=_moved(table.covariance, factor))
    return replace(surrogate, header=replace(surrogate.header, frame=wanted), mixtures=mixtures)


def _moved(covariance: covariances.AnyCovariance, factor: Tensor) -> covariances.AnyCovariance:
    """The covariance after column j is multiplied by factor[j]."""
    match covariance:
        case covariances.Spherical():
            return covariances.Spherical(
                (covariance.variances.double() * factor.square().mean()).float()
            )
        case covariances.Diagonal():
            return covariances.Diagonal((covariance.variances.double() * factor.square()).float())
        case covariances.LowRank():
            loadings = (covariance.factor.double() * factor[:, None]).float()
            return covariances.LowRank(
                loadings, (covariance.variances.double() * factor.square()).float()
            )
        case covariances.Full():
            return covariances.Full((covariance.cholesky.double() * factor[:, None]).float())
        case covariances.StoredGram():
            variances = (covariance.variances_per_dimension().double() * factor.square()).float()
            return covariances.StoredGram(lambda: _scaled(covariance.matrix, factor), variances)
        case covariances.Gram():
            return covariances.Gram(_scaled(covariance.matrix, factor))


def _scaled(matrix: Tensor, factor: Tensor) -> Tensor:
    return (matrix.double() * factor * factor[:, None]).float()


def moved_parameters(sent: Parameters, fields: Iterable[Field], wanted: bytes) -> Parameters:
    """Tensors of a site in another frame, float64, by what their fields say of them.

    Args:
        sent: in the frame of its header.
        fields: of its tensors.
        wanted: the frame.
    """
    if sent.header.frame == wanted:
        return sent
    change = _change(sent.header.frame, wanted)
    moved = {each.name: _moved_tensor(each, sent.tensors, *change) for each in fields}
    return replace(sent, header=replace(sent.header, frame=wanted), tensors=moved)


def _moved_tensor(field: Field, own: Tensors, factor: Tensor, shift: Tensor) -> Tensor:
    value, last = own[field.name].double(), field.shape.split()[-1]
    of = own[field.count].double() if field.count else None
    if field.degree is None:
        return value * factor + shift if last == "d" else value
    if not field.degree:
        return value if of is None else value - of @ (shift / factor)
    if last == "T":
        whole = unfold(value, len(factor))
        return fold(whole * factor * factor[:, None])
    value = value * factor**field.degree
    return value if of is None else value + torch.outer(of, shift).reshape(value.shape)


# By how many standard deviations chance may exceed its expectation.
DEVIATIONS = 3.0


@dataclass(frozen=True)
class Components:
    """J class means that stand out from the noise: one per class, or one per class and site.

    Attributes:
        classes: names, C.
        labels: indices into `classes`, (J,).
        means: (J, d).
        noise: covariance of their noise, (J, J), the same in every dimension.
        records: of each mean, (J,).
        shares: the part of the pooled second moment, which is weighted by site size, from each
            mean, (J,).
    """

    classes: tuple[str, ...]
    labels: Tensor
    means: Tensor
    noise: Tensor
    records: Tensor
    shares: Tensor


def by_site(surrogates: Sequence[SumsSurrogate]) -> Components:
    """The mean of every class at every site where it stands out from noise.

    Args:
        surrogates: noisy sums of the sites, with the same classes in the same order.

    Returns:
        Components, one per class and site, float64; their classes are those that stand out at some
        site.

    Raises:
        RunError: when no class stands out.
    """
    counts, sums = (
        torch.stack([getattr(s.sums, name) for s in surrogates]).double()
        for name in ("counts", "sums")
    )
    sigmas = _sigmas(surrogates)
    present = _present(surrogates)
    if not present.any():
        raise RunError(
            "no class stands out from the privacy noise; more records, more sites or a larger "
            "epsilon are needed"
        )
    site, label = present.nonzero().T
    kept = present.any(0)
    names = tuple(
        name for name, keep in zip(surrogates[0].header.classes, kept.tolist(), strict=True) if keep
    )
    records, sigma_of_count, sigma_of_sum = counts[present], *sigmas[site].T
    means = sums[present] / records[:, None]
    # A noisy count scales a mean. In quadratic forms this acts like extra noise, spread over all
    # dimensions.
    length = (means.square().mean(1) - (sigma_of_sum / records).square()).clamp_min(0)
    noise = (sigma_of_sum.square() + length * sigma_of_count.square()) / records.square()
    weights = records * counts.clamp_min(0).sum(1)[site]
    return Components(
        names, (kept.cumsum(0) - 1)[label], means, noise.diag(), records, weights / weights.sum()
    )


def noise_of_counts_and_sums(surrogates: Sequence[SumsSurrogate]) -> tuple[Tensor, Tensor]:
    """Standard deviations of the noise in the counts and in the sums of the components of `by_site`.

    Args:
        surrogates: as in `by_site`.

    Returns:
        Of the count of each component, and of an entry of its sum, (J,) each.
    """
    site, _ = _present(surrogates).nonzero().T
    of_count, of_sum = _sigmas(surrogates)[site].T
    return of_count, of_sum


def _sigmas(surrogates: Sequence[SumsSurrogate]) -> Tensor:
    """Standard deviations of the noise in counts and in sums by site, (J, 2)."""
    return torch.tensor(
        [[s.sums.sigmas["counts"], s.sums.sigmas["sums"]] for s in surrogates], dtype=torch.float64
    )


def _present(surrogates: Sequence[SumsSurrogate]) -> Tensor:
    """Whether a class stands out from the noise at a site, (sites, classes)."""
    counts = torch.stack([s.sums.counts for s in surrogates]).double()
    return counts > PRESENT * _sigmas(surrogates)[:, :1]


def pool(own: Components) -> Components:
    """One mean per class: the sites' means, weighted by inverse variance.

    The noise of a site's class mean has variance sigma^2 / n^2, so the best weight is n^2. A site
    with few records of a class then adds little noise to it. In a plain sum, the noise of all sites
    counts fully.

    Args:
        own: one per class and site, as from `by_site`.

    Returns:
        Components, one per class.
    """
    mixing = mixing_of(own, 2.0)
    totals = one_hot(own.labels).double()
    return Components(
        own.classes,
        torch.arange(len(own.classes)),
        mixing @ own.means,
        mixing @ own.noise @ mixing.T,
        own.records @ totals,
        own.shares @ totals,
    )


def shrink(own: Components) -> tuple[Components, float]:
    """Shrink sites' means towards their class mean by the part of their differences that is chance.

    The share that chance does not explain is 1 - (expected differences by chance) / (differences in
    the means). This share of each difference is kept. Chance includes privacy noise and sampling
    error. With a larger share, a class mean weights sites more by records and less by certainty.

    Args:
        own: one per class and site, as from `by_site`.

    Returns:
        The shrunk means, and the share, from 0 to 1.

    Source: James & Stein 1961.
    """
    share = _unexplained(own, mixing_of(own, 2.0))
    pooled = mixing_of(own, 2.0 - share)[own.labels]
    mixing = pooled + share * (torch.eye(len(own.labels), dtype=torch.float64) - pooled)
    return replace(own, means=mixing @ own.means, noise=mixing @ own.noise @ mixing.T), share


def differ_across(own: Components, of_sum: Tensor) -> float:
    """The share of the differences between sites' means of a class that chance does not explain,
    across the class mean. Chance may be three standard deviations above what is expected of it.

    A noisy count makes a mean longer or shorter, and little else, and does so by much where a site
    has few records. So the part of a difference along the class mean says little of sites.

    Args:
        own: one per class and site, as from `by_site`.
        of_sum: standard deviation of the noise in an entry of each sum, (J,).

    Returns:
        The share, from 0 to 1.
    """
    mixing = mixing_of(own, 2.0)
    pooled = torch.nn.functional.normalize((mixing @ own.means)[own.labels], dim=1)
    apart = torch.eye(len(own.labels), dtype=torch.float64) - mixing[own.labels]
    differences = apart @ own.means
    across = differences - (differences * pooled).sum(1, keepdim=True) * pooled
    d = own.means.shape[1]
    chance = (of_sum / own.records).square() + within(own) / d / own.records
    # The sum is a quadratic form of normal means: its mean and variance under chance alone.
    root = own.records.sqrt()[:, None] * apart * chance.sqrt()
    form = root.T @ root
    expected = (d - 1) * float(form.trace()) + DEVIATIONS * math.sqrt(2 * (d - 1)) * float(
        form.norm()
    )
    seen = float(own.records @ across.square().sum(1))
    return max(0.0, 1 - expected / seen) if seen > 0 else 0.0


def mixing_of(own: Components, power: float) -> Tensor:
    """Weights (C, J) of the sites' means in each class mean: proportional to records ** power, each
    row sums to one.

    Args:
        own: one per class and site, as from `by_site`.
        power: 2 weighs by certainty, 1 by records, 0 gives each site one vote.
    """
    weights = one_hot(own.labels).double().T * own.records**power
    return weights / weights.sum(1, keepdim=True)


def _unexplained(own: Components, mixing: Tensor) -> float:
    """The share of the differences between sites' means of a class, weighed by records, that chance
    does not explain.
    """
    d = own.means.shape[1]
    chance = own.noise + (within(own) / d / own.records).diag()
    apart = torch.eye(len(own.labels), dtype=torch.float64) - mixing[own.labels]
    differences = float(own.records @ (apart @ own.means).square().sum(1))
    expected = d * float(own.records @ (apart @ chance @ apart.T).diagonal())
    return max(0.0, 1 - expected / differences) if differences > 0 else 0.0


def within(own: Components) -> float:
    """Variance of records around the mean of their class and site, over all dimensions together.

    For features of unit norm it is one minus the mean's squared length; for clipped features, at
    most that.
    """
    noise, d = own.noise.diagonal(), own.means.shape[1]
    lengths = own.means.square().sum(1) - d * noise
    return max(0.0, 1 - float(own.records @ lengths / own.records.sum()))


# A part of which less is left than this share of the other's is shrunk.
MOSTLY = 0.2
# How often chance alone seems to be a difference.
RARELY = 0.001


def shrink_directions(pooled: Components, own: OwnParts) -> Components:
    """Class means without their differences along the mean over columns, along the length, or across
    both, where these may be chance and others are not; and with smaller ones, where chance explains most of
    them. Chance includes privacy noise and sampling error. Were all shrunk, shares of classes would count
    for more.

    Args:
        pooled: one per class, as from `pool`.
        own: what features keep of both.

    Returns:
        The means and their noise; as they were where all differences may be chance.

    Source: James & Stein 1961, for blocks of dimensions.
    """
    from scipy.special import chdtri

    others, d = len(pooled.labels) - 1, pooled.means.shape[1]
    if not others:
        return pooled
    shares, apart, *parts_of_chance = _apart(pooled)
    differences, chance = apart @ pooled.means, sum(parts_of_chance)
    lines = own_lines(d, own).to(differences)
    parts = [(1, differences @ line.outer(line)) for line in lines]
    parts.append((d - len(parts), differences - sum(part for _, part in parts)))
    left = []
    for size, part in parts:
        seen = float(shares @ part.square().sum(1))
        clear = seen > chdtri(size * others, RARELY) / others * chance
        left.append(1 - size * chance / seen if clear else 0.0)
    if not (most := max(left)):
        return pooled
    means, noise = pooled.means - differences, torch.zeros_like(pooled.noise)
    for (size, part), each in zip(parts, left, strict=True):
        kept = each / most if each < MOSTLY * most else 1.0
        means = means + kept * part
        mixing = torch.eye(others + 1, dtype=means.dtype) - (1 - kept) * apart
        # On average over all dimensions, as noise is stated.
        noise += size / d * (mixing @ pooled.noise @ mixing.T)
    return replace(pooled, means=means, noise=noise)


# Directions along which records vary, at least: means of few records then differ more by chance. In generated
# families and digits, models that are called so reach an AUROC of 0.65 at most.
VARYING = 4


def differ_by_chance(pooled: Components) -> bool:
    """Whether class means differ by no more than noise and sampling explain in 97.5 % of the cases.

    Args:
        pooled: one per class, as from `pool`.
    """
    others, d = len(pooled.labels) - 1, pooled.means.shape[1]
    shares, apart, *parts = _apart(pooled)
    seen = float(shares @ (apart @ pooled.means).square().sum(1))
    noise, sampling = (d * each for each in parts)
    spread = noise**2 / d + sampling**2 / min(d, VARYING)
    return others > 0 and seen <= noise + sampling + 1.96 * math.sqrt(2 * spread / others)


def _apart(pooled: Components) -> tuple[Tensor, Tensor, float, float]:
    """Shares of the classes; what subtracts the mean over them, (C, C); and what noise, and sampling, add to
    the squared differences in each dimension.
    """
    shares = pooled.records / pooled.records.sum()
    apart = torch.eye(len(shares), dtype=pooled.means.dtype) - shares
    sampling = (within(pooled) / pooled.means.shape[1] / pooled.records).diag()
    noise, drawn = (
        float(shares @ (apart @ each @ apart.T).diagonal()) for each in (pooled.noise, sampling)
    )
    return shares, apart, noise, drawn


# With fewer lengths, their spread says too little of how classes differ.
FEWEST = 4
# Smallest squared length that is told from noise, and the largest change of a length.
SHORTEST, MOST = 1e-3, 2.0


def even_lengths(
    pooled: Components, own: Components, of_count: Tensor, of_sum: Tensor
) -> Components:
    """Class means with lengths as they are expected given the noise.

    The logarithm of a length is taken as normal around one value for all classes, with the variance
    by which lengths differ beyond their noise (DerSimonian & Laird 1986). Noise of a count changes
    it by the count's relative error; noise of a sum adds to its square.

    Args:
        pooled: one per class, as from `pool`.
        own: one per class and site, as from `by_site`, that were pooled.
        of_count: standard deviation of the noise in the count of each of these, (J,).
        of_sum: the same in an entry of its sum, (J,).

    Returns:
        The means, longer or shorter, and their noise. With fewer than four classes as they were.

    Source: Efron & Morris 1975, for the logarithms of lengths.
    """
    if len(pooled.labels) < FEWEST:
        return pooled
    shares = mixing_of(own, 2.0).square()
    by_count = shares @ (of_count / own.records).square()
    by_sum = shares @ (of_sum / own.records).square()
    d = pooled.means.shape[1]
    squares = (pooled.means.square().sum(1) - d * by_sum).clamp_min(SHORTEST)
    error = by_count + (d * by_sum.square() / 2 + squares * by_sum) / squares.square()
    lengths, precision = squares.log() / 2, 1 / error
    middle = precision @ lengths / precision.sum()
    spread = precision @ (lengths - middle).square() - (len(lengths) - 1)
    between = float(spread / (precision.sum() - precision @ precision / precision.sum()))
    kept = max(0.0, between) / (max(0.0, between) + error)
    factors = ((1 - kept) * (middle - lengths)).exp().clamp(1 / MOST, MOST)
    # What the noise of counts adds to every dimension is as much smaller as the shrinkage leaves.
    noise = pooled.noise - ((1 - kept) * by_count * squares / d).diag()
    return replace(
        pooled, means=pooled.means * factors[:, None], noise=noise * torch.outer(factors, factors)
    )


def read_centre(file: str, power: float = 1.0) -> Tensor | None:
    """The public mean in a safetensors file, rounded as in transfer to sites.

    Args:
        file: with features `x`, (n, d); empty for none.
        power: to which they are raised before the mean.

    Returns:
        Their mean, (d,); None without a file.

    Raises:
        ConfigError: when the file is missing or has no such features.
    """
    return unpack_centre(pack_centre(raised(read_public(file), power).mean(0))) if file else None


def read_public(file: str) -> Tensor:
    """The public features in a safetensors file.

    Args:
        file: with features `x`.

    Returns:
        The features, (n, d), float64.

    Raises:
        ConfigError: when the file is missing or has none, or they are not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(file).expanduser(), "pt") as content:
            features: Tensor = content.get_tensor("x").double()
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, RuntimeError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"fedpft.public = {file!r}: no readable safetensors file with features x ({error})"
        ) from None
    if features.ndim != 2 or not features.numel() or not features.isfinite().all():
        raise ConfigError(
            f"fedpft.public = {file!r}: x of shape {tuple(features.shape)} must be (n, d) and "
            "finite"
        )
    return features


NAME, CENTRE = "projection", "centre"
# Part of the mean variance that is added to every variance of public images: directions that they
# do not have stay small.
RIDGE = 0.1


def read_map(config: Run, dimension: int = 0) -> PublicMap:
    """The map of `map_with_words`."""
    return map_with_words(config, dimension)[0]


def map_with_words(config: Run, dimension: int = 0) -> tuple[PublicMap, str]:
    """The run's map, rounded as in transfer to sites, and what projects, in words.

    Args:
        config: features.projection has a matrix or a known head, or is "auto"; and fedpft.public
            has public features, whose mean is the centre.
        dimension: of the sites' features, which "auto" needs.

    Raises:
        ConfigError: for a file that does not hold what is needed.
    """
    own, power = config.settings, config.power
    public, file = own.fedpft.public, own.features.given_projection
    centre = read_centre(public, power)
    if file:
        directions, is_head = _read(file)
        wanted = dimensions_of(own.features, own.colluding, config.mechanism)
    elif wanted := projected_dimensions(config, dimension):
        head = own_head(own.backbone, own.weights_path, dimension)
        # A head of few classes would leave out what sets others apart.
        is_head = head is not None and len(head) >= wanted
        directions = random_rows(min(wanted, dimension - 1), dimension)
        if head is not None and is_head:
            directions = head if public else head - head.mean(1, keepdim=True)
    else:
        return PublicMap(None, centre), ""
    if is_head:
        if public and directions.shape[1] != len(centre if centre is not None else ()):
            raise ConfigError(
                f"features.projection = {file or AUTO!r} has {directions.shape[1]} columns; "
                "features in fedpft.public have another number"
            )
        # What all classes share does not tell them apart.
        directions = directions - directions.mean(0)
        directions = (
            whitened(directions, raised(read_public(public), power))
            if public
            else leading(directions)
        )
    count = min(wanted, *directions.shape)
    rows = directions[:count]
    if config.plan.mean_over_columns:
        rows = with_own_parts(rows)
    made = PublicMap(unpack_projection(pack(rows.float())), centre)
    source = "the given file" if file else f"the head of {own.backbone}"
    if not file and not is_head:
        source = (
            f"random ones, because no head with so many classes was found for {own.backbone}; for "
            "features in files, `backbone` and `weights-path` name what made them"
        )
    return made, f"{count:,} of {directions.shape[1]:,} directions: {source}"


def with_digest(flat: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Settings of a run with the digest of its public map, where that is known before sites are asked.

    Args:
        flat: settings of the run.

    Raises:
        ConfigError: for a file that cannot be read, or does not hold what is needed.

    Example:
        >>> with_digest({"method": "fedpft"})
        {'method': 'fedpft'}
    """
    run = parse_run(flat)
    own = run.settings
    if own.fedpft.public:
        dimension = read_public(own.fedpft.public).shape[1]
    elif own.features.given_projection:
        dimension = _read(own.features.given_projection)[0].shape[1]
    else:
        # Of files at sites `data` says nothing.
        dimension = named_dimension("imagefolder", own.backbone, own.image_size)
    if not (run.maps and dimension) or own.features.digest:
        return dict(flat)
    return {**flat, "features.digest": public_digest(read_map(run, dimension))}


def random_rows(count: int, dimension: int) -> Tensor:
    """Orthonormal directions, drawn from a public seed among those without the mean of all columns.

    Features share much of that mean, above all those that are never negative; it would take most of
    a record's norm.

    Args:
        count: k, below d.
        dimension: d.

    Returns:
        Rows (k, d), float64.

    Example:
        >>> rows = random_rows(2, 5)
        >>> (rows @ rows.T).round(decimals=9).tolist(), bool((rows.sum(1).abs() < 1e-9).all())
        ([[1.0, 0.0], [0.0, 1.0]], True)
    """
    drawn = torch.randn(
        dimension, count, generator=stream(0, "", "projection"), dtype=torch.float64
    )
    columns = torch.cat([torch.ones(dimension, 1, dtype=torch.float64), drawn], 1)
    rows: Tensor = torch.linalg.qr(columns)[0][:, 1:].T
    return rows


def with_own_parts(rows: Tensor) -> Tensor:
    """Directions with those in which `weigh_mean_over_columns` keeps the mean over a feature's own columns and its
    length, in place of the last two: classes may differ in them alone.

    Args:
        rows: orthonormal, without the mean of all columns, (k, d); fewer than three stay as they are.

    Returns:
        Rows (k, d). The last two have the length that the others leave of a random direction.

    Example:
        >>> rows = with_own_parts(random_rows(3, 12))
        >>> (rows[1:, :3] * 12).round(decimals=6).tolist()
        [[1.732051, 1.732051, 1.732051], [1.732051, -1.732051, -1.732051]]
    """
    count, dimension = rows.shape
    if count < 3:
        return rows
    both = own_lines(dimension, KEPT).to(rows)
    apart = rows[:-2] - rows[:-2] @ both.T @ both
    return torch.cat([apart, both * math.sqrt(count / dimension)])


def whitened(head: Tensor, public: Tensor) -> Tensor:
    """The leading directions of a head for features whitened by those of public images.

    Each row is scaled with the root of its singular value: what tells more classes apart gets more
    of a record's norm.

    Args:
        head: weight, (C, d).
        public: features of public images, (n, d).

    Returns:
        Rows (k, d), whose largest entry has magnitude one.
    """
    d = public.shape[1]
    apart = public - public.mean(0)
    covariance = apart.T @ apart / len(apart)
    values, vectors = covariances.eigen(covariance)
    deviations = (values.clamp_min(0) + RIDGE * covariance.trace() / d).clamp_min(1e-12).sqrt()
    _, strengths, directions = torch.linalg.svd(head @ (vectors * deviations), full_matrices=False)
    rows: Tensor = (
        (strengths / strengths[0]).sqrt()[:, None] * (directions / deviations) @ vectors.T
    )
    return rows / rows.abs().max()


def leading(rows: Tensor) -> Tensor:
    """The right singular vectors of rows (n, d), the strongest first."""
    directions: Tensor = torch.linalg.svd(rows, full_matrices=False)[2]
    return directions


def _read(file: str) -> tuple[Tensor, bool]:
    """The matrix in a safetensors file, and whether it is a head."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(file).expanduser(), "pt") as content:
            held = content.keys()
            names = [name for name in (NAME, *HEADS) if name in held]
            directions = content.get_tensor(names[0]).double() if names else torch.zeros(0)
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, RuntimeError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"features.projection = {file!r}: no readable safetensors file ({error})"
        ) from None
    if directions.ndim != 2 or not directions.isfinite().all():
        raise ConfigError(
            f"features.projection = {file!r}: needs a finite matrix named {NAME}, or a head named "
            f"{', '.join(HEADS)}"
        )
    if CENTRE in held:
        raise ConfigError(
            f"features.projection = {file!r} has a tensor {CENTRE!r}, which fedsurrogate 0.2.0 was the last "
            f"to read; write the file without it, and name features of public images in fedpft.public"
        )
    return directions, names[0] != NAME


# In the memory of a training: the share of its weight that a site keeps, from its first round on.
SHARE = "share."


def check_charged(training: Training) -> None:
    """Raise RunError where the next round has been charged: with noise, each is released once."""
    if training.config.private and training.asked > training.round:
        raise RunError(
            f"round {training.round + 1} of this run failed, but is charged; start a new run, "
            "without resume"
        )


class RoundsOfSums(RoundsOfParameters):
    """Rounds of sums. A site's weight is capped by its records in the first round.

    Attributes:
        power: later, n records have the weight n ** power, in a private run.
    """

    power = 1.0

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        check_charged(training)
        return training

    def shapes(self, training: Training) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sums of the next round."""
        messages = self.config.plan.messages
        sizes = messages.sizes(len(training.classes), training.inputs, 1)
        fields = messages.schema(not training.round)
        shapes = {field.name: field.sizes(sizes) for field in fields}
        return {name: shape for name, shape in shapes.items() if math.prod(shape)}

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the rows of the sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other rows than the run's.
        """
        if reply.header.classes != training.classes:
            raise SurrogateError("sums of other rows than the run's, or in another order")

    @abstractmethod
    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of a site's records by kind, for the cap of its weight; None where a reply has
        none.
        """

    @abstractmethod
    def add(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> dict[str, object]:
        """Finish a round but for its number: change model and memory.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
            shares: of its weight that each site keeps.

        Returns:
            Facts for the round's event.

        Raises:
            RunError: for sums that no records have, or from which nothing can be learned.
        """

    def defend(self, training: Training, replies: Sequence[Parameters]) -> Defended[Parameters]:
        """Cap weights by records, and without noise by second moments.

        Args:
            training: before the round.
            replies: checked sums, sorted by site.
        """
        shares = self._shares(training.memory, replies)
        return Defended(list(replies), below_one(replies, shares))

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Add the sums of all sites, and finish the round.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
        """
        shares = self._shares(training.memory, replies)
        names = [each.header.site for each in replies]
        facts = self.add(training, replies, shares)
        kept = {
            SHARE + name: torch.tensor([share], dtype=torch.float64)
            for name, share in zip(names, shares, strict=True)
        }
        training.memory = {**training.memory, **kept}
        training.finish_round(names)
        return facts

    def _shares(self, memory: Mapping[str, Tensor], replies: Sequence[Parameters]) -> list[float]:
        """The share of its weight that each site keeps: by this round's records, or an earlier
        one's.
        """
        own = self.config
        rows = [counts for each in replies if (counts := self.counts(each)) is not None]
        if len(rows) == len(replies):
            power = self.power if own.private else 1.0
            shares = shares_kept(rows, own.settings.max_share, power)
        else:
            first = (memory.get(SHARE + each.header.site) for each in replies)
            shares = [1.0 if share is None else float(share) for share in first]
        if own.private:
            return shares
        moments = moment_shares([each.tensors for each in replies], own.settings.max_share)
        return list(map(operator.mul, shares, moments))
