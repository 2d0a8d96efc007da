"""Weights of a backbone in a file: read without running code, cut out of a checkpoint, and fitted to a
network without a tensor too many or too few; and where the files of a backbone are, in a folder or in the
hub's cache.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LOG, BackboneError
from ..extras import needed_for
from .backbone_names import HUB, WEIGHTS_IN_FOLDERS, is_of_hub, place_in

# The configurations in a folder, by library; the first decides what is built.
CONFIGS = {
    "timm": ("config.json",),
    "open_clip": ("open_clip_config.json",),
    "hf": ("config.json", "preprocessor_config.json"),
}
PUT = (
    "put them on this machine, and name the folder, or a single file, in weights-path; a hospital names "
    "it in its node-config"
)


@dataclass(frozen=True)
class Files:
    """The files of a backbone on this machine.

    Attributes:
        folder: with the configuration; None without files.
        weights: None without files.
    """

    folder: Path | None = None
    weights: Path | None = None

    def config(self, name: str, needed: bool = True) -> dict[str, Any]:
        """A configuration in the folder; empty where it is not needed and not there.

        Raises:
            BackboneError: for a file that is missing, or is no JSON object.
        """
        file = None if self.folder is None else self.folder / name
        if file is None or not file.is_file():
            if not needed:
                return {}
            raise BackboneError(
                f"'{self.folder}' has no {name}, which says what the weights are for; copy it from "
                "where they are published"
            )
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BackboneError(f"'{file}' is no JSON ({error}); copy it again") from error
        if not isinstance(content, dict):
            raise BackboneError(f"'{file}' is no JSON object; copy it again")
        return content


def files_of(name: str, weights_path: str = "", download: bool = True) -> Files:
    """The files of a backbone.

    Args:
        name: of the backbone.
        weights_path: a file or folder; empty for the folder in the name, or the hub's.
        download: whether what is not on this machine may be fetched from the hub.

    Returns:
        The files; none where the library fetches its own weights.

    Raises:
        BackboneError: for files that are missing here.
    """
    library, _, model = name.partition(":")
    named = weights_path or place_in(name)
    if not named:
        hub = is_of_hub(name)
        return _from_hub(name, library, model.removeprefix(HUB), download) if hub else Files()
    place = Path(named).expanduser()
    if place.is_dir():
        return Files(place, weights_in(place, library))
    if not weights_path and not place.exists():
        raise BackboneError(f"backbone = {name!r}: {place.absolute()} does not exist")
    return Files(place.parent, place)


def weights_in(folder: Path, library: str) -> Path:
    """The file of weights in a folder. Raises BackboneError without one."""
    wanted = WEIGHTS_IN_FOLDERS.get(library, ())
    for each in wanted:
        if (folder / each).is_file():
            return folder / each
    there = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
    need = f"has no {' or '.join(wanted)}, but {there}" if wanted else "is a folder"
    raise BackboneError(f"'{folder}' {need}; give a .safetensors file or a torch state dict")


def _from_hub(name: str, library: str, repository: str, download: bool) -> Files:
    """The files of a repository of the hub, in its cache on this machine."""
    with needed_for(f"backbone = {name!r}"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

    repository, _, revision = repository.partition("@")

    def fetched(file: str) -> Path:
        place = hf_hub_download(
            repository, file, revision=revision or None, local_files_only=not download
        )
        return Path(place)

    weights = WEIGHTS_IN_FOLDERS[library]
    try:
        folder, *_ = [fetched(file).parent for file in CONFIGS[library]]
        try:
            return Files(folder, fetched(weights[0]))
        except EntryNotFoundError:
            return Files(folder, fetched(weights[1]))
    except (OSError, EntryNotFoundError, ValueError) as error:
        needed = f"{', '.join(CONFIGS[library])} and {' or '.join(weights)}"
        where = f"https://huggingface.co/{repository} ({needed})"
        raise missing_files(name, where, error, download) from error


def missing_files(
    name: str, where: str, error: Exception | None = None, download: bool = False
) -> BackboneError:
    """The error for files that are not here: which, and where to put them.

    Args:
        name: of the backbone.
        where: the files are published, and their names.
        error: of the attempt to fetch them.
        download: whether they may be fetched.
    """
    why = "are not on this machine, and download-weights = false"
    if download and error:
        why = f"cannot be fetched ({first_sentence(error)})"
    return BackboneError(f"the files of backbone = {name!r} {why}; fetch them from {where}, {PUT}")


Weights = Mapping[str, Tensor]
# First part of the name of tensors that only training or another task uses.
OTHER_PARTS = re.compile(
    r"(head|heads|fc|classifier|\w+_head|pooler|decoder|predictor|projector|prototypes|last_layer"
    r"|mask_token|linear)(\.|$)"
)
# Dictionaries in dictionaries of a checkpoint that are looked into.
DEEPEST = 4


def kept_weights(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Drop the entries that only training uses."""
    return {key: value for key, value in weights.items() if not key.endswith("num_batches_tracked")}


