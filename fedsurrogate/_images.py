"""Features of images, by a backbone of the product or of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedsurrogate._arrays import Labels, names_of, shown
from fedsurrogate._inputs import as_features, feature_names
from fedsurrogate._targets import values_of
from fedsurrogate.client_app.datasets.dicom_files import is_dicom_file, open_single
from fedsurrogate.client_app.datasets.images import as_rgb, open_rgb
from fedsurrogate.client_app.datasets.left_out import described, ends_process, printable
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.backbones.networks import USUAL, BackboneOptions
from fedsurrogate.common.backbones.own_backbones import OwnModule, Transform, own_backbone
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.errors import ConfigError, DataError, PackageError
from fedsurrogate.common.settings.base import short
from fedsurrogate.common.targets.target import Target

# What a data set may be: anything with `__len__` and `__getitem__`, an array or tensor of several
# images, or an iterable.
Images = Any
SHAPES = "(height, width), (height, width, 3) or (3, height, width)"


def records_of(data: Images) -> Iterator[tuple[int, Any, Any]]:
    """The records of a data set, one by one.

    Args:
        data: as in `fedsurrogate.features`.

    Returns:
        Number, image and label of every record; the label is None where a record is an image alone.

    Raises:
        DataError: if `data` cannot be read one by one.
    """
    for number, item in enumerate(_items(data)):
        if is_labelled(item):
            yield number, item[0], item[1]
        elif isinstance(item, tuple | dict):
            raise DataError(
                f"record {number} is a {type(item).__name__} of {len(item)}; a record is an image, "
                "or a pair (image, label) with one label"
            )
        else:
            yield number, item, None


def is_labelled(item: Any) -> bool:
    """Whether an item is a pair of an image and one label."""
    # Two numbers are a row of an array, not an image with its label.
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and _is_label(item[1])
        and not isinstance(item[0], int | float | np.number)
    )


def _items(data: Images) -> Iterable[Any]:
    if isinstance(data, str | Path):
        raise DataError(
            f"'{data}' is one file or folder; give a list of files, images, or a data set"
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping):
        # Not `iter`: a data set need not raise IndexError behind its last record.
        return (data[number] for number in range(len(data)))
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"{type(data).__name__} is no data set; it needs __len__ and __getitem__")
    return data


def _is_label(value: Any) -> bool:
    if isinstance(value, str | int | float | np.generic):
        return True
    # Some data sets return a label as an array of one number.
    return (
        isinstance(value, Tensor | np.ndarray) and value.ndim <= 1 and len(value.reshape(-1)) == 1
    )


def label_of(value: Any, number: int) -> object:
    """A label as a plain value.

    Args:
        value: the label; a tensor or an array of one number too.
        number: of the record, for the error.

    Raises:
        DataError: for a record without a label.
    """
    if value is None:
        raise DataError(f"record {number} has no label; give pairs (image, label)")
    return value.reshape(-1)[0].item() if isinstance(value, Tensor | np.ndarray) else value


def picture(image: Any, number: int, shortest: int = 0) -> Image.Image:
    """An image in RGB, as a site reads it.

    Args:
        image: a PIL image, the path of a file, or an array or tensor (8 bits, or floating point in
            0 to 1).
        number: of the record, for the error.
        shortest: pixels that the shorter side needs; 0 for all. A large JPEG file may be decoded
            smaller, as at a site; a PIL image has the pixels that it has.

    Raises:
        DataError: for a wrong type, shape or range of values, or a file that cannot be read.
    """
    if isinstance(image, str | Path):
        return _read(partial(_from_file, Path(image), shortest), f"image '{image}'")
    if isinstance(image, Image.Image):
        return _read(partial(as_rgb, image), f"record {number}")
    if isinstance(image, Tensor | np.ndarray):
        return Image.fromarray(_pixels(image, number)).convert("RGB")
    raise DataError(
        f"record {number}: {type(image).__name__} is no image; give PIL images, paths, arrays or "
        "tensors, or a module of your own"
    )


def _from_file(file: Path, shortest: int) -> Image.Image:
    return open_single(file) if is_dicom_file(file) else open_rgb(file, shortest)


def _read(read: Callable[[], Image.Image], name: str) -> Image.Image:
    """What `read` returns. Raises DataError for whatever it raises: decoders raise almost anything
    for a broken image.
    """
    try:
        return read()
    except (MemoryError, PackageError):
        raise
    except BaseException as error:
        if ends_process(error):
            raise
        why = str(error) if isinstance(error, DataError) else described(error)
        raise DataError(printable(f"{name} cannot be read: {why}")) from error


def _pixels(
    image: Tensor | np.ndarray[Any, Any], number: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(height, width) or (height, width, 3), 8 bits."""
    values = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    shape = tuple(values.shape)
    if values.ndim == 3:
        # Where both fit, tensors have their channels first, arrays last.
        first, last = shape[0] in (1, 3), shape[2] in (1, 3)
        if first and (isinstance(image, Tensor) or not last):
            values = np.moveaxis(values, 0, 2)
        if values.shape[2] == 1:
            values = values[:, :, 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3) or not values.size:
        raise DataError(
            f"record {number} of shape {shape} is no image; an image is {SHAPES}; for other "
            "records give a module of your own as the backbone"
        )
    low, high = float(values.min()), float(values.max())
    whole = not np.issubdtype(values.dtype, np.floating)
    limit = 255 if whole else 1
    if not (low >= 0 and high <= limit):
        kind = "integers" if whole else "floating point"
        raise DataError(
            f"record {number} has values from {low:g} to {high:g} in {kind}, which must lie in 0 to "
            f"{limit}; scale them"
        )
    scaled = values.astype(np.float32) * (1 if whole else 255)
    if values.dtype == np.bool_:
        scaled *= 255
    return np.rint(scaled).astype(np.uint8)


