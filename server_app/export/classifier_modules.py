"""Classifiers as modules whose tensors are buffers, so that they can be written as graphs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from fedsurrogate.common.models.networks import build
from fedsurrogate.common.surrogates.columns import Frame
from fedsurrogate.common.surrogates.surrogates import Header


def module_of(classifier: Classifier) -> nn.Module:
    """A classifier as a module from features (n, d) to logits (n, C).

    Args:
        classifier: a linear head, an ensemble of them, quadratic discriminants, or a network.

    Returns:
        The module.

    Raises:
        ConfigError: for a classifier that no graph can hold.

    Example:
        >>> from fedsurrogate.common.surrogates.surrogates import Header
        >>> header = Header("fedpft", "", "north", "features", ("benign", "malignant"))
        >>> head = Head(header, torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0.5, 0.0]))
        >>> module_of(head)(torch.tensor([[1.0, 1.0]])).tolist()
        [[1.5, 2.0]]
    """
    if classifier.header.frame:
        plain = replace(classifier.header, frame=b"")
        frame = Frame.of(classifier.header.frame)
        return InFrame(frame, module_of(_with_header(classifier, plain)))
    match classifier:
        case Head():
            return LinearHead(classifier)
        case Ensemble():
            return MeanOfHeads(classifier)
        case Quadratic():
            return Discriminants(classifier)
        case Network():
            module = build(
                classifier.kind,
                classifier.inputs,
                len(classifier.header.classes),
                classifier.tensors,
            )
            module.load_state_dict(dict(classifier.tensors), strict=False)
            return module
    raise ConfigError(f"a model of kind {type(classifier).__name__} cannot be written as a graph")


def _with_header(classifier: Classifier, header: Header) -> Classifier:
    if isinstance(classifier, Ensemble):
        return Ensemble(tuple(replace(head, header=header) for head in classifier.heads))
    if isinstance(classifier, Head | Quadratic | Network):
        return replace(classifier, header=header)
    return classifier


class InFrame(nn.Module):
    """A classifier whose features are put into a frame first.

    Args:
        frame: of the columns.
        inner: the classifier of features in the frame.

    Attributes:
        offset: (d,), subtracted first.
        divisor: (d,), divides then.
    """

    offset: Tensor
    divisor: Tensor

    def __init__(self, frame: Frame, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("offset", frame.offset.float())
        self.register_buffer("divisor", frame.divisor.float())

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, C)."""
        logits: Tensor = self.inner((features - self.offset) / self.divisor)
        return logits


class LinearHead(nn.Module):
    """A linear head, with its centre, its projection and its clip.

    Args:
        head: the head.

    Attributes:
        weight: (C, d), or (C, k) with a projection to k dimensions.
        bias: (C,).
        centre: (d,), subtracted from features first; zero for a head without one.
        projection: (k, d); None without one.
        clip: features x are divided by max(|x|, clip) after the projection; None without a clip.
        without_mean: whether the mean over a feature's own columns is subtracted from it first.
    """

    weight: Tensor
    bias: Tensor
    centre: Tensor
    projection: Tensor | None

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.clip, self.without_mean = head.clip, head.without_mean
        centre = torch.zeros(head.dimension) if head.centre is None else head.centre
        for name, tensor in (("weight", head.weight), ("bias", head.bias), ("centre", centre)):
            self.register_buffer(name, tensor.float().clone())
        self.register_buffer(
            "projection", None if head.projection is None else head.projection.float().clone()
        )

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, C)."""
        if self.without_mean:
            features = features - features.double().mean(1, keepdim=True).float()
        features = features - self.centre
        if self.projection is not None:
            features = features @ self.projection.T
        if self.clip is not None:
            # Double precision, as in `clip` of fedsurrogate.common.privacy.gaussian_mechanism.
            norms = torch.linalg.vector_norm(features.double(), dim=1, keepdim=True)
            features = (features.double() / norms.clamp_min(max(self.clip, 1e-30))).float()
        return torch.nn.functional.linear(features, self.weight, self.bias)


class MeanOfHeads(nn.Module):
    """The logarithm of the mean of the heads' probabilities."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.heads = nn.ModuleList(LinearHead(head) for head in ensemble.heads)

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, C)."""
        return (
            torch.stack([head(features).softmax(1) for head in self.heads])
            .mean(0)
            .clamp_min(1e-30)
            .log()
        )


class Discriminants(nn.Module):
    """Quadratic discriminants.

    Args:
        model: the classifier.

    Attributes:
        means: mean of each class, (C, d).
        whiteners: of each class, a matrix (C, d, d), or a factor for each dimension, (C, d).
        bias: (C,).
    """

    means: Tensor
    whiteners: Tensor
    bias: Tensor

    def __init__(self, model: Quadratic) -> None:
        super().__init__()
        for name, tensor in model.arrays().items():
            self.register_buffer(name, tensor.float().clone())

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, C)."""
        apart = features[:, None] - self.means[None]
        white = (
            apart * self.whiteners
            if self.whiteners.ndim == 2
            else torch.einsum("ncd,ced->nce", apart, self.whiteners)
        )
        return self.bias - white.square().sum(2) / 2
