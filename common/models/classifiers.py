"""Classifiers, the result of a run: a linear head, an ensemble of heads, quadratic discriminants,
or a small network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ConfigError, SurrogateError
from ..privacy.gaussian_mechanism import clip_rows, weigh_mean_over_columns
from ..privacy.shares import ALL, OwnParts
from ..surrogates.mixtures import in_frame
from .networks import build, check_parameters, run_network

if TYPE_CHECKING:
    from ..settings import Model
    from ..surrogates.surrogates import Header


class Classifier(ABC):
    """Base of all classifiers: scores of features (n, d) for the classes of a header."""

    header: Header

    @abstractmethod
    def scores(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d)."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Dimension of its input features."""

    @abstractmethod
    def arrays(self) -> dict[str, Tensor]:
        """Its tensors by name, as files and Flower's records contain them."""

    def predict(self, features: Tensor) -> Tensor:
        """Class index of each record.

        Args:
            features: (n, d).

        Returns:
            Indices (n,) into the classes of the header.
        """
        return self.scores(features).argmax(1)

    def accuracy(self, features: Tensor, names: Sequence[str], labels: Tensor) -> tuple[int, int]:
        """Number of correct predictions. A class that this model does not know counts as wrong.

        Args:
            features: (n, d).
            names: of classes; the true class of record i is `names[labels[i]]`.
            labels: (n,).

        Returns:
            The number of correct predictions, and n.
        """
        truth = class_indices(self.header.classes, names)[labels.cpu()]
        return int((self.predict(features).cpu() == truth).sum()), len(labels)

    def plane(self) -> Tensor | None:
        """The two directions (d, 2) in feature space that separate the classes most; None if
        undefined.
        """
        return None

    def prepare(self, features: Tensor) -> Tensor:
        """Features (n, d) in the form that this model needs."""
        return self.framed(features)

    def framed(self, features: Tensor) -> Tensor:
        """Features (n, d) in the frame of the columns in which the model was learned."""
        return in_frame(features, self.header.frame)

    def check_frame(self) -> None:
        """Raise SurrogateError for a frame of other columns than those of the model."""
        if self.header.frame:
            self.framed(torch.zeros(1, self.dimension))


@dataclass(frozen=True)
class Head(Classifier):
    """A linear classifier: logits = x @ weight.T + bias.

    Features are first changed as those that the head was learned from: put into the header's frame,
    with a smaller mean of their own columns, centred, projected and clipped, in this order.

    Attributes:
        header: origin, with the classes.
        weight: (C, d), rows as in header.classes; (C, k) with a projection.
        bias: (C,).
        clip: features x are divided by max(|x|, clip); None if they are not.
        centre: (d,), subtracted from features; None if there is none.
        projection: (k, d), features become projection @ x; None if there is none.
        target: what the scores mean where they are not of classes, as JSON; empty for classes.
        mean_over_columns: what features keep of their mean over columns and of their length, see `weigh_mean_over_columns`.

    Example:
        >>> from fedsurrogate.common.surrogates.surrogates import Header
        >>> header = Header("fedpft", "", "", "", ("benign", "malignant"))
        >>> head = Head(header, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 1.0]))
        >>> features = torch.tensor([[3.0, 1.0], [0.5, 0.5]])
        >>> head.scores(features).tolist(), head.predict(features).tolist()
        ([[3.0, 2.0], [0.5, 1.5]], [0, 1])
        >>> head.accuracy(features, ["benign", "malignant"], torch.tensor([0, 0]))
        (1, 2)
    """

    header: Header
    weight: Tensor
    bias: Tensor
    clip: float | None = None
    centre: Tensor | None = None
    projection: Tensor | None = None
    target: str = ""
    mean_over_columns: OwnParts = ALL

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return (self.weight if self.projection is None else self.projection).shape[1]

    def check_shapes(self) -> None:
        """Raise SurrogateError unless its tensors fit each other and the classes."""
        classes, columns = len(self.header.classes), _last(self.weight)
        inputs = columns if self.projection is None else _last(self.projection)
        wanted: dict[str, tuple[int, ...]] = {
            "weight": (classes, columns),
            "bias": (classes,),
            "projection": (columns, inputs),
            "centre": (inputs,),
        }
        _check(self.arrays(), wanted)

    def arrays(self) -> dict[str, Tensor]:
        """`weight` (C, d), `bias` (C,) and, if features are projected or centred, `projection`
        (k, d) and `centre` (d,).
        """
        tensors = {"weight": self.weight, "bias": self.bias}
        if self.projection is not None:
            tensors["projection"] = self.projection
        return tensors if self.centre is None else tensors | {"centre": self.centre}

    def prepare(self, features: Tensor) -> Tensor:
        """Features, changed as those that the head was learned from.

        Args:
            features: (n, d).

        Returns:
            Features (n, d); (n, k) with a projection.
        """
        features = weigh_mean_over_columns(
            self.framed(features.to(self.weight)), self.mean_over_columns
        )
        if self.centre is not None:
            features = features - self.centre.to(features)
        if self.projection is not None:
            features = features @ self.projection.to(features).T
        return features if self.clip is None else clip_rows(features, self.clip)

    def scores(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d)."""
        return self.scores_of_prepared(self.prepare(features))

    def scores_of_prepared(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d) that `prepare` has changed, in their precision."""
        return features @ self.weight.to(features).T + self.bias.to(features)

    def plane(self) -> Tensor:
        """The two directions (d, 2) in feature space that separate this head's classes most."""
        _, _, directions = torch.linalg.svd(self.weight.double(), full_matrices=False)
        plane = torch.zeros(self.weight.shape[1], 2)
        count = min(2, len(directions))
        plane[:, :count] = directions[:count].T.float()
        # The sign of a singular vector is arbitrary. The largest entry is made positive, so that
        # all machines agree.
        signs = plane.gather(0, plane.abs().argmax(0, keepdim=True)).sign()
        return plane * torch.where(signs == 0, torch.ones_like(signs), signs)


