"""A parser of foreign bytes as the registry has it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks._fuzz_mutations import Change, of_bytes
from fedsurrogate.common.errors import SurrogateError
from tests.pins import messages

NO_CHANGE: Callable[[bytes], bytes] = lambda content: content  # noqa: E731


@dataclass(frozen=True)
class Parser:
    """A parser of foreign bytes.

    Attributes:
        name: of the kind of message.
        parse: the bytes.
        allowed: types of its exceptions, exactly.
        samples: valid bytes.
        change: of a sample.
        sealed: puts a valid signature on changed bytes, so that they get past the check of it.
    """

    name: str
    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    samples: Sequence[bytes]
    change: Change
    sealed: Callable[[bytes], bytes] = NO_CHANGE

    def case(self, seed: int, number: int) -> bytes:
        """The bytes of one case, the same at every call."""
        random = Random(f"{seed} {self.name} {number}")
        sample = self.samples[random.randrange(len(self.samples))]
        if random.random() < 0.15:
            return of_bytes(random, sample)
        changed = self.change(random, sample)
        return self.sealed(changed) if random.random() < 0.9 else changed


def of_file(read: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    """A reader of files as a parser of bytes."""

    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / name
            file.write_bytes(content)
            return read(file)

    return parse


REFUSES = (SurrogateError,)
PINNED = messages.messages()


def pinned(*begins: str) -> list[bytes]:
    """Messages of fixed values whose names begin so."""
    return [content for name, content in PINNED.items() if name.startswith(begins)]
