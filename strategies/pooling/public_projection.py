"""The public map of a secure sum: fewer dimensions mean less noise. It must not depend on any
site's data.

The leading directions of a backbone's own classification head tell its classes apart. Projecting to
them costs little accuracy, and the noise on the second moment falls with the dimension. With public
images, directions are those of whitened features, so that no direction of large variance takes most
of a record's norm.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.common.backbones.feature_power import raised
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_sum.of_run import dimensions_of
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.wire.float16 import pack
from fedsurrogate.common.wire.surrogate_proto import unpack_projection
from fedsurrogate.strategies.pooling.public_mean import read_centre, read_public

NAME = "projection"
# Names that classification heads have in the weights of torchvision and timm models.
HEADS = (
    "fc.weight",
    "classifier.1.weight",
    "classifier.weight",
    "head.weight",
    "heads.head.weight",
    "head.fc.weight",
)
# Part of the mean variance that is added to every variance of public images: directions that they
# do not have stay small.
RIDGE = 0.1


def read_map(config: Run) -> PublicMap:
    """The run's map, rounded as in transfer to sites.

    Args:
        config: features.projection has a matrix or a known head, and fedpft.public has public
            features, whose mean is the centre.

    Raises:
        ConfigError: for a file that does not hold what is needed.
    """
    public, power = config.settings.fedpft.public, config.power
    centre = read_centre(public, power)
    file = config.settings.features.projection
    if not file:
        return PublicMap(None, centre)
    directions, is_head = _read(file)
    if is_head:
        if public and directions.shape[1] != len(centre if centre is not None else ()):
            raise ConfigError(
                f"features.projection = {file!r} has {directions.shape[1]} columns; features in "
                "fedpft.public have another number"
            )
        # What all classes share does not tell them apart.
        directions = directions - directions.mean(0)
        directions = (
            whitened(directions, raised(read_public(public), power))
            if public
            else _leading(directions)
        )
    own = config.settings
    dimensions = min(
        dimensions_of(own.features, own.colluding, config.mechanism), *directions.shape
    )
    return PublicMap(unpack_projection(pack(directions[:dimensions].float())), centre)


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


def _leading(head: Tensor) -> Tensor:
    directions: Tensor = torch.linalg.svd(head, full_matrices=False)[2]
    return directions


def _read(file: str) -> tuple[Tensor, bool]:
    """The matrix in a file, and whether it is a head."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(file).expanduser(), "pt") as content:
            names = [name for name in (NAME, *HEADS) if name in content.keys()]  # noqa: SIM118
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
    return directions, names[0] != NAME
