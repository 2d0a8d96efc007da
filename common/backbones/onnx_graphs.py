"""A backbone in an ONNX file, run by onnxruntime."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackboneError
from ..extras import needed_for
from .networks import LoadedNetwork, NetworkRequest
from .preprocessing import Preprocessing
from .weight_files import first_sentence


class OnnxGraph(nn.Module):
    """A graph from images (b, 3, height, width) to one of its outputs."""

    def __init__(self, file: Path, tokens: bool) -> None:
        """Read a graph.

        Args:
            file: of the graph.
            tokens: whether an output of tokens (b, t, d) is wanted, not one of features (b, d).

        Raises:
            BackboneError: for a file that is no graph, or has another form.
            PackageError: without onnxruntime.
        """
        super().__init__()
        with needed_for(f"backbone = 'onnx:{file}'"):
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")
        there = [name for name in wanted if name in onnxruntime.get_available_providers()]
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=there)
        except Exception as error:
            # Its errors are classes of several kinds, all of them of Exception alone.
            raise BackboneError(
                f"backbone = 'onnx:{file}' cannot be read ({first_sentence(error)})"
            ) from error
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        shape = list(inputs[0].shape) if inputs else []
        if (
            len(inputs) != 1
            or len(shape) != 4
            or inputs[0].type != "tensor(float)"
            or shape[1] != 3
        ):
            found = "; ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
            raise BackboneError(
                f"'{file}' takes {found or 'nothing'}; a backbone takes one tensor(float) of images (batch, "
                "3, height, width)"
            )
        rank = 3 if tokens else 2
        fit = [each.name for each in outputs if len(each.shape) == rank]
        if len(fit) != 1:
            found = "; ".join(f"{each.name} {each.shape}" for each in outputs)
            raise BackboneError(
                f"'{file}' returns {found}: {len(fit)} outputs of {rank} dimensions; export it with one output "
                "of features (batch, d), or with one of tokens (batch, tokens, d), and set features.pooling"
            )
        self._names = inputs[0].name, fit[0]
        # A whole number where the graph fixes it.
        self._batch = shape[0] if isinstance(shape[0], int) else 0
        if self._batch > 1:
            raise BackboneError(
                f"'{file}' takes {self._batch} images at once; export it with one, or any number"
            )
        self.sides = tuple(each if isinstance(each, int) else 0 for each in shape[2:])

    def forward(self, images: Tensor) -> Tensor:
        """The output for images (b, 3, height, width).

        Raises:
            RuntimeError: for images that the graph cannot take.
        """
        parts = torch.split(images, 1) if self._batch else [images]
        return torch.cat([self._output(part.float().cpu().contiguous()) for part in parts])

    def _output(self, images: Tensor) -> Tensor:
        given, wanted = self._names
        try:
            found: Any = self._session.run([wanted], {given: images.numpy()})[0]
        except Exception as error:
            raise RuntimeError(first_sentence(error)) from error
        return torch.from_numpy(found)


def onnx_network(request: NetworkRequest) -> LoadedNetwork:
    """A network in an ONNX file. Raises BackboneError, PackageError."""
    file, options = request.files.weights, request.options
    assert file is not None
    network = OnnxGraph(file, tokens=bool(options.pooling))
    if not options.mean or not options.std:
        raise BackboneError(
            f"'{file}' does not say how its images are normalised; set features.mean and features.std, such "
            "as '0.485,0.456,0.406' and '0.229,0.224,0.225', or '0,0,0' and '1,1,1' for images in 0 to 1"
        )
    height, width = network.sides
    size = request.image_size or height
    if height != width or (height and size != height) or not size:
        taken = f"{height} x {width} px" if height and width else "any size"
        raise BackboneError(
            f"'{file}' takes images of {taken}; image-size = {request.image_size} must be the side of the "
            "square images that it takes"
        )
    identity = "onnx", _digest(file), options.pooling
    made = network, Preprocessing(size, size)
    # The first token of those that exporters write is the class token.
    return LoadedNetwork(*made, identity=identity, pooling=options.pooling, tokens=1)


def _digest(file: Path) -> str:
    """Digest of a graph and of the files in which it keeps its weights."""
    with needed_for(f"backbone = 'onnx:{file}'"):
        import onnx

    graph = onnx.load(str(file), load_external_data=False).graph
    places = {
        entry.value
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    digest = hashlib.sha256()
    for each in (file, *(file.parent / place for place in sorted(places))):
        with each.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
