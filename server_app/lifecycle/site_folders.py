"""Folders of simulated sites: the user's, or temporary ones where these cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsurrogate.common.machine.user_folders import (
    CACHE,
    NAME,
    STATE,
    user_folder,
    why_not_writable,
)

WHAT = {STATE: "log and state", CACHE: "computed features"}


@contextmanager
def site_folders() -> Iterator[list[str]]:
    """Let simulated sites write, whatever the home folder is. Only for sites without data of their
    own.

    What a simulated site keeps is worth nothing after its run. So a private temporary folder serves
    where the user's cannot be written; it is removed at the end. The variables hold for this
    process and for those that it starts.

    Yields:
        Remarks for the user, none if the user's folders can be written.
    """
    bad = {name: why for name in (STATE, CACHE) if (why := why_not_writable(user_folder(name)))}
    if not bad:
        yield []
        return
    remarks = [
        f"{str(user_folder(name))!r} cannot be written ({why}); {WHAT[name]} of the simulated "
        f"sites go to a temporary folder; set {name} to a folder that you may write to keep them"
        for name, why in bad.items()
    ]
    before = {name: os.environ.get(name) for name in bad}
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        # The folders exist, so that they count although there may be older ones.
        for name in bad:
            (Path(folder) / name.lower() / NAME).mkdir(parents=True)
            os.environ[name] = str(Path(folder) / name.lower())
        try:
            yield remarks
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
