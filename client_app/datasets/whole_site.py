"""Why a site can use none of its records: a closed list of causes that one record cannot have.

Readers, and whatever looks at one record, are total for each record: one that cannot be used is
left out alone (left_out.py, one_record.py). What remains concerns all records, however many there
are and whatever is in them, and `CAUSES` names it. An error that is not in this list is a defect of
this program: it may depend on a single record, and client_app/governance/uncharged.py says what
follows.
"""

from __future__ import annotations

import errno

import torch

from fedsurrogate.common.errors import BackboneError, DataError, PackageError


class SourceError(DataError):
    """The folder, a file, a table or the cache as a whole cannot be used, or its columns cannot."""


class NoRecordsError(DataError):
    """No record is left that can be used: the site is one without records."""


# Failures of a disk or of the system. Others, such as a missing file, a record may have.
SYSTEM = frozenset(
    getattr(errno, name)
    for name in ("EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EROFS", "ESTALE")
)
# torch before 2.8 has no class for it.
AcceleratorError: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
CAUSES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((NoRecordsError,), "no record can be used"),
    ((SourceError,), "the folder, its files or their columns cannot be used"),
    ((BackboneError,), "the backbone cannot be loaded, or is another one"),
    ((PackageError,), "a package is missing"),
    # Features have one size, so what they take depends on the number of records, not on any one.
    ((MemoryError, torch.OutOfMemoryError), "there is not enough memory for all records"),
    ((AcceleratorError,), "the GPU failed"),
)


def cause_of(error: BaseException) -> str:
    """The cause in the list that an error has; empty for an error outside of the list.

    Args:
        error: raised where no record is looked at alone.

    Example:
        >>> cause_of(SourceError("no such folder"))
        'the folder, its files or their columns cannot be used'
        >>> cause_of(ValueError("embedded null byte")), cause_of(DataError("a label"))
        ('', '')
    """
    if isinstance(error, OSError) and error.errno in SYSTEM:
        return "the disk or the system failed"
    return next((cause for kinds, cause in CAUSES if isinstance(error, kinds)), "")
