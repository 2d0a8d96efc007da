"""Canonical protobuf bytes of heads, networks, updates, synthetic records and relays."""

from __future__ import annotations

import math
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.privacy.own_mean import ALL, KEPT, MEAN_ALONE, REMOVED, OwnParts
from fedsurrogate.common.safe_parsing import canonical, read_message
from fedsurrogate.common.settings import Model
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.common.targets.answers import checked_target
from fedsurrogate.common.wire.surrogate_proto import (
    pack_centre,
    pack_claim,
    pack_header,
    parse,
    unpack_centre,
    unpack_claim,
    unpack_header,
    unpack_projection,
)
from fedsurrogate.common.wire.tensors import pack, unpack

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
    message.target, message.without_mean = head.target, head.own_mean == REMOVED
    if head.own_mean not in (ALL, REMOVED):
        message.own_mean, message.own_length = head.own_mean
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
    parts = (clip, centre, projection, target, _own_mean(message))
    head = Head(header, weight, bias, *parts)
    if not (
        head.weight.isfinite().all() and head.bias.isfinite().all() and 0 <= (clip or 0) < torch.inf
    ):
        raise SurrogateError("the head holds a number that is not finite")
    return head


def _own_mean(message: pb.Head) -> OwnParts:
    """What features keep. Raises SurrogateError for weights that no version knows."""
    if not message.HasField("own_mean") and not message.own_length:
        return REMOVED if message.without_mean else ALL
    kept = OwnParts(message.own_mean, message.own_length)
    if kept not in (MEAN_ALONE, KEPT) or message.without_mean:
        raise SurrogateError(f"a head with own mean and length at weights {tuple(kept)}")
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
    message = pb.Classifier()
    read_message(message, payload, "model")
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
    message = pb.Parameters()
    parse(message, payload)
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
    message = pb.Synthetic()
    parse(message, payload)
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
    """The relay of a chain: surrogates in their canonical bytes."""
    return canonical(pb.Relay(surrogates=surrogates))


def unpack_relay(payload: bytes) -> list[bytes]:
    """Parse bytes of `pack_relay`.

    Raises:
        SurrogateError: for bytes of no relay.
    """
    message = pb.Relay()
    read_message(message, payload, "relay")
    return list(message.surrogates)
