"""What a function finds in a child of this process."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch


def in_child(fork: Callable[[], int], function: Callable[[], Any]) -> Any:
    """The result of a function in a child.

    fork: 0 in the child, as `os.fork`.
    """
    source, sink = os.pipe()
    if fork() == 0:
        try:
            torch.set_num_threads(1)
            with os.fdopen(sink, "wb") as stream:
                pickle.dump(function(), stream)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as stream:
        found = pickle.load(stream)
    os.wait()
    return found
