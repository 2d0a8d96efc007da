"""What a library is asked for, and the network that it builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..errors import BackboneError
from .preprocessing import Preprocessing
from .weight_files import Files, Weights

if TYPE_CHECKING:
    from ..settings.heads import FeaturesSettings

Pooling = Literal["", "cls", "mean", "both"]


@dataclass(frozen=True)
class BackboneOptions:
    """What a run states of a backbone, and a site allows.

    Attributes:
        mean: of each channel, in place of what the files say; empty for that.
        std: likewise.
        pooling: of the tokens of an image: the class token, the mean of the patches, or both one
            after the other; empty for what the files say.
        download: whether weights that are not on this machine may be fetched.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pooling: Pooling = ""
    download: bool = True


USUAL = BackboneOptions()


def options_of(features: FeaturesSettings, download: bool = True) -> BackboneOptions:
    """What a run states of its backbone.

    Args:
        features: settings of the run.
        download: whether weights that are not here may be fetched.
    """
    pooling = "" if features.pooling == "auto" else features.pooling
    return BackboneOptions(features.mean, features.std, pooling, download)


@dataclass(frozen=True)
class NetworkRequest:
    """A network that a library is asked for.

    Attributes:
        model: its name behind the library's.
        files: on this machine.
        weights: tensors of the file; empty where the library fetches its own.
        image_size: side of the images in pixels; 0 for the network's own.
        options: of the run and the site.
    """

    model: str
    files: Files = field(default_factory=Files)
    weights: Weights = field(default_factory=dict)
    image_size: int = 0
    options: BackboneOptions = USUAL


@dataclass(frozen=True, eq=False)
class LoadedNetwork:
    """A model without its classifier, and its preprocessing.

    Attributes:
        model: the network.
        preprocessing: of its images.
        head: beginnings of the names of its classifier in a file of weights.
        convert: weights of another form into the model's.
        identity: what decides features besides weights and preprocessing; None for the name alone.
        pooling: of the tokens that the model returns; empty where it returns features.
        tokens: number of these before those of the patches.
    """

    model: nn.Module
    preprocessing: Preprocessing
    head: tuple[str, ...] = ()
    convert: Callable[[dict[str, Tensor]], Weights] | None = None
    identity: object = None
    pooling: Pooling = ""
    tokens: int = 0


class Pooled(nn.Module):
    """A network that returns tokens, (b, t, d), with their pooling."""

    def __init__(self, network: nn.Module, pooling: Pooling, before: int) -> None:
        """See the class.

        Args:
            network: returns the tokens.
            pooling: one of `BackboneOptions`, not empty.
            before: tokens before those of the patches; the first is the class token.

        Raises:
            BackboneError: for the class token of a network without one.
        """
        super().__init__()
        if pooling != "mean" and not before:
            raise BackboneError(
                f"features.pooling = {pooling!r}: the backbone has no class token; set 'mean'"
            )
        self.network, self.pooling, self.before = network, pooling, before

    def forward(self, images: Tensor) -> Tensor:
        """Features (b, d), or (b, 2 d) of both, of images (b, 3, height, width)."""
        tokens: Tensor = self.network(images)
        if self.pooling == "cls":
            return tokens[:, 0]
        mean = tokens[:, self.before :].mean(1)
        return mean if self.pooling == "mean" else torch.cat([tokens[:, 0], mean], 1)