def network_part(given: Weights, names: Collection[str], path: Path) -> dict[str, Tensor]:
    """The tensors of one network in a checkpoint, under the network's own names.

    What training scripts put before the names (`module.`, `backbone.`, `teacher.`) and other networks
    in the file are left out.

    Args:
        given: tensors of the file.
        names: of tensors that the network has.
        path: of the file.

    Raises:
        BackboneError: for a file with two such networks.
    """
    counts: Counter[str] = Counter()
    for key in given:
        parts = key.split(".")
        for at in range(len(parts)):
            if ".".join(parts[at:]) in names:
                counts["".join(f"{part}." for part in parts[:at])] += 1
    # Names that most networks have, such as norm.weight, tell nothing.
    most = max(counts.values(), default=0)
    best = [prefix for prefix, count in counts.items() if 2 * count > len(names) and count == most]
    if len(best) > 1:
        raise BackboneError(
            f"'{path}' has two networks, {best[0]!r} and {best[1]!r}; save the one that is meant in a "
            "file of its own"
        )
    prefix = best[0] if best else ""
    if left := [key for key in given if not key.startswith(prefix)]:
        LOG.info("%d tensors of %s are not the backbone's, such as %s", len(left), path, left[0])
    return {key.removeprefix(prefix): each for key, each in given.items() if key.startswith(prefix)}


def load_weights(
    model: nn.Module,
    given: Weights,
    shown: tuple[str, Path],
    head: tuple[str, ...] = (),
    convert: Callable[[dict[str, Tensor]], Weights] | None = None,
) -> None:
    """Load the tensors of a file into a network.

    Args:
        model: takes them.
        given: tensors of the file.
        shown: name of the backbone and path of the file, for errors.
        head: beginnings of the names of its classifier, which is left out.
        convert: names and shapes of another form of the file into the network's; used only where
            they do not fit already.

    Raises:
        BackboneError: unless each tensor of the network has one that fits, and no other is left.
    """
    name, path = shown
    expected = kept_weights(model.state_dict())
    found = network_part(given, expected, path)
    fits = all(key in found and found[key].shape == each.shape for key, each in expected.items())
    if convert is not None and not fits:
        found = dict(convert(found))
    found = {
        key: value
        for key, value in kept_weights(found).items()
        if key in expected or not (key.startswith(head) or OTHER_PARTS.match(key))
    }
    shared = sorted(expected.keys() & found.keys())
    # Numbers are looked at where the shape fits: another one may state any number of them.
    fit = [key for key in shared if expected[key].shape == found[key].shape]
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [key for key in shared if key not in fit],
        "without plain, finite numbers": [key for key in fit if not _is_plain(found[key])],
    }
    mismatches = [
        f"{len(keys)} {what} ({', '.join(keys[:3])})" for what, keys in problems.items() if keys
    ]
    if mismatches:
        raise BackboneError(
            f"the weights in '{path}' do not fit {name!r}: {'; '.join(mismatches)}; give its own "
            "file"
        )
    # Some modules convert weights of earlier versions of themselves. These have the names and shapes
    # of the current one, and safetensors keep no versions.
    versioned = OrderedDict(found)
    versioned._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    model.load_state_dict(versioned, strict=False)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has plain finite numbers: not sparse, quantised or without memory."""
    plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return plain and not tensor.is_complex() and bool(tensor.isfinite().all())


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights, by name. Raises BackboneError for a file without them."""
    if not path.is_file():
        raise BackboneError(
            f"weights-path = '{path}': no such file; give a .safetensors file or a torch state dict"
        )
    content: object
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            _check_archive(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # By its name: nothing here may unpickle, so nothing imports pickle.
        if type(error).__name__ == "UnpicklingError":
            raise BackboneError(
                f"weights-path = '{path}' is a pickle of more than tensors, or none at all, and "
                "reading it could run any code; load it where you trust it, and save "
                "model.state_dict() with torch.save, or as safetensors"
            ) from error
        raise BackboneError(
            f"weights-path = '{path}' is no readable safetensors or torch file: "
            f"{first_sentence(error)}"
        ) from error
    if isinstance(content, dict):
        content = content.get("state_dict", content)
    tensors = dict(_tensors(content)) if isinstance(content, dict) else {}
    if not tensors:
        raise BackboneError(
            f"weights-path = '{path}' holds no state dict; save model.state_dict() into it"
        )
    return tensors


def _tensors(content: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a dictionary and of those in it, with the keys on the way as a prefix."""
    for key, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and prefix.count(".") < DEEPEST:
            yield from _tensors(value, f"{prefix}{key}.")


def _check_archive(path: Path) -> None:
    """Raise ValueError for a torch file that takes more memory than it has bytes.

    torch.save stores its members as they are, but torch.load also unpacks compressed ones, and reads
    one that is listed twice, twice.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    stored = all(each.compress_type == zipfile.ZIP_STORED for each in members)
    if not stored or sum(each.file_size for each in members) > path.stat().st_size:
        raise ValueError("its tensors are packed and larger than the file; save it by torch.save")


def first_sentence(error: Exception) -> str:
    """The first whole sentence of an error in one line, which may go over several in its text."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")
