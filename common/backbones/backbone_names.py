"""Names of backbones, files of weights and columns of tables, checked without loading a library:
torch alone takes over a second. And dimensions, where a name tells them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import LONGEST_FINGERPRINT, BackboneError, DataError
from ..extras import BUILT_BY, OF_FEATURES, check_installed, is_installed
from ..identity import normal

FORMS = (
    "'pixels', 'pixels:rgb', 'torchvision:MODEL', 'open_clip:MODEL/TAG', 'timm:MODEL', 'hf:OWNER/NAME', "
    "'onnx:FILE'; after 'timm:' and 'open_clip:' also 'hf-hub:OWNER/NAME' and 'local-dir:FOLDER'"
)
# What follows a library's name where a repository of the Hugging Face hub, or a folder with the files
# of one, says what the backbone is.
HUB, LOCAL = "hf-hub:", "local-dir:"
# Names of files of weights in such a folder, the first found counts.
WEIGHTS_IN_FOLDERS = {
    "timm": ("model.safetensors", "pytorch_model.bin"),
    "open_clip": ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    "hf": ("model.safetensors", "pytorch_model.bin"),
}
# Backbones whose dimension depends on the image size unless image-size is set.
OF_IMAGE_SIZE = ("pixels", "pixels:rgb")
# The backbone that each site names in its own settings: code of a site, which no setting of a run
# may name.
OWN_BACKBONE = "own"
# Without a library: pixels, and a backbone that each site has of its own.
WITHOUT_LIBRARY = (*OF_IMAGE_SIZE, OWN_BACKBONE)
LIBRARIES = ("torchvision", "open_clip", "timm")
# How a file that torch.save writes begins: a zip archive, or a pickle in the old format.
TORCH_FILES = (b"PK\x03\x04", b"\x80")


def check_backbone_name(name: str, required: bool = True) -> None:
    """Raise BackboneError for a name that no library here knows.

    required: whether the library must be installed here; if so, PackageError is raised where it is
    not. Without it, its models are unknown and not checked. The models are read from the library's
    source files, which takes milliseconds; when in doubt a name passes, and loading decides.
    """
    library, _, model = name.partition(":")
    if name in WITHOUT_LIBRARY:
        return
    if library not in (*LIBRARIES, *BUILT_BY) or not model:
        raise BackboneError(f"backbone = {name!r} is unknown; use {FORMS}")
    if required:
        check_installed(BUILT_BY.get(library, library), f"backbone = {name!r}")
    if is_of_hub(name) or place_in(name):
        return
    spec = find_spec(library) if is_installed(library) else None
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent
    if library == "open_clip":
        _check_open_clip(folder, name, *model.partition("/")[::2])
        return
    # A name in quotes is an alias of an older version. timm's names may end with a tag of the
    # weights.
    known, text = _functions((folder / "models").glob("*.py"))
    plain = model.partition(".")[0] if library == "timm" else model
    if plain not in known and not re.search(rf"[\"']{re.escape(plain)}[\"']", text):
        raise BackboneError(
            f"backbone = {name!r}: {library} has no model {model!r}{_similar(plain, known)}"
        )


def is_of_hub(name: str) -> bool:
    """Whether a backbone is a repository of the Hugging Face hub.

    Example:
        >>> is_of_hub("timm:hf-hub:MahmoodLab/UNI"), is_of_hub("hf:microsoft/rad-dino")
        (True, True)
    """
    library, _, model = name.partition(":")
    of_hub = library in WEIGHTS_IN_FOLDERS and model.startswith(HUB)
    return of_hub or (library == "hf" and not model.startswith(LOCAL))


def place_in(name: str) -> str:
    """The folder or file in the name of a backbone; empty where its name has none.

    Example:
        >>> place_in("timm:local-dir:/models/uni"), place_in("onnx:net.onnx"), place_in("timm:vit")
        ('/models/uni', 'net.onnx', '')
    """
    library, _, model = name.partition(":")
    if library in WEIGHTS_IN_FOLDERS and model.startswith(LOCAL):
        return model.removeprefix(LOCAL)
    return model if library == "onnx" else ""


def with_absolute_place(name: str) -> str:
    """The name with its folder or file from the root, for processes with another working folder."""
    place = place_in(name)
    return name.removesuffix(place) + str(Path(place).expanduser().absolute()) if place else name


def _functions(files: Iterable[Path]) -> tuple[list[str], str]:
    """Names of the functions in source files that build a model, and the text of the files."""
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(files))
    return re.findall(r"@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", text), text


def _check_open_clip(folder: Path, name: str, model: str, tag: str) -> None:
    known = sorted(path.stem for path in (folder / "model_configs").glob("*.json"))
    if model not in known:
        raise BackboneError(
            f"backbone = {name!r}: open_clip has no model {model!r}{_similar(model, known)}"
        )
    tags = (folder / "pretrained.py").read_text(encoding="utf-8", errors="replace")
    clean = re.escape(tag.lower().replace("-", "_"))
    if not tag or not re.search(rf"\b{clean}\b", tags):
        raise BackboneError(
            f"backbone = {name!r}: write MODEL/TAG, such as {model}/openai; open_clip has no tag "
            f"{tag!r}"
        )


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.3)
    return f"; similar names: {', '.join(close)}" if close else ""


def check_weights_file(path: Path) -> None:
    """Raise BackboneError unless `path` is a file that begins as safetensors or torch write it, or a
    folder with one; reads only its header.
    """
    shown, allowed = f"weights-path = '{path}'", "a .safetensors file or a torch state dict"
    if path.suffix == ".onnx" and path.is_file():
        return
    names = {name for names in WEIGHTS_IN_FOLDERS.values() for name in names}
    if found := [path / name for name in sorted(names) if (path / name).is_file()]:
        for each in found:
            check_weights_file(each)
        return
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        reason = "no such file" if not path.exists() else error.strerror
        raise BackboneError(f"{shown}: {reason}; give {allowed}") from None
    if path.suffix != ".safetensors":
        if not start.startswith(TORCH_FILES):
            raise BackboneError(f"{shown} is no torch file; give {allowed}")
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):
            return
    except (SafetensorError, OSError) as error:
        raise BackboneError(
            f"{shown} is no safetensors file, or is incomplete ({error}); copy it again"
        ) from None


# Names that an error shows of each list, and characters of each.
MOST_SHOWN, LONGEST_SHOWN = 12, 30


def in_column_order(given: Iterable[object]) -> tuple[tuple[str, ...], list[int]]:
    """Names of columns in their public order: as numbers if all are whole numbers, else as texts.

    Args:
        given: names in the order of a table.

    Returns:
        The names, and the position of each in the table; no names where they only number the columns,
        as data frames without names do, or where all columns have one name.

    Raises:
        DataError: for a name that is missing or stands twice.

    Example:
        >>> in_column_order(["bmi", "age"]), in_column_order([1, 0, 2])
        ((('age', 'bmi'), [1, 0]), ((), [1, 0, 2]))
    """
    names = [normal(str(name)) for name in given]
    if len(names) > 1 and len(set(names)) == 1:
        return (), list(range(len(names)))
    if wrong := [name for name in names if not name or names.count(name) > 1]:
        raise DataError(
            f"features have the column {wrong[0]!r} twice (blanks at the ends do not count); rename one"
            if wrong[0]
            else "features have a column without a name; name it"
        )
    whole = all(name.isascii() and name.isdecimal() and len(name) < 10 for name in names)
    order = sorted(range(len(names)), key=lambda at: (int(names[at]) if whole else 0, names[at]))
    found = tuple(names[at] for at in order)
    if found == tuple(map(str, range(len(found)))):
        return (), order
    return found, order


def with_columns(fingerprint: str, names: Sequence[str]) -> str:
    """The fingerprint of features with these columns.

    Args:
        fingerprint: of the features.
        names: of `in_column_order`; empty for none.

    Raises:
        DataError: for names that are too long for a message.

    Example:
        >>> with_columns("features-2", ["age", "bmi"])
        'features-2["age","bmi"]'
    """
    found = fingerprint + (json.dumps(list(names), separators=(",", ":")) if names else "")
    if len(found) > LONGEST_FINGERPRINT:
        raise DataError(
            f"the names of {len(names)} columns take {len(found)} characters; a message holds "
            f"{LONGEST_FINGERPRINT}; shorten them, or give arrays with the same columns at all sites"
        )
    return found


def columns_in(fingerprint: str) -> tuple[str, ...]:
    """The names in a fingerprint of `with_columns`; empty without any: sites write the fingerprint.

    Example:
        >>> columns_in('features-2["age","bmi"]^0.5'), columns_in("features-2")
        (('age', 'bmi'), ())
    """
    _, mark, text = fingerprint.partition("[")
    try:
        names, _ = json.JSONDecoder().raw_decode(mark + text)
    except (ValueError, RecursionError):
        return ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def shown(fingerprint: str) -> str:
    """What an error shows of a fingerprint: the columns where they have names, else its beginning.

    Example:
        >>> shown('features-2["age","bmi"]'), shown("0123456789abcdef0")
        ("(columns 'age', 'bmi')", '0123456789abcdef')
    """
    names = columns_in(fingerprint)
    return f"(columns {listed(names)})" if names else fingerprint[:16]


def check_columns(own: Sequence[str], wanted: Sequence[str], whose: str) -> None:
    """Refuse features of other columns.

    Args:
        own: names of the columns, of `in_column_order`; empty for none.
        wanted: the same of what they are compared with.
        whose: these are, such as "the model".

    Raises:
        DataError: with both lists.
    """
    if tuple(own) == tuple(wanted):
        return
    if not wanted:
        raise DataError(
            f"the features have the columns {listed(own)}, but those of {whose} have no names; give "
            "an array with the columns in its order, such as frame.to_numpy()"
        )
    if not own:
        raise DataError(
            f"the features have no names of columns, and {whose} has {listed(wanted)}; give a data "
            "frame with these names, such as pandas.DataFrame(x, columns=[...])"
        )
    missing, more = ([n for n in a if n not in b] for a, b in ((wanted, own), (own, wanted)))
    raise DataError(
        f"the features have the columns {listed(own)}, and {whose} has {listed(wanted)}; "
        f"missing: {listed(missing)}; too many: {listed(more)}; rename or select columns"
    )


def listed(names: Sequence[str]) -> str:
    """Names for an error, the first of many."""
    more = f", ... ({len(names)} in all)" if len(names) > MOST_SHOWN else ""
    return (", ".join(repr(name[:LONGEST_SHOWN]) for name in names[:MOST_SHOWN]) or "none") + more


KNOWN_DIMENSIONS = {
    "torchvision:mobilenet_v2": 1280,
    "torchvision:resnet50": 2048,
    "torchvision:resnet18": 512,
    "timm:tf_efficientnet_lite0": 1280,
}
# Side of the images of the digits.
DIGITS = 8


def named_dimension(data: str, backbone: str, image_size: int) -> int:
    """The dimension of a backbone's features by its name, without loading it or reading a file.

    Args:
        data: kind of data, the setting `data`.
        backbone: its name, the setting `backbone`.
        image_size: side of the images in pixels; 0 if it is not set.

    Returns:
        The dimension; 0 where only the sites know it.

    Example:
        >>> named_dimension("imagefolder", "pixels:rgb", 8), named_dimension("digits", "pixels", 0)
        (192, 64)
        >>> named_dimension("safetensors", "pixels", 28)
        0
    """
    if backbone not in OF_IMAGE_SIZE:
        return KNOWN_DIMENSIONS.get(backbone, 0)
    if data in OF_FEATURES or not (image_size or data == "digits"):
        return 0
    return (3 if backbone == "pixels:rgb" else 1) * (image_size or DIGITS) ** 2
