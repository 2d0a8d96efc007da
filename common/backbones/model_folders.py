"""Where the files of a backbone are: a folder as the Hugging Face hub has them, the hub's cache on this
machine, or a file of weights with or without a configuration beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BackboneError
from ..extras import needed_for
from .backbone_names import HUB, WEIGHTS_IN_FOLDERS, is_of_hub, place_in
from .weight_files import first_sentence

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