@dataclass(frozen=True)
class Ensemble(Classifier):
    """An ensemble of heads.

    Attributes:
        heads: with the same classes in the same order.
        highest: whether a class has the highest probability that a head gives it, in place of the mean.
    """

    heads: tuple[Head, ...]
    highest: bool = False

    @property
    def header(self) -> Header:  # type: ignore[override]
        """The header of the first head."""
        return self.heads[0].header

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.heads[0].dimension

    def check_shapes(self) -> None:
        """Raise SurrogateError unless all heads are sound, for the same classes and features."""
        for head in self.heads:
            head.check_shapes()
        first = self.heads[0]
        if any(
            (head.header.classes, head.dimension) != (first.header.classes, first.dimension)
            for head in self.heads
        ):
            raise SurrogateError("an ensemble of heads of different classes or dimensions")

    def arrays(self) -> dict[str, Tensor]:
        """`weight` (M, C, d) and `bias` (M, C) of M heads."""
        return {
            name: torch.stack([getattr(head, name) for head in self.heads])
            for name in ("weight", "bias")
        }

    def scores(self, features: Tensor) -> Tensor:
        """Logarithms of the mean or of the highest probabilities (n, C)."""
        each = torch.stack([head.scores(features).softmax(1) for head in self.heads])
        return (each.amax(0) if self.highest else each.mean(0)).clamp_min(1e-30).log()


