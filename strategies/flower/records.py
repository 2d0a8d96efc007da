"""Conversion of models and metrics to Flower's records."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Tensors

# The key under which Flower's strategies put the round number into every request.
ROUND_KEY = "server-round"


def arrays_of(tensors: Tensors) -> ArrayRecord:
    """Tensors as 32-bit arrays with the same names.

    Args:
        tensors: by name, of any shape.
    """
    arrays = {
        name: tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        for name, tensor in tensors.items()
    }
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def classifier_arrays(model: Classifier) -> ArrayRecord:
    """The arrays of a classifier.

    Args:
        model: any kind of classifier.

    Returns:
        A linear head has `weight` (C, d) and `bias` (C,). If it needs clipped features, it also has
        `clip` (), and if these are centred first, `centre` (d,). An ensemble of M heads has
        `weight` (M, C, d) and `bias` (M, C). A network has its own parameters.
    """
    tensors = model.arrays()
    if isinstance(model, Head) and model.clip is not None:
        tensors["clip"] = torch.tensor(model.clip)
    return arrays_of(tensors)


def tensors_like(model: Tensors, arrays: ArrayRecord) -> dict[str, Tensor]:
    """The arrays of a model as 32-bit tensors.

    Args:
        model: with the names and shapes that the arrays must have.
        arrays: of the model; may be empty.

    Returns:
        The arrays as tensors; `model` if there are none.

    Raises:
        ConfigError: for other names or shapes, or values that are not finite.

    Example:
        >>> model = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
        >>> arrays = arrays_of({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        >>> tensors_like(model, arrays)["bias"].tolist()
        [1.0, 1.0]
        >>> tensors_like(model, ArrayRecord())["bias"].tolist()
        [0.0, 0.0]
    """
    if not arrays:
        return dict(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.items()}
    given = {name: tuple(array.shape) for name, array in arrays.items()}
    if given != wanted:
        wrong = ", ".join(
            f"{name} {shape}" for name, shape in sorted(given.items() ^ wanted.items())[:4]
        )
        raise ConfigError(
            f"arrays with other names or shapes than the model: {wrong}; leave the arrays out, or "
            "pass those of a Result"
        )
    tensors = {
        name: torch.from_numpy(array.numpy().copy()).to(torch.float32)
        for name, array in arrays.items()
    }
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ConfigError(
            "arrays with values that are not finite; leave the arrays out, or pass those of a "
            "Result"
        )
    return tensors


def metrics_of(facts: Mapping[str, object]) -> MetricRecord:
    """The numeric facts as a MetricRecord.

    Args:
        facts: by name; those that are no numbers are left out.
    """
    return MetricRecord(
        {name: value for name, value in facts.items() if type(value) in (int, float)}  # type: ignore[misc]
    )


def check_no_settings(config: ConfigRecord | None, name: str) -> None:
    """Check that a message has no settings: a site takes its settings only from the run-config.

    Args:
        config: of the message.
        name: of the argument that it was, for the error.

    Raises:
        ConfigError: for settings in the message.
    """
    if extra := sorted(set(config or ()) - {ROUND_KEY}):
        raise ConfigError(
            f"{name} has {', '.join(extra)[:200]}: sites take no settings from a message; set them "
            "in the app's run-config"
        )
