"""Canonical protobuf bytes of heads, networks, updates, synthetic records and chain messages; and files of
models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from .. import surrogate_pb2 as pb
from ..backbones.power_transform import power_in
from ..errors import SurrogateError
from ..identity import distinct_names
from ..models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from ..models.parameters import Parameters, Tensors
from ..privacy.shares import ALL, BOTH, KEPT, KEPT_OF_FEW, MEAN_ALONE, REMOVED, OwnParts
from ..safe_parsing import canonical, read_message
from ..settings import Model
from ..surrogates.mixtures import Frame
from ..surrogates.surrogates import Header, Synthetic
from ..targets.metrics import checked_target
from .surrogate_proto import (
    pack_centre,
    pack_claim,
    pack_header,
    parse,
    unpack_centre,
    unpack_claim,
    unpack_header,
    unpack_projection,
)
from .tensors import pack, unpack

# Of a file, if the model's header has a frame.
OFFSET, SCALE = "frame-offset", "frame-scale"
# Of an ensemble whose classes have the highest probability of any head.
COMBINED, HIGHEST = "combined", "highest"
# In the metadata of a head: what features keep of their mean over columns and of their length.
COLUMNS = "columns"
MEAN_OVER_COLUMNS = {
    "without-mean": REMOVED,
    "mean-over-columns-0.1": MEAN_ALONE,
    "mean-over-columns-0.1-length-0.1": BOTH,
    "steady-mean-over-columns-0.1": KEPT_OF_FEW,
    "steady-mean-over-columns-0.1-length-0.2": KEPT,
}


def save_model(model: Classifier, path: Path) -> None:
    """Write a model as 32-bit safetensors, with its classes and backbone fingerprint in the
    metadata.

    If the metadata has `power`, features x must first become sign(x) |x|^power. With tensors
    `frame-offset` and `frame-scale` (d,), the first is then subtracted, and the second divides where
    it is not zero. If the metadata has `columns`, the mean over a feature's own columns
    must then be subtracted from it ("without-mean"), or be a tenth of what it was, and at most 0.75 of
    the norm of the rest ("mean-over-columns-0.1"); and with "mean-over-columns-0.1-length-0.1" the
    length takes the place
    of a direction of the rest. Names with "steady" have other factors; `weigh_mean_over_columns` has them all.
    If the metadata has `clip`, they must then be
    divided by max(|x|, clip). If there is a tensor `centre`, it must be subtracted before the clip;
    and with a tensor `projection` (k, d), features are then multiplied by it. If the metadata has
    `target`, classes are the names of what the model answers, and it says in JSON what the scores
    mean. A linear head has `weight` (C, d) and `bias` (C,); an ensemble of M heads has (M, C, d)
    and (M, C). Quadratic discriminants have `means`,
    `whiteners` and `bias`. A network has `kind` and `inputs` in the metadata; see
    common/models/networks.py.

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
    if isinstance(model, Head):
        named = [
            name for name, each in MEAN_OVER_COLUMNS.items() if each == model.mean_over_columns
        ]
        metadata |= dict(zip([COLUMNS], named, strict=False))
    if isinstance(model, Ensemble) and model.highest:
        metadata[COMBINED] = HIGHEST
    if isinstance(model, Head) and model.target:
        metadata["target"] = model.target
    if isinstance(model, Network):
        metadata |= {"kind": model.kind, "inputs": str(model.inputs)}
    if not model.header.frame:
        return metadata, model.arrays()
    frame = Frame.of(model.header.frame)
    offset, scale = frame.offset.float(), frame.scale.float()
    return metadata, {**model.arrays(), OFFSET: offset, SCALE: scale}


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
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (SafetensorError, RuntimeError, TypeError, OSError) as error:
        raise SurrogateError(
            f"'{path}' is not a readable model ({error}); give a model.safetensors of a run"
        ) from error
    try:
        return classifier_of(metadata, tensors)
    except SurrogateError as error:
        raise SurrogateError(
            f"'{path}' is no model of a run: {error}; give a model.safetensors of a run"
        ) from error


