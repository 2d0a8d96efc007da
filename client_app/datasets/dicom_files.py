"""A DICOM file as it is: with or without a preamble, a transfer syntax, or data that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras import DECODERS, install_command, needed_for

from .left_out import open_regular

if TYPE_CHECKING:
    from pydicom import Dataset
    from pydicom.uid import UID

Array = np.ndarray[Any, np.dtype[Any]]
DICOM = "a folder of DICOM files"
# Bytes before the mark of a file, and the mark.
PREAMBLE, MARK = 128, b"DICM"
# The group of a file's meta information; and groups with which a file without a preamble begins.
META = 0x0002
FIRST_GROUPS = frozenset({META, 0x0008})
# Longest value of a first element: a name or an identifier.
LONGEST_FIRST = 1024


def is_dicom(stream: BinaryIO) -> bool:
    """Whether a file is DICOM by its content: by its mark, or by its first element. Leaves the
    stream at its beginning.
    """
    stream.seek(0)
    start = stream.read(PREAMBLE + len(MARK))
    stream.seek(0)
    if start[PREAMBLE:] == MARK:
        return True
    explicit = _is_vr(start[4:6])
    if len(start) < 8 or not (explicit or not start[6] | start[7]):
        return False
    orders: tuple[Literal["little", "big"], ...] = ("little", "big") if explicit else ("little",)
    length = start[6:8] if explicit else start[4:8]
    return any(
        int.from_bytes(start[:2], order) in FIRST_GROUPS
        and int.from_bytes(length, order) <= LONGEST_FIRST
        for order in orders
    )


def is_dicom_file(file: Path) -> bool:
    """The same for a path. Raises OSError for a file that cannot be opened."""
    with open_regular(file) as stream:
        return is_dicom(stream)


def _is_vr(letters: bytes) -> bool:
    """Whether two bytes are a value representation, as every explicit element has. pydicom's rule:
    capital letters.
    """
    return len(letters) == 2 and letters.isalpha() and letters.isupper()


@dataclass(frozen=True)
class Encoding:
    """How a file says that its data are encoded, and how they are.

    Attributes:
        stated: the transfer syntax in the file's meta information; empty if there is none.
        found: Implicit VR Little Endian, or Explicit VR in either byte order, as the first element
            has it; empty if there is none.
    """

    stated: UID
    found: UID

    @property
    def follows(self) -> bool:
        """Whether the data are as stated, so that parts of the file can be read by themselves."""
        return bool(self.stated) and (
            not self.found or self.stated.is_implicit_VR == self.found.is_implicit_VR
        )

    @property
    def syntax(self) -> UID:
        """The transfer syntax by which the file is read."""
        return self.stated or self.found


def encoding_of(stream: BinaryIO) -> Encoding:
    """The encoding of a file; leaves the stream at its beginning.

    Args:
        stream: of the file.

    Raises:
        InvalidDicomError: if the file is not DICOM.
        DataError: for data in another byte order than the file states, and for a file that is
            deflated, which may inflate to anything.
    """
    with needed_for(DICOM):
        from pydicom.errors import InvalidDicomError
        from pydicom.filereader import read_partial
        from pydicom.uid import (
            UID,
            ExplicitVRBigEndian,
            ExplicitVRLittleEndian,
            ImplicitVRLittleEndian,
        )

    if not is_dicom(stream):
        raise InvalidDicomError("neither the mark of DICOM nor a first element of it")
    if _is_deflated(stream):
        raise DataError(
            "it is deflated as a whole; export it uncompressed (Explicit VR Little Endian)"
        )
    # Stops before the first element behind the meta information.
    header = read_partial(stream, stop_when=lambda *_: True, force=True)
    first = stream.read(6)
    stream.seek(0)
    stated = UID(header.file_meta.get("TransferSyntaxUID") or "")
    if not first:
        return Encoding(stated, UID(""))
    # The group of every public element is below 256, in its own byte order.
    swapped = not first[0] and bool(first[1])
    explicit = _is_vr(first[4:6])
    public = not (first[0] and first[1])
    if stated and public and swapped == (stated != ExplicitVRBigEndian):
        raise DataError(
            f"it states the transfer syntax {stated.name}, and its data have the other byte order"
        )
    if not explicit:
        return Encoding(stated, ImplicitVRLittleEndian)
    return Encoding(stated, ExplicitVRBigEndian if swapped else ExplicitVRLittleEndian)


def _is_deflated(stream: BinaryIO) -> bool:
    """Whether a file states that it is deflated; leaves the stream at its beginning.

    pydicom inflates such a file as a whole, however little of it is read.
    """
    with needed_for(DICOM):
        from pydicom.filereader import read_dataset, read_preamble
        from pydicom.uid import DeflatedExplicitVRLittleEndian

    read_preamble(stream, force=True)
    # The meta information is never deflated.
    meta = read_dataset(stream, False, True, stop_when=lambda tag, *_: tag.group != META)
    stream.seek(0)
    return bool(meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian)


def read_header(stream: BinaryIO, tags: Sequence[str], encoding: Encoding) -> Dataset:
    """The header of a DICOM file, without pixels; leaves the stream at its beginning.

    Args:
        stream: of the file.
        tags: to read.
        encoding: of the file.
    """
    with needed_for(DICOM):
        from pydicom import dcmread

    header = dcmread(stream, stop_before_pixels=True, specific_tags=list(tags), force=True)
    header.file_meta.TransferSyntaxUID = encoding.syntax
    stream.seek(0)
    return header


def read_pixels(stream: BinaryIO, frame: int, encoding: Encoding) -> Array:
    """The pixels of one frame, as pydicom decodes them.

    Args:
        stream: of the file.
        frame: its number, from zero.
        encoding: of the file. pydicom reads one frame alone by the stated transfer syntax, so a
            file that does not follow it is read as a whole.

    Raises:
        DataError: for compressed pixels whose compression the file does not state.
    """
    with needed_for(DICOM):
        from pydicom import dcmread
        from pydicom.pixels.utils import pixel_array

    if encoding.follows:
        return np.asarray(pixel_array(stream, index=frame))
    dataset = dcmread(stream, force=True)
    if not encoding.stated:
        if "PixelData" in dataset and dataset["PixelData"].is_undefined_length:
            raise DataError("its pixels are compressed, and it states no transfer syntax")
        dataset.file_meta.TransferSyntaxUID = encoding.found
    return np.asarray(pixel_array(dataset, index=frame))


def plugins_for(syntax: str, deep: bool) -> tuple[str, ...] | None:
    """The decoders of a transfer syntax that are installed here and can decode it.

    Args:
        syntax: UID of the transfer syntax.
        deep: whether more than 8 bits are stored.

    Returns:
        Their names, none for pixels that are not compressed; None if there is no decoder.

    Raises:
        NotImplementedError: for a transfer syntax that pydicom does not know.
    """
    with needed_for(DICOM):
        from pydicom.pixels.decoders.base import get_decoder
        from pydicom.uid import UID, JPEGExtended12Bit

    decoder = get_decoder(UID(syntax))
    if not decoder.is_available:
        return None
    # Pillow's JPEG has 8 bits.
    able = [
        name
        for name in decoder.available_plugins
        if not (deep and syntax == JPEGExtended12Bit and name == "pillow")
    ]
    return None if decoder.available_plugins and not able else tuple(able)


def remedy_for(syntax: str) -> str:
    """What to do about an image that cannot be decoded: a decoder may be missing.

    Args:
        syntax: UID of its transfer syntax.
    """
    with needed_for(DICOM):
        from pydicom.pixels.decoders.base import get_decoder
        from pydicom.uid import UID

    export = "export it again"
    try:
        missing = get_decoder(UID(syntax)).missing_dependencies
    except NotImplementedError:
        return export
    uncompressed = "export it uncompressed (Explicit VR Little Endian)"
    return f"run {install_command(DECODERS)}, or {uncompressed}" if missing else export