def tensor_of(value: Any, number: int) -> Tensor:
    """What a module without a transform takes.

    Args:
        value: a record.
        number: of the record, for the error.

    Returns:
        Images and files as (3, height, width) in [0, 1]; arrays and tensors in their own shape as
        32-bit numbers, 8-bit ones divided by 255.

    Raises:
        DataError: for a value that is no image, array or tensor.
    """
    if isinstance(value, str | Path | Image.Image):
        return torch.from_numpy(np.array(picture(value, number), dtype=np.float32) / 255).permute(
            2, 0, 1
        )
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"record {number}: {type(value).__name__} is no image, array or tensor ({error})"
        ) from error
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()


_own: dict[str, OwnModule] = {}
NamedRecords = tuple[Tensor, Labels]
ValuedRecords = tuple[Tensor, Tensor]
Take = Callable[[Any, int], Tensor]
# What a record becomes, and what a batch of these becomes.
Parts = tuple[Take, Callable[[Tensor], Tensor]]


def register_backbone(name: str, module: nn.Module, transform: Transform | None = None) -> None:
    """Let `features` and `simulate` find a module of your own under a name.

    Args:
        name: without a colon, such as "mine".
        module: takes a batch of what `transform` returns and gives features (n, d).
        transform: takes one image, or one row of an array, and returns a tensor; None for records
            that the module takes as they are.

    Raises:
        ConfigError: for a name that the product uses, or what is no module.

    Example:
        >>> import numpy as np
        >>> register_backbone("flat", nn.Flatten())
        >>> features(np.zeros((4, 1, 8, 8)), "flat").shape
        torch.Size([4, 64])
    """
    if not isinstance(name, str) or name in ("pixels", "own", "") or ":" in name:
        raise ConfigError(
            f"backbone {short(name)} is a name of the product, or no name; use one without a colon, such as 'mine'"
        )
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"module = {shown(module)}: must be a torch.nn.Module; give an instance, and wrap a "
            "function in a module with a `forward`"
        )
    if transform is not None and not callable(transform):
        raise ConfigError(f"transform = {shown(transform)}: must be a function, or None")
    _own[name] = module, transform


def is_own(backbone: object) -> bool:
    """Whether a backbone is the user's: a module, a registered name, or a function in Python."""
    return isinstance(backbone, nn.Module) or (
        isinstance(backbone, str) and (backbone in _own or backbone.startswith("python:"))
    )


