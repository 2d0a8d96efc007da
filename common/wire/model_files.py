"""What a run has learned, as the safetensors file `model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from common.models.classifiers import Classifier, Ensemble, Head, Network


def save_model(model: Classifier, path: Path) -> None:
    """Write a model as 32-bit safetensors, its classes and backbone fingerprint in the file's metadata.

    A linear head is `weight` (C, d) and `bias` (C,); an ensemble of M heads has both once more, (M, C, d) and (M, C). With
    `clip` in the metadata features x are divided by max(|x|, clip) before they are multiplied; with a tensor `centre` that
    is subtracted before. A network has `kind` and `inputs` in the metadata; see common/models/networks.py.
    """
    from safetensors.torch import save_file

    metadata = {"classes": json.dumps(model.header.classes), "fingerprint": model.header.fingerprint}
    tensors: dict[str, Tensor] = {}
    match model:
        case Head():
            tensors = {"weight": model.weight, "bias": model.bias}
            if model.centre is not None:
                tensors["centre"] = model.centre
            if model.clip is not None:
                metadata["clip"] = f"{model.clip:g}"
        case Ensemble():
            tensors = {name: torch.stack([getattr(head, name) for head in model.heads]) for name in ("weight", "bias")}
        case Network():
            tensors = dict(model.tensors)
            metadata |= {"kind": model.kind, "inputs": str(model.inputs)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
