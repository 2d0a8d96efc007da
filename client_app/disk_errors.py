"""What the operating system says of a file, told as an error of this software."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_as(kind: type[Exception], what: str, then: str) -> Iterator[None]:
    """Raise `kind` for an OSError of the block.

    Args:
        kind: of error.
        what: failed.
        then: what follows of it, or is to be done.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error}); {then}") from None
