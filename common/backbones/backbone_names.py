"""Names of backbones and files of weights, checked without loading a library: torch alone takes
over a second.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from fedsurrogate.common.errors import BackboneError
from fedsurrogate.common.extras.packages import check_installed, is_installed

FORMS = "'pixels', 'pixels:rgb', 'torchvision:MODEL', 'open_clip:MODEL/TAG' or 'timm:MODEL'"
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
    if library not in LIBRARIES or not model:
        raise BackboneError(f"backbone = {name!r} is unknown; use {FORMS}")
    if required:
        check_installed(library, f"backbone = {name!r}")
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
    """Raise BackboneError unless `path` is a file that begins as safetensors or torch write it;
    reads only its header.
    """
    shown, allowed = f"weights-path = '{path}'", "a .safetensors file or a torch state dict"
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