def classifier_of(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Classifier:
    """The classifier of a file.

    Args:
        metadata: as `file_content` gives it, with `classes` as JSON and `fingerprint`.
        tensors: by name.

    Raises:
        SurrogateError: for a missing part, or parts that do not fit together.
    """
    try:
        classes = json.loads(metadata["classes"])
        if not isinstance(classes, list):
            raise ValueError("its classes are no list of names")
        if wrong := [name for name, each in tensors.items() if not each.is_floating_point()]:
            raise ValueError(f"{wrong[0][:40]!r} holds no floating-point numbers")
        wide = {name: each if each.itemsize > 2 else each.float() for name, each in tensors.items()}
        frame = _frame(wide.pop(OFFSET, None), wide.pop(SCALE, None))
        named = (metadata.get("fingerprint", ""), distinct_names(classes, "class"))
        model = _classifier(Header("", "", "coordinator", *named, frame), metadata, wide)
    except KeyError as error:
        raise SurrogateError(f"it has no {str(error)[:60]}") from None
    except (ValueError, RecursionError) as error:
        raise SurrogateError(str(error)[:300]) from None
    model.check_shapes()
    model.check_frame()
    return model


def _frame(offset: Tensor | None, scale: Tensor | None) -> bytes:
    """The frame of a header; empty without both tensors. Raises ValueError for one alone."""
    if offset is None and scale is None:
        return b""
    if offset is None or scale is None or offset.ndim != 1 or offset.shape != scale.shape:
        raise ValueError("its frame of columns has not one offset and one scale for each")
    packed = Frame(offset.double(), scale.double()).packed()
    Frame.of(packed)
    return packed


def _classifier(
    header: Header, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Head | Ensemble | Quadratic | Network:
    """The classifier, of which the shapes are not checked. Raises KeyError or ValueError for a
    missing or wrong part.
    """
    if "kind" in metadata:
        kind = TypeAdapter(Model).validate_python(metadata["kind"])
        return Network(header, kind, int(metadata["inputs"]), tensors)
    if "whiteners" in tensors:
        return Quadratic(header, tensors["means"], tensors["whiteners"], tensors["bias"])
    clip = float(metadata["clip"]) if "clip" in metadata else None
    if clip is not None and not 0 <= clip < math.inf:
        raise ValueError(f"features are clipped to {clip}; 0 or more is allowed")
    weight, bias = tensors["weight"], tensors["bias"]
    if weight.ndim == 3 and bias.ndim == 2 and 0 < len(weight) == len(bias):
        if (combined := metadata.get(COMBINED, HIGHEST)) != HIGHEST:
            raise ValueError(f"{COMBINED} = {combined[:40]!r}; {HIGHEST!r} is allowed")
        heads = tuple(Head(header, w, b) for w, b in zip(weight, bias, strict=True))
        return Ensemble(heads, COMBINED in metadata)
    centre, projection = tensors.get("centre"), tensors.get("projection")
    target = checked_target(metadata.get("target", ""), header.classes)
    if (columns := metadata.get(COLUMNS, "")) and columns not in MEAN_OVER_COLUMNS:
        raise ValueError(
            f"{COLUMNS} = {columns[:40]!r}; {' and '.join(MEAN_OVER_COLUMNS)} are allowed"
        )
    mean_over_columns = MEAN_OVER_COLUMNS.get(columns, ALL)
    return Head(header, weight, bias, clip, centre, projection, target, mean_over_columns)


MOST_DIMENSIONS = 8
# Limit on synthetic records, so that a message cannot fill the memory before `check_synthetic`
# counts them.
MOST_SYNTHETIC = 2**20
# Default limit on the numbers in the tensors of one message: a gibibyte of halves.
MOST_NUMBERS = 2**29


# A part that the scores of all classes have in common is taken out where it is so many times what tells
# them apart.
COMMON = 16


def _head(head: Head) -> pb.Head:
    weight, bias = (head.weight, head.bias) if head.target else _apart(head.weight, head.bias)
    message = pb.Head(header=pack_header(head.header), weight=pack(weight), bias=pack(bias))
    if head.clip is not None:
        message.clip = head.clip
    if head.centre is not None:
        message.centre.CopyFrom(pack_centre(head.centre))
    if head.projection is not None:
        message.projection.CopyFrom(pack(head.projection))
    message.target, message.without_mean = head.target, head.mean_over_columns == REMOVED
    if head.mean_over_columns not in (ALL, REMOVED):
        message.mean_over_columns, message.own_length, message.steady = head.mean_over_columns
    return message


def _apart(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and biases of classes without their mean, where 16 bits would keep little else.

    A number that is added to the scores of all classes changes no probability. Discriminant
    analysis with a covariance that is nearly singular leaves a large one.

    Args:
        weight: (C, d).
        bias: (C,).

    Returns:
        Both, with the same differences between classes.
    """
    pairs = [(each, each.double().mean(0)) for each in (weight, bias)]
    large = any(
        mean.abs().max() > COMMON * (each.double() - mean).abs().max() for each, mean in pairs
    )
    if not large or not all(each.isfinite().all() for each, _ in pairs):
        return weight, bias
    own, rest = ((each.double() - mean).to(each.dtype) for each, mean in pairs)
    return own, rest


def _unpack_head(message: pb.Head) -> Head:
    classes = len(message.header.classes)
    if not classes or len(message.weight.shape) != 2:
        raise SurrogateError(
            f"a head for {classes} classes with weights of shape {tuple(message.weight.shape)[:4]}"
        )
    weight = unpack(message.weight, "head weights", (classes, message.weight.shape[1]))
    clip = message.clip if message.HasField("clip") else None
    centre = unpack_centre(message.centre) if message.HasField("centre") else None
    projection = (
        unpack_projection(message.projection, weight.shape[1])
        if message.HasField("projection")
        else None
    )
    inputs = (weight if projection is None else projection).shape[1]
    if centre is not None and len(centre) != inputs:
        raise SurrogateError(
            f"a centre of dimension {len(centre)} for features of dimension {inputs}"
        )
    bias = unpack(message.bias, "head bias", (classes,))
    header = unpack_header(message.header)
    target = checked_target(message.target, header.classes)
    parts = (clip, centre, projection, target, _mean_over_columns(message))
    head = Head(header, weight, bias, *parts)
    if not (
        head.weight.isfinite().all() and head.bias.isfinite().all() and 0 <= (clip or 0) < torch.inf
    ):
        raise SurrogateError("the head holds a number that is not finite")
    return head


def _mean_over_columns(message: pb.Head) -> OwnParts:
    """What features keep. Raises SurrogateError for weights that no version knows."""
    if not message.HasField("mean_over_columns") and not (message.own_length or message.steady):
        return REMOVED if message.without_mean else ALL
    kept = OwnParts(message.mean_over_columns, message.own_length, message.steady)
    if kept not in (MEAN_ALONE, BOTH, KEPT_OF_FEW, KEPT) or message.without_mean:
        raise SurrogateError(f"a head with mean over columns and length at weights {tuple(kept)}")
    return kept


def pack_classifier(model: Classifier) -> bytes:
    """Canonical bytes of any classifier, at 16 bits."""
    message = pb.Classifier()
    match model:
        case Head():
            message.head.CopyFrom(_head(model))
        case Ensemble():
            message.heads.heads.extend([_head(head) for head in model.heads])
            message.heads.highest = model.highest
        case Quadratic():
            tables = {"means": pack(model.means), "whiteners": pack(model.whiteners)}
            message.quadratic.CopyFrom(
                pb.Quadratic(header=pack_header(model.header), bias=model.bias.tolist(), **tables)
            )
        case Network():
            tensors = _pack_tensors(model.tensors)
            network = pb.Network(
                header=pack_header(model.header),
                kind=model.kind,
                inputs=model.inputs,
                tensors=tensors,
            )
            message.network.CopyFrom(network)
    return canonical(message)


def unpack_classifier(payload: bytes, most: int = MOST_NUMBERS) -> Classifier:
    """Parse bytes of `pack_classifier`.

    Args:
        payload: the bytes.
        most: for a network, as in `unpack_parameters`.

    Raises:
        SurrogateError: for bytes of no valid classifier.
    """
    message = read_message(pb.Classifier, payload, "model")
    model = _unpack_model(message, most)
    model.check_frame()
    return model


def _unpack_model(message: pb.Classifier, most: int) -> Classifier:
    match message.WhichOneof("kind"):
        case "head":
            return _unpack_head(message.head)
        case "heads" if message.heads.heads:
            ensemble = Ensemble(
                tuple(map(_unpack_head, message.heads.heads)), message.heads.highest
            )
            ensemble.check_shapes()
            return ensemble
        case "quadratic":
            return _unpack_quadratic(message.quadratic)
        case "network":
            return _unpack_network(message.network, most)
    raise SurrogateError("a model of no known kind")


def _unpack_quadratic(message: pb.Quadratic) -> Quadratic:
    classes, shape = len(message.header.classes), tuple(message.whiteners.shape)
    if (
        not classes
        or len(message.bias) != classes
        or len(shape) not in (2, 3)
        or shape[1:] != (shape[-1],) * (len(shape) - 1)
    ):
        raise SurrogateError(f"quadratic discriminants of shape {shape[:4]} for {classes} classes")
    means = unpack(message.means, "means", (classes, shape[-1]))
    whiteners = unpack(message.whiteners, "whiteners", (classes, *shape[1:]))
    bias = torch.tensor(list(message.bias))
    quadratic = Quadratic(unpack_header(message.header), means, whiteners, bias)
    if not all(tensor.isfinite().all() for tensor in quadratic.arrays().values()):
        raise SurrogateError("the discriminants hold a number that is not finite")
    return quadratic


def _unpack_network(message: pb.Network, most: int) -> Network:
    if message.kind not in get_args(Model):
        raise SurrogateError(f"a network of unknown kind {message.kind[:20]!r}")
    header, tensors = unpack_header(message.header), _unpack_tensors(message.tensors, most)
    network = Network(header, cast(Model, message.kind), message.inputs, tensors)
    network.check_shapes()
    return network


def pack_parameters(parameters: Parameters) -> bytes:
    """Canonical bytes of a model or an update, at 16 bits.

    Zeros of a sparse tensor are left out and marked by bits.
    """
    message = pb.Parameters(
        header=pack_header(parameters.header),
        round=parameters.round,
        records=parameters.records,
        tensors=_pack_tensors(parameters.tensors),
        claim=pack_claim(parameters.claim),
    )
    return canonical(message)


def unpack_parameters(payload: bytes, most: int = MOST_NUMBERS) -> Parameters:
    """Parse bytes of `pack_parameters`.

    Args:
        payload: the bytes.
        most: numbers in all tensors.

    Raises:
        SurrogateError: for bytes of no valid parameters, or more numbers.
    """
    message = parse(pb.Parameters, payload)
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    tensors = _unpack_tensors(message.tensors, most)
    return Parameters(unpack_header(message.header), message.round, tensors, message.records, claim)


def pack_synthetic(synthetic: Synthetic) -> bytes:
    """Canonical bytes of synthetic records, at 16 bits."""
    message = pb.Synthetic(
        header=pack_header(synthetic.header),
        round=synthetic.round,
        records=synthetic.records,
        values=pack(synthetic.values),
        labels=synthetic.labels.tolist(),
        radius=synthetic.radius,
        claim=pack_claim(synthetic.claim),
    )
    return canonical(message)


def unpack_synthetic(payload: bytes) -> Synthetic:
    """Parse bytes of `pack_synthetic`.

    Raises:
        SurrogateError: for bytes of no valid synthetic records.
    """
    message = parse(pb.Synthetic, payload)
    shape = tuple(message.values.shape)
    if len(shape) != 2 or not shape[1] or not 0 < shape[0] == len(message.labels) <= MOST_SYNTHETIC:
        raise SurrogateError(
            f"synthetic records of shape {shape[:4]} with {len(message.labels)} labels; expected "
            f"are (n, d) and n, with at most {MOST_SYNTHETIC} records"
        )
    labels = list(message.labels)
    if any(label >= len(message.header.classes) for label in labels) or labels != sorted(labels):
        raise SurrogateError(
            f"labels of synthetic records must be indices of {len(message.header.classes)} classes "
            "in rising order"
        )
    values = unpack(message.values, "synthetic records", (len(labels), shape[1]))
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    header = unpack_header(message.header)
    return Synthetic(
        header, message.round, values, torch.tensor(labels), message.radius, message.records, claim
    )


def _pack_tensors(tensors: Tensors) -> list[pb.Tensor]:
    packed = []
    for name, tensor in sorted(tensors.items()):
        kept = tensor != 0
        # One bit per entry pays off as soon as one entry in sixteen is zero.
        if tensor.numel() >= 16 and float(kept.float().mean()) < 15 / 16:
            bits = np.packbits(kept.flatten().cpu().numpy()).tobytes()
            packed.append(
                pb.Tensor(name=name, values=pack(tensor[kept]), kept=bits, shape=list(tensor.shape))
            )
        else:
            packed.append(pb.Tensor(name=name, values=pack(tensor)))
    return packed


def _unpack_tensors(packed: object, most: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    found = cast(list[pb.Tensor], packed)
    if any(len(name) > 200 for name in distinct_names([each.name for each in found], "tensor")):
        raise SurrogateError("a tensor with a name that is too long")
    for each in found:
        name = each.name[:40]
        sides = each.shape if each.kept else each.values.shape
        # First: the product of a million sides would take hours.
        if len(sides) > MOST_DIMENSIONS:
            raise SurrogateError(
                f"{name}: a tensor of {len(sides)} dimensions; at most {MOST_DIMENSIONS} are "
                "allowed"
            )
        shape = tuple(sides)
        entries = math.prod(shape)
        if each.kept and len(each.kept) != -(-entries // 8):
            raise SurrogateError(
                f"{name}: {len(each.kept)} bytes do not mark the entries of shape {shape[:4]}"
            )
        # One bit marks an entry of four bytes, so a small payload could need far more memory.
        if (most := most - entries) < 0:
            raise SurrogateError(f"{name}: with it there are more numbers than were asked for")
        if not each.kept:
            tensors[each.name] = unpack(each.values, name, shape)
            continue
        marks = torch.from_numpy(
            np.unpackbits(np.frombuffer(each.kept, np.uint8), count=entries).astype(bool)
        )
        dense = torch.zeros(entries)
        dense[marks] = unpack(each.values, name, (int(marks.sum()),))
        tensors[each.name] = dense.reshape(shape)
    return tensors


def pack_relay(surrogates: list[bytes]) -> bytes:
    """The chain message of a chain: surrogates in their canonical bytes."""
    return canonical(pb.Relay(surrogates=surrogates))


def unpack_relay(payload: bytes) -> list[bytes]:
    """Parse bytes of `pack_relay`.

    Raises:
        SurrogateError: for bytes of no chain message.
    """
    message = read_message(pb.Relay, payload, "relay")
    return list(message.surrogates)
