"""Normalisation, backbone and head of a run as one module, written as ONNX."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsurrogate.common.backbones.backbones import load_backbone, load_network
from fedsurrogate.common.backbones.networks import options_of
from fedsurrogate.common.backbones.power_transform import power_in, raised, with_power
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.errors import BackboneError, ConfigError, RunError
from fedsurrogate.common.extras import EXTRAS, check_installed, needed_for
from fedsurrogate.common.models.classifiers import (
    Classifier,
    Ensemble,
    Head,
    Network,
    target_of_model,
)
from fedsurrogate.common.models.networks import build
from fedsurrogate.common.privacy.gaussian_mechanism import weigh_rows
from fedsurrogate.common.privacy.shares import ALL
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    SignedModel,
    read_signed_model,
    settings_of_run,
    signed_from_run,
)
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.targets.metrics import answer_columns, answers_together

from ..deployment.request_key import read_request_key, signing_key
from ..refit import learned_again

# Largest difference of an answer between the written graph and this process: of a probability, or as
# a share of the largest number in its column, if that is above one.
TOLERANCE = 1e-4
CHECKED = 5
ONNX = "onnx"
PACKAGES = tuple(package for package, extra in EXTRAS.items() if extra == ONNX)
# An ONNX file is a protobuf message, which ends at 2 GiB; the weights of a larger graph get a file
# of their own.
ONE_FILE = 1_900_000_000


class InferenceModel(nn.Module):
    """Images (n, 3, height, width), RGB as bytes, to what the model answers, (n, k).

    Of classes these are the probabilities (n, C); of another target the columns of `site predict`.

    The images have the size of the backbone's preprocessing; the model card says how to resize them
    with Pillow.

    Args:
        backbone: from normalised images to features (n, d).
        preprocessing: of the backbone.
        classifier: from features to classes.
        power: of the features, before the classifier.

    Attributes:
        columns: names of the k answers.
        mean: of the channels, (1, 3, 1, 1), subtracted from images in [0, 1].
        std: of the channels, (1, 3, 1, 1), by which they are divided.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        preprocessing: Preprocessing,
        classifier: Classifier,
        power: float,
    ) -> None:
        super().__init__()
        self.backbone, self.power, self.classifier = backbone, power, _plain(classifier)
        frame, heads = classifier.header.frame, getattr(classifier, "heads", (classifier,))
        self.frame = Frame.of(frame) if frame else None
        # Of an ensemble none has a weight, see `seal_model`.
        self.mean_over_columns = min(getattr(each, "mean_over_columns", ALL) for each in heads)
        self.network = _network(classifier) if isinstance(classifier, Network) else None
        self.target, self.outputs = target_of_model(classifier), classifier.header.classes
        self.columns = answer_columns(self.target, self.outputs)
        self.register_buffer("mean", torch.tensor(preprocessing.mean).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(preprocessing.std).reshape(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Answers (n, k)."""
        # A graph of bytes refuses numbers from 0 to 1, which would all be nearly black.
        output = self.backbone((images.float() / 255 - self.mean) / self.std)
        features: Tensor = output[0] if isinstance(output, tuple) else output
        scores = self.scores(raised(features.float(), self.power))
        if not self.target:
            return scores.softmax(1)
        return torch.stack(
            list(answers_together(self.target, self.outputs, scores).values()), 1
        ).float()

    def scores(self, features: Tensor) -> Tensor:
        """Scores (n, C) of features (n, d), as the classifier computes them."""
        if self.frame is not None:
            features = self.frame.apply(features)
        features = weigh_rows(features, self.mean_over_columns)
        scores: Tensor = (self.network or self.classifier.scores)(features)
        return scores


def _plain(classifier: Any) -> Classifier:
    """A classifier without the steps that read bytes, or take one record at a time, as no graph can."""
    if isinstance(classifier, Ensemble):
        return replace(classifier, heads=tuple(map(_plain, classifier.heads)))  # type: ignore[arg-type]
    changes = {"mean_over_columns": ALL} if isinstance(classifier, Head) else {}
    plain: Classifier = replace(classifier, header=replace(classifier.header, frame=b""), **changes)
    return plain


def _network(classifier: Network) -> nn.Module:
    """A network with its parameters in it."""
    own, classes = classifier.tensors, len(classifier.header.classes)
    module = build(classifier.kind, classifier.inputs, classes, own)
    module.load_state_dict(dict(own), strict=False)
    return module


class _Pixels(nn.Module):
    """The backbones `pixels` (mean weights of Pillow's grey levels) and `pixels:rgb`."""

    luma: Tensor

    def __init__(self, grey: bool) -> None:
        super().__init__()
        self.grey = grey
        self.register_buffer("luma", torch.tensor([0.299, 0.587, 0.114]).reshape(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, d)."""
        if not self.grey:
            return images.flatten(1)
        return (images * self.luma).sum(1).flatten(1)


@dataclass(frozen=True, eq=False)
class Graph:
    """A module for inference, with what its files need.

    Attributes:
        module: from images to answers.
        preprocessing: of its images.
        examples: images (2, 3, height, width), uint8.
    """

    module: InferenceModel
    preprocessing: Preprocessing
    examples: Tensor

    def facts(self) -> dict[str, str]:
        """What a reader of the file needs to know of its images and answers, as texts in JSON: for
        the `metadata_props` of ONNX.
        """
        own = self.preprocessing
        facts = {
            "answers": list(self.module.columns),
            "classes": [] if self.module.target else list(self.module.outputs),
            "images": "RGB, (n, 3, height, width), uint8",
            "resize": {"shorter side": own.resize, "interpolation": own.interpolation}
            | {"centre crop": own.crop, "squash": own.squash, "grey": own.grey},
            "normalisation in the graph": {"divide by": 255, "mean": own.mean, "std": own.std},
        }
        return {name: json.dumps(value) for name, value in facts.items()}


def graph_of(model: SignedModel, weights_path: str = "") -> Graph:
    """The module of a model.

    Args:
        model: a signed model.
        weights_path: file of the backbone's weights; empty to download them, as `load_backbone`
            does.

    Returns:
        The module, the preprocessing of its images, and examples.

    Raises:
        BackboneError: for weights that are not those of the run.
        ConfigError: for images of any size.
    """
    model.manifest.check_of_images("a graph")
    run, wanted = model.manifest.run_config(), model.manifest.fingerprint
    if run.settings.backbone.startswith("onnx:"):
        raise ConfigError(
            f"backbone = {run.settings.backbone!r} is a graph already, and graphs are not joined; apply the "
            "model with `site predict`"
        )
    power = power_in(wanted)
    name, size, options = (
        run.settings.backbone,
        run.settings.image_size,
        options_of(run.settings.features),
    )
    loaded = load_backbone(name, weights_path, size, "cpu", options)
    if (
        fingerprint := with_power(loaded.fingerprint_at(model.manifest.dimension), power)
    ) != wanted:
        raise BackboneError(
            f"the model is for a backbone with fingerprint {wanted[:16]}, but "
            f"{run.settings.backbone!r} here has {fingerprint[:16]}; give the file of the run's "
            "weights with --weights-path"
        )
    if run.settings.backbone.startswith("pixels"):
        if not run.settings.image_size:
            raise ConfigError(
                "a graph needs images of one size; the run has backbone = 'pixels' with image-size "
                "= 0"
            )
        network: nn.Module = _Pixels(run.settings.backbone == "pixels")
        preprocessing = Preprocessing(run.settings.image_size, run.settings.image_size)
    else:
        built = load_network(name, weights_path, size, options)
        network, preprocessing = built.model, built.preprocessing
    module = (
        InferenceModel(network, preprocessing, model.classifier, power).eval().requires_grad_(False)
    )
    generator = torch.Generator().manual_seed(0)
    side = preprocessing.crop
    return Graph(module, preprocessing, _drawn(2, side, generator))


def _drawn(count: int, side: int, generator: torch.Generator) -> Tensor:
    return torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def write_graph(graph: Graph, file: Path) -> float:
    """Write a graph as ONNX, read it again, and compare it on new images of another number.

    Args:
        graph: the module, with example images.
        file: to write. Above `ONE_FILE` bytes, weights are in `<file>.data`.

    Returns:
        The largest difference of an answer, as in `TOLERANCE`.

    Raises:
        PackageError: a package is missing.
        RunError: the written graph gives other answers, or none that are numbers. After any error
            its files are removed.
    """
    check_onnx()
    images = _drawn(CHECKED, graph.examples.shape[-1], torch.Generator().manual_seed(1))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = _onnx(graph, file)
            wanted, actual = graph.module(images), torch.as_tensor(run(images))
        apart = float(((wanted - actual).abs() / wanted.abs().amax(0).clamp_min(1)).max())
        # Also where an answer is no number.
        if not apart <= TOLERANCE:
            raise RunError(
                f"the graph gives answers that differ by {apart:.2g}; allowed is {TOLERANCE:g}"
            )
    except BaseException:
        # A graph that was not compared must not be taken for one that was.
        for written in (file, file.with_name(f"{file.name}.data")):
            written.unlink(missing_ok=True)
        raise
    return apart


def check_onnx() -> None:
    """Raise PackageError if a package for ONNX is missing."""
    for package in PACKAGES:
        check_installed(package, "--format onnx")


def _onnx(graph: Graph, file: Path) -> Callable[[Tensor], Any]:
    batch = torch.export.Dim("batch", min=1, max=4096)
    output = "answers" if graph.module.target else "probabilities"
    names: dict[str, Any] = {"input_names": ["images"], "output_names": [output]}
    names |= {"dynamo": True, "dynamic_shapes": {"images": {0: batch}}, "verbose": False}
    size = sum(tensor.nbytes for tensor in graph.module.state_dict().values())
    program = torch.onnx.export(graph.module, (graph.examples,), **names)
    assert program is not None
    program.model.metadata_props.update(graph.facts())
    program.save(str(file), external_data=size > ONE_FILE)
    with needed_for("--format onnx"):
        session = importlib.import_module("onnxruntime").InferenceSession(
            str(file), providers=["CPUExecutionProvider"]
        )

    def run(images: Tensor) -> Any:
        return np.asarray(session.run(None, {"images": images.numpy()})[0])

    return run


def signed_model_of(run: Path, key_folder: Path | None = None) -> SignedModel:
    """The model that the sites received. A run without one, such as a simulation, is signed now;
    of a private run with the Gaussians of its stored surrogates, as at the end of a deployment's run.

    Args:
        run: the run folder.
        key_folder: where the coordinator's key is; by default the key of the folder of the run.

    Returns:
        The signed model.

    Raises:
        RunError: the run has no model.
        ConfigError: the key cannot be read or made.
        SurrogateError: the model, or a stored surrogate, cannot be read.
    """
    file = run / f"model{SUFFIX}"
    if file.is_file():
        return read_signed_model(file)
    private = (
        read_request_key(key_folder)
        if key_folder
        else signing_key(run.absolute().parent, os.environ)
    )
    source = None
    if settings_of_run(run).settings.epsilon:
        with suppress(RunError):  # A run may have stored nothing to draw from.
            source = learned_again(run).source
    return signed_from_run(run, private, source)
