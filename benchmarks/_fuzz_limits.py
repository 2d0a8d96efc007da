"""Parse bytes in a child process that may use only so much memory and processor time."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# Bytes of memory that any parser may take, and for each byte of its input. The largest factor of an
# honest message is 48: a bit marks an entry of four bytes.
FIXED, FACTOR = 2**26, 64
# Processor time of one call. An honest one takes milliseconds.
SECONDS = 20
MEMORY = "more memory than its bytes allow"
TIME = f"more than {SECONDS} seconds of processor time"
ACCEPTED, REFUSED = "accepted", "refused"
Parse = Callable[[bytes], object]


def limited(parse: Parse, allowed: Sequence[type[Exception]], content: bytes) -> str:
    """Parse in this process, which must be a child, under the limit on memory.

    Args:
        parse: raises one of `allowed` for bytes that are not valid.
        allowed: types of its exceptions, exactly; a subclass is another type.
        content: the bytes.

    Returns:
        ACCEPTED, REFUSED, or what is wrong.
    """
    # What is mapped counts, not what is touched: a request for memory that nobody fills is one too.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = pages * mmap.PAGESIZE + FIXED + FACTOR * len(content)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        parse(content)
        found = None
    except BaseException as error:
        found = error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    if found is None:
        return ACCEPTED
    if _lacked_memory(found):
        return MEMORY
    if type(found) in allowed:
        return REFUSED
    at = traceback.extract_tb(found.__traceback__)[-1]
    place = f"{Path(at.filename).name} line {at.lineno}"
    return f"{type(found).__name__} in {place}: {str(found)[:200]}"


def _lacked_memory(error: BaseException | None) -> bool:
    """Whether an allocation has failed, also where a parser has made another exception of it."""
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def in_child(work: Iterable[Callable[[], str]]) -> list[str]:
    """Results of calls in a child process, in order.

    A call that ends the child (a crash, or too much processor time) has the last result, and the
    calls after it are not made.

    Args:
        work: each returns a short text.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            for call in work:
                spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
                hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
                resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + 1 + SECONDS, hard))
                text = call().encode()
                os.write(write, struct.pack("<I", len(text)) + text)
        except BaseException:
            traceback.print_exc()
        finally:
            # Nothing of the parent's, such as its tests, may go on in the child.
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        found = []
        while head := stream.read(4):
            found.append(stream.read(*struct.unpack("<I", head)).decode())
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ended = os.WTERMSIG(status)
        name = signal.Signals(ended).name
        found.append(TIME if ended == signal.SIGXCPU else f"the process was ended by {name}")
    return found


def outcome(parse: Parse, allowed: Sequence[type[Exception]], content: bytes) -> str:
    """As `limited`, in a child process of its own."""
    return in_child([lambda: limited(parse, allowed, content)])[0]
