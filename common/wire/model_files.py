"""The learned model of a run as the file `model.safetensors`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from fedsurrogate.common.backbones.feature_power import power_in
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from fedsurrogate.common.privacy.own_mean import ALL, KEPT, MEAN_ALONE, REMOVED
from fedsurrogate.common.settings import Model
from fedsurrogate.common.surrogates.columns import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import checked_target

# Of a file, if the model's header has a frame.
OFFSET, SCALE = "frame-offset", "frame-scale"
# Of an ensemble whose classes have the highest probability of any head.
COMBINED, HIGHEST = "combined", "highest"
# In the metadata of a head: what features keep of their own mean and length.
COLUMNS = "columns"
OWN_MEAN = {
    "without-mean": REMOVED,
    "own-mean-0.1": MEAN_ALONE,
    "own-mean-0.1-length-0.1": KEPT,
}


def save_model(model: Classifier, path: Path) -> None:
    """Write a model as 32-bit safetensors, with its classes and backbone fingerprint in the
    metadata.

    If the metadata has `power`, features x must first become sign(x) |x|^power. With tensors
    `frame-offset` and `frame-scale` (d,), the first is then subtracted, and the second divides where
    it is not zero. If the metadata has `columns`, the mean over a feature's own columns
    must then be subtracted from it ("without-mean"), or be a tenth of what it was, and at most 0.75 of
    the norm of the rest ("own-mean-0.1"); and with "own-mean-0.1-length-0.1" the length takes the place
    of a direction of the rest, as `weigh_own_mean` has it. If the metadata has `clip`, they must then be
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
        named = [name for name, each in OWN_MEAN.items() if each == model.own_mean]
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
    if (columns := metadata.get(COLUMNS, "")) and columns not in OWN_MEAN:
        raise ValueError(f"{COLUMNS} = {columns[:40]!r}; {' and '.join(OWN_MEAN)} are allowed")
    own_mean = OWN_MEAN.get(columns, ALL)
    return Head(header, weight, bias, clip, centre, projection, target, own_mean)