def features(
    images: Images,
    backbone: str | nn.Module = "pixels",
    *,
    weights_path: str = "",
    image_size: int = 0,
    device: str = "auto",
    batch_size: int = 64,
    options: BackboneOptions = USUAL,
) -> Tensor:
    """Features of images.

    Args:
        images: PIL images, paths of files, arrays or tensors (8 bits, or floating point in 0 to 1),
            as a list, as one array of shape (n, ...), or as a data set with `__len__` and
            `__getitem__`, which may give pairs (image, label).
        backbone: a name as in the settings ("pixels", "torchvision:resnet18"); or your own:
            "python:package.module:function", as at a site; a module or a registered name, which may
            take records that are no images.
        weights_path: file of the backbone's weights.
        image_size: side in pixels to which images are resized; 0 for the backbone's own, or
            unchanged pixels.
        device: that computes, such as "cpu", "cuda" or "auto".
        batch_size: images that the backbone takes at once.
        options: what no file says of a backbone by name.

    Returns:
        Features (n, d), float32.

    Raises:
        DataError: for images that cannot be read.
        BackboneError: for a backbone that cannot be loaded.
        ConfigError: for a name that is no backbone.

    Example:
        >>> images = np.zeros((3, 8, 8), dtype=np.uint8)
        >>> tuple(features(images, "pixels").shape)
        (3, 64)
    """
    own = {"weights_path": weights_path, "image_size": image_size, "device": device}
    return computed(images, *_parts(backbone, **own, options=options), batch_size)[0]


def labelled_features(
    data: Images,
    backbone: str | nn.Module = "pixels",
    *,
    weights_path: str = "",
    image_size: int = 0,
    device: str = "auto",
    batch_size: int = 64,
    options: BackboneOptions = USUAL,
) -> tuple[Tensor, list[str]]:
    """Features and class names of a data set, in one pass.

    Args:
        data: whose items are pairs (image, label).
        backbone: as in `features`.
        weights_path: as in `features`.
        image_size: as in `features`.
        device: as in `features`.
        batch_size: as in `features`.
        options: as in `features`.

    Returns:
        Features (n, d), float32, and class names (n,).

    Raises:
        DataError: for images that cannot be read, or a record without a label.
        BackboneError: for a backbone that cannot be loaded.
        ConfigError: for a name that is no backbone.

    Example:
        >>> data = [(np.zeros((8, 8), dtype=np.uint8), "nevus"), (np.ones((8, 8)), "melanoma")]
        >>> x, names = labelled_features(data)
        >>> tuple(x.shape), names
        ((2, 64), ['nevus', 'melanoma'])
    """
    own = {"weights_path": weights_path, "image_size": image_size, "device": device}
    x, labels = _of_pairs(data, _parts(backbone, **own, options=options), batch_size)
    return x, labels.names


def _of_pairs(
    data: Images, parts: Parts, batch_size: int = 64, classes: Sequence[str] = ()
) -> NamedRecords:
    """As `labelled_features`, with a backbone's parts."""
    x, labels = computed(data, *parts, batch_size)
    given = [label_of(label, number) for number, label in enumerate(labels)]
    return x, names_of(given, len(x), known=classes)


def records_for(
    entry: Any,
    backbone: str | nn.Module | None,
    options: dict[str, Any],
    classes: Sequence[str] = (),
    target: Target | None = None,
) -> NamedRecords | ValuedRecords:
    """Features and class names of an entry; or values of another target.

    Args:
        entry: a pair of arrays, or a data set of pairs (image, label).
        backbone: as in `features`; None takes an array (n, d) as features, and computes pixels of
            anything else.
        options: of the backbone, by the names of the arguments of `features`.
        classes: names of the run's classes, if it has a list.
        target: of the run; None for classes.

    Returns:
        Features (n, d) and class names (n,), or values (n, k).
    """
    if isinstance(entry, tuple) and len(entry) not in (0, 2) and hasattr(entry[0], "shape"):
        raise DataError(f"a tuple of {len(entry)}; give a pair of features or images and labels")
    if _is_pair(entry):
        values, labels = entry
        x = as_features(values) if backbone is None and are_features(values) else None
        if x is None:
            x = features(values, backbone or "pixels", **options)
        if target is not None:
            return x, values_of(labels, len(x), target)
        return x, names_of(labels, len(x), known=classes)
    if target is not None:
        raise DataError(
            f"task = {target.name!r} needs a pair of features or images, and an array of values"
        )
    return _of_pairs(entry, _parts(backbone, **options), classes=classes)


def feature_columns(entry: Any, backbone: str | nn.Module | None) -> tuple[str, ...]:
    """Names of the columns of an entry's features, in their public order; empty for images, and for
    arrays without names.
    """
    given = backbone is None and _is_pair(entry) and are_features(entry[0])
    return feature_names(entry[0]) if given else ()


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and not is_labelled(entry[0])