@dataclass(frozen=True)
class Quadratic(Classifier):
    """One Gaussian a class: logits = bias_c - |W_c (x - mean_c)|^2 / 2.

    Attributes:
        header: origin, with the classes.
        means: (C, d).
        whiteners: W, (C, d) if covariances are diagonal, otherwise (C, d, d).
        bias: (C,).
    """

    header: Header
    means: Tensor
    whiteners: Tensor
    bias: Tensor

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.means.shape[1]

    def check_shapes(self) -> None:
        """Raise SurrogateError unless its tensors fit each other and the classes."""
        classes, inputs = len(self.header.classes), _last(self.means)
        sides = (inputs,) * (2 if self.whiteners.ndim == 3 else 1)
        shapes = {"means": (classes, inputs), "whiteners": (classes, *sides), "bias": (classes,)}
        _check(self.arrays(), shapes)

    def arrays(self) -> dict[str, Tensor]:
        """`means` (C, d), `whiteners` (C, d) or (C, d, d), and `bias` (C,)."""
        return {"means": self.means, "whiteners": self.whiteners, "bias": self.bias}

    def scores(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d)."""
        features, columns = self.framed(features.to(self.means)), []
        for mean, whitener, bias in zip(self.means, self.whiteners, self.bias, strict=True):
            apart = features - mean
            white = apart * whitener if whitener.ndim == 1 else apart @ whitener.T
            columns.append(bias - white.square().sum(1) / 2)
        return torch.stack(columns, 1)


@dataclass(frozen=True)
class Network(Classifier):
    """A small network on features (n, d); for a convolutional one these are flat images.

    Attributes:
        header: origin, with the classes.
        kind: of the network.
        inputs: dimension of the features.
        tensors: parameters by name.
    """

    header: Header
    kind: Model
    inputs: int
    tensors: Mapping[str, Tensor]

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.inputs

    def check_shapes(self) -> None:
        """Raise SurrogateError unless its tensors are the parameters of a network of this kind."""
        check_parameters(self.kind, self.inputs, len(self.header.classes), self.tensors)

    def arrays(self) -> dict[str, Tensor]:
        """Its parameters."""
        return dict(self.tensors)

    def scores(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d), a thousand at a time."""
        module = build(self.kind, self.inputs, len(self.header.classes), self.tensors)
        features = self.framed(features)
        return torch.cat(
            [
                run_network(module, self.tensors, rows.float())
                for rows in torch.split(features, 1000)
            ]
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch, with which a result does not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def alone(rows: Tensor) -> list[Tensor]:
    """Each row as a batch of its own, so that what is computed from it depends on no other row.

    In a batch, other rows change the last digits: a kernel takes the rows at an edge, and those
    that are left over, in another way, and adds up a product in an order that the shape decides.
    Which, is of the processor. Alone, every row has the same shape and the same place in memory.

    Args:
        rows: (n, ...).

    Returns:
        n tensors (1, ...) in memory of their own; without rows the empty batch.
    """
    return [row[None].clone() for row in rows] or [rows]


@one_thread()
def scores_alone(model: Classifier, features: Tensor) -> Tensor:
    """Logits for what is counted, stored or compared with a stored number: those of a record depend on
    no other record (see `alone`), and not on the number of cores.

    Args:
        model: the classifier.
        features: of the records, (n, d).

    Returns:
        Logits (n, C), float64.
    """
    with torch.no_grad():
        return torch.cat([model.scores(row).double().cpu() for row in alone(features)])


def target_of_model(model: Classifier) -> str:
    """What the scores of a model mean where they are not of classes, as JSON; empty for classes."""
    return str(getattr(model, "target", ""))


def check_of_classes(model: Classifier, what: str) -> None:
    """Refuse a model that answers another target than classes.

    Args:
        model: to use.
        what: is about to be done, which is defined for classes only.

    Raises:
        ConfigError: for another model.
    """
    if target_of_model(model):
        raise ConfigError(
            f"{what} is for models of classes; this one answers {', '.join(model.header.classes)[:200]}"
        )


def _last(tensor: Tensor) -> int:
    """The last side of a tensor of any rank; 0 for a number."""
    return tensor.shape[-1] if tensor.ndim else 0


def _check(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise SurrogateError for a tensor of another shape, or without a number."""
    for name, tensor in tensors.items():
        if (shape := tuple(tensor.shape)) != wanted[name] or not tensor.numel():
            raise SurrogateError(f"{name} of shape {shape[:4]}, expected {wanted[name]}")


def class_indices(wanted: Sequence[str], names: Sequence[str]) -> Tensor:
    """The indices of class names.

    Args:
        wanted: in whose order the classes are numbered.
        names: of classes.

    Returns:
        The index in `wanted` of each of `names`, -1 for missing ones, (len(names),), int64.

    Example:
        >>> class_indices(["benign", "malignant"], ["malignant", "normal"]).tolist()
        [1, -1]
    """
    known = {name: index for index, name in enumerate(wanted)}
    return torch.tensor([known.get(name, -1) for name in names], dtype=torch.int64)
