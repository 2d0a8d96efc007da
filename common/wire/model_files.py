"""The learned model of a run as the file `model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from common.backbones.feature_power import power_in
from common.errors import ConfigError, SurrogateError
from common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from common.settings import Model
from common.surrogates.surrogates import Header


def save_model(model: Classifier, path: Path) -> None:
    """Write a model as 32-bit safetensors, with its classes and backbone fingerprint in the
    metadata.

    If the metadata has `power`, features x must first become sign(x) |x|^power. If it has
    `clip`, they must then be divided by max(|x|, clip). If there is a tensor `centre`, it must be
    subtracted before the clip; and with a tensor `projection` (k, d), features are then multiplied
    by it. A linear head has `weight` (C, d) and `bias` (C,); an ensemble of M heads has (M, C, d)
    and (M, C). Quadratic discriminants have `means`, `whiteners` and `bias`. A network has `kind`
    and `inputs` in the metadata; see common/models/networks.py.

    Args:
        model: that was learned.
        path: of the file.
    """
    from safetensors.torch import save_file

    form, tensors = file_content(model)
    header = {"classes": json.dumps(model.header.classes), "fingerprint": model.header.fingerprint}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, header | form)


def file_content(model: Classifier) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file holds of a model.

    Args:
        model: that was learned.

    Returns:
        Metadata about the form of the model, and its tensors by name.
    """
    metadata = {}
    if (power := power_in(model.header.fingerprint)) != 1:
        metadata["power"] = f"{power:g}"
    if isinstance(model, Head) and model.clip is not None:
        metadata["clip"] = f"{model.clip:g}"
    if isinstance(model, Network):
        metadata |= {"kind": model.kind, "inputs": str(model.inputs)}
    return metadata, model.arrays()


def load_model(path: Path) -> Classifier:
    """Read a file of `save_model`.

    Args:
        path: of the file.

    Raises:
        SurrogateError: for another file, or tensors that do not fit together.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SurrogateError(
            f"'{path}' is not a readable model ({error}); give a model.safetensors of a run"
        ) from error
    try:
        return classifier_of(metadata, tensors)
    except (KeyError, ValueError, RuntimeError, ConfigError) as error:
        raise SurrogateError(
            f"'{path}' is no model of a run: {error}; give a model.safetensors of a run"
        ) from error


def classifier_of(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Classifier:
    """The classifier of a file.

    Args:
        metadata: as `file_content` gives it, with `classes` as JSON and `fingerprint`.
        tensors: by name.

    Raises:
        KeyError: for a missing part.
        ValueError: for parts that do not fit.
        RuntimeError: for parts that do not fit.
        ConfigError: for parts that do not fit.
    """
    classes = json.loads(metadata["classes"])
    header = Header(
        "", "", "coordinator", metadata.get("fingerprint", ""), tuple(map(str, classes))
    )
    if "kind" in metadata:
        kind, inputs = TypeAdapter(Model).validate_python(metadata["kind"]), int(metadata["inputs"])
        network = Network(header, kind, inputs, tensors)
        network.scores(torch.zeros(1, inputs))
        return network
    if "whiteners" in tensors:
        quadratic = Quadratic(header, tensors["means"], tensors["whiteners"], tensors["bias"])
        if quadratic.scores(torch.zeros(1, quadratic.dimension)).shape != (1, len(classes)):
            shape = tuple(quadratic.whiteners.shape)
            raise ValueError(f"discriminants of shape {shape} for {len(classes)} classes")
        return quadratic
    clip = float(metadata["clip"]) if "clip" in metadata else None
    weight, bias, centre = tensors["weight"], tensors["bias"], tensors.get("centre")
    if (
        weight.shape[:-1] != bias.shape
        or weight.shape[-2] != len(classes)
        or weight.ndim not in (2, 3)
    ):
        raise ValueError(
            f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} for {len(classes)} classes"
        )
    if weight.ndim == 2:
        head = Head(header, weight, bias, clip, centre, tensors.get("projection"))
        head.scores(torch.zeros(1, head.dimension))
        return head
    return Ensemble(tuple(Head(header, w, b) for w, b in zip(weight, bias, strict=True)))
