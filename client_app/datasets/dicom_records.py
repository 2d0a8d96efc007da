"""Records of DICOM files: of each one image, or all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from fedsurrogate.client_app.datasets.dicom_pixels import open_place
from fedsurrogate.client_app.datasets.duplicates import remembered, same_files
from fedsurrogate.client_app.datasets.readers import content_key
from fedsurrogate.client_app.datasets.records import Records, select
from fedsurrogate.client_app.node_config import Frames

# Images of a file of which each is taken: a header may state any number.
MOST_FRAMES = 10_000


@dataclass(frozen=True, repr=False)
class DicomImage:
    """An image file and values of its header. Without repr, because the header contains the
    patient's ID.

    Attributes:
        path: of the file.
        keys: values by which a table may name the image, see KEYS, or its bag.
        issuer: of the patient's ID; empty if the header has none.
        frames: number of images in the file.
        syntax: UID of the transfer syntax.
        deep: whether more than 8 bits are stored.
        burned_in: whether text is burned into the pixels, as the header states.
    """

    path: Path
    keys: dict[str, str]
    issuer: str
    frames: int
    syntax: str
    deep: bool
    burned_in: bool


def opened(
    root: Path,
    images: Sequence[DicomImage],
    frames: Frames,
    decoders: Sequence[tuple[str, tuple[str, ...]]],
) -> Records:
    """Records of files, of each one image.

    Args:
        root: folder of the files.
        images: of the files.
        frames: which frame of a file with several.
        decoders: the available ones for every transfer syntax.
    """
    # No object that lasts keeps a header.
    places = [(image.path, image.frames // 2 if frames == "middle" else 0) for image in images]
    paths = [path for path, _ in places]
    # The key includes decoders: a new decoder may read an image that was broken before.
    content = repr(("dicom", content_key(root, paths), frames, decoders))
    key = hashlib.sha256(content.encode()).hexdigest()
    return Records(
        [""] * len(paths),
        key,
        opener=partial(open_place, places),
        same=partial(remembered, key, partial(same_files, paths)),
        place=lambda i: str(paths[i]),
    )


def each_frame(records: Records, images: Sequence[DicomImage]) -> Records:
    """Records of all images in the files of records.

    Args:
        records: of files.
        images: of all files that were found, among which these are.
    """
    # A header may state any number, of which none are taken beyond a limit.
    counts = [max(1, each.frames) if each.frames <= MOST_FRAMES else 1 for each in images]
    if sum(counts) == len(counts):
        return records
    owners = [file for file, count in enumerate(counts) for _ in range(count)]
    starts = [0, *accumulate(counts)]
    places = [(images[file].path, at - starts[file]) for at, file in enumerate(owners)]
    whole = records if records.found is None else records.found.records
    files = range(len(images)) if records.found is None else records.found.rows.tolist()
    rows = [at for at, file in enumerate(files) for _ in range(counts[file])]
    every = Records(
        [""] * len(places),
        _key(whole, owners),
        opener=partial(open_place, places),
        place=lambda i: f"{places[i][0]} (image {places[i][1] + 1})",
    )
    own = select(every, [at for file in files for at in range(starts[file], starts[file + 1])])
    return replace(
        select(records, rows),
        key=_key(records, rows),
        opener=own.opener,
        place=own.place,
        found=own.found,
    )


def _key(records: Records, rows: Sequence[int]) -> str:
    return hashlib.sha256(repr((records.key, rows)).encode()).hexdigest()
