"""The public centre: the mean feature of public images. Sites subtract it before they clip for
privacy.

Without it, the part that all features share takes most of their unit norm. The centre must not
depend on any site's data, because it would disclose information about them.

The public map of a secure sum: fewer dimensions mean less noise. It must not depend on any
site's data.

The leading directions of a backbone's own classification head tell its classes apart. Projecting to
them costs little accuracy, and the noise on the second moment falls with the dimension. With public
images, directions are those of whitened features, so that no direction of large variance takes most
of a record's norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.common.backbones.dimensions import named_dimension
from fedsurrogate.common.backbones.feature_power import raised
from fedsurrogate.common.backbones.own_heads import HEADS, own_head
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.methods.logistic_rounds import LOGISTIC
from fedsurrogate.common.privacy.own_mean import KEPT
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_sum.rules import dimensions_of, projected_dimensions
from fedsurrogate.common.settings.features import AUTO
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.surrogates.columns import PublicMap
from fedsurrogate.common.wire.sum_proto import public_digest
from fedsurrogate.common.wire.surrogate_proto import (
    pack_centre,
    unpack_centre,
    unpack_projection,
)
from fedsurrogate.common.wire.tensors import pack


def read_centre(file: str, power: float = 1.0) -> Tensor | None:
    """The public centre in a safetensors file, rounded as in transfer to sites.

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


NAME, CENTRE, POWER = "projection", "centre", "power"
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
        directions, is_head, of_file = _read(file, power)
        centre = of_file if centre is None else centre
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
    # Rounds subtract a mean first, so that an offset that records share takes none of their norm.
    if own.head.solver == LOGISTIC and not (file or public):
        rows = with_own_mean(rows)
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
        dimension = _read(own.features.given_projection, run.power)[0].shape[1]
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


def with_own_mean(rows: Tensor) -> Tensor:
    """Directions without the mean of all columns, and with it at a small weight in place of the last:
    classes may differ in it alone.

    Args:
        rows: orthonormal, (k, d); a single one stays as it is.

    Returns:
        Rows (k, d). The last has KEPT.mean times the length that others leave of a random direction.

    Example:
        >>> with_own_mean(random_rows(2, 4))[1].tolist()
        [0.03535533905932738, 0.03535533905932738, 0.03535533905932738, 0.03535533905932738]
    """
    count, dimension = rows.shape
    if count < 2:
        return rows
    weight = KEPT.mean * math.sqrt(count / dimension) / math.sqrt(dimension)
    return torch.cat([rows[:-1], torch.full_like(rows[-1:], weight)])


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
    values, vectors = torch.linalg.eigh(covariance)
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


def _read(file: str, power: float) -> tuple[Tensor, bool, Tensor | None]:
    """The matrix in a file, whether it is a head, and the centre in it.

    Args:
        file: safetensors.
        power: of the run's features, which that of a map with a centre must equal.
    """
    from safetensors import SafetensorError, safe_open

    centre = None
    try:
        with safe_open(Path(file).expanduser(), "pt") as content:
            held = content.keys()
            names = [name for name in (NAME, *HEADS) if name in held]
            directions = content.get_tensor(names[0]).double() if names else torch.zeros(0)
            made_for = (content.metadata() or {}).get(POWER, "")
            if names[:1] == [NAME] and CENTRE in held:
                centre = unpack_centre(pack_centre(content.get_tensor(CENTRE)))
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, RuntimeError, TypeError, SafetensorError, SurrogateError) as error:
        raise ConfigError(
            f"features.projection = {file!r}: no readable safetensors file ({error})"
        ) from None
    if directions.ndim != 2 or not directions.isfinite().all():
        raise ConfigError(
            f"features.projection = {file!r}: needs a finite matrix named {NAME}, or a head named "
            f"{', '.join(HEADS)}"
        )
    if centre is not None and len(centre) != directions.shape[1]:
        raise ConfigError(
            f"features.projection = {file!r}: a centre of {len(centre)} dimensions, but a matrix "
            f"of {directions.shape[1]} columns"
        )
    if made_for and made_for != f"{power:g}":
        raise ConfigError(
            f"features.projection = {file!r} was made for features.power = {made_for}, and this run "
            f"has {power:g}; make it anew with coordinator public-map --power {power:g}"
        )
    return directions, names[0] != NAME, centre