def are_features(values: Any) -> bool:
    """Whether values are an array (n, d), or could be meant as one, and not images."""
    if isinstance(values, list | tuple):
        return not values or (
            not isinstance(values[0], str | Path | Image.Image) and np.ndim(values[0]) <= 1
        )
    if not hasattr(values, "shape") and hasattr(values, "__array__"):
        values = np.asarray(values)
    return hasattr(values, "shape") and len(values.shape) <= 2


def _parts(backbone: str | nn.Module | None, **options: Any) -> Parts:
    """What a record becomes, and what a batch of these becomes; options as of `features`."""
    if isinstance(backbone, nn.Module) or backbone in _own:
        own = (backbone, None) if isinstance(backbone, nn.Module) else _own[backbone]
        return _of_module(own, options.get("image_size", 0))
    return of_backbone(backbone_of(backbone or "pixels", **options))


def backbone_of(
    name: str,
    weights_path: str = "",
    image_size: int = 0,
    device: str = "auto",
    options: BackboneOptions = USUAL,
) -> Backbone:
    """A backbone of the product, or a function in Python that makes one.

    Args:
        name: as in the settings, or "python:package.module:function".
        weights_path: as in `features`.
        image_size: as in `features`.
        device: as in `features`.
        options: as in `features`.

    Raises:
        BackboneError: for a backbone that cannot be loaded.
        ConfigError: for a name that is no backbone.
    """
    if is_own(name):
        return own_backbone(name, image_size, device)
    return load_backbone(name, str(weights_path), image_size, device, options)


def of_backbone(loaded: Backbone) -> Parts:
    """What an image becomes for a backbone that is loaded, and what it makes of a batch."""

    def take(image: Any, number: int) -> Tensor:
        return loaded.preprocess(picture(image, number, loaded.preprocess.resize))

    return take, loaded.forward


def _of_module(own: OwnModule, image_size: int) -> Parts:
    module, transform = own
    resized = Preprocessing(image_size, image_size)

    def take(value: Any, number: int) -> Tensor:
        if transform is not None:
            image = isinstance(value, str | Path | Image.Image)
            tensor = transform(picture(value, number) if image else value)
            if not isinstance(tensor, Tensor):
                what = type(tensor).__name__
                raise DataError(
                    f"the transform returns {what} for record {number}; it must return a tensor"
                )
            return tensor
        if image_size:
            return resized(picture(value, number, image_size))
        return tensor_of(value, number)

    def forward(batch: Tensor) -> Tensor:
        training = module.training
        try:
            place = next((tensor.device for tensor in module.parameters()), batch.device)
            with torch.no_grad():
                output = module.eval()(batch.to(place))
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise DataError(
                f"the module cannot take a batch of shape {tuple(batch.shape)}: {reason}"
            ) from error
        finally:
            module.train(training)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(batch):
            shape = tuple(getattr(output, "shape", ()))
            what = f"shape {shape}" if shape else type(output).__name__
            raise DataError(
                f"the module returns {what} for {len(batch)} records; it must be (n, d)"
            )
        return output

    return take, forward


def computed(
    data: Images, take: Take, forward: Callable[[Tensor], Tensor], batch_size: int = 64
) -> tuple[Tensor, list[Any]]:
    """Features of all records, and their labels, None where there is none.

    Args:
        data: as in `features`.
        take: what a record becomes.
        forward: what a batch of these becomes.
        batch_size: as in `features`.
    """
    parts: list[Tensor] = []
    labels: list[Any] = []
    batch: list[Tensor] = []
    shape: torch.Size | None = None
    for number, image, label in records_of(data):
        taken = take(image, number)
        shape = shape or taken.shape
        if taken.shape != shape:
            raise DataError(
                f"record 0 has shape {tuple(shape)} and record {number} {tuple(taken.shape)}; set "
                "image_size, or resize them"
            )
        labels.append(label)
        batch.append(taken)
        if len(batch) == batch_size:
            parts.append(forward(torch.stack(batch)).cpu().float())
            batch = []
    if not labels:
        raise DataError("no record to compute features of; give at least one")
    if batch:
        parts.append(forward(torch.stack(batch)).cpu().float())
    return torch.cat(parts), labels
