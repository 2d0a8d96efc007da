"""The state of each secure sum on a site's disk."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import StateError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_sum.member import SumState
from fedsurrogate.common.secure_sum.of_run import context_of
from fedsurrogate.common.wire.sum_proto import pack_state, unpack_state

NAME = re.compile(r"[0-9a-f]{32}")


def name_of(info: Mapping[str, object]) -> str:
    """The name of the sum in a request. Raises SurrogateError."""
    name = str(info.get("sum", ""))
    if not NAME.fullmatch(name):
        raise SurrogateError(f"a request without the name of its secure sum ({name[:40]!r})")
    return name


def file_of(node: NodeConfig, name: str, site: str) -> Path:
    """The file with a sum's state."""
    return node.state / "sums" / f"{name}-{site}.pb"


def create(node: NodeConfig, policy: Policy, name: str, state: SumState) -> None:
    """Write the first state of a sum.

    Args:
        node: the site's settings.
        policy: says when old states are removed.
        name: of the sum.
        state: to write.

    Raises:
        StateError: if there was one of this name: then its keys are not made again; or if it cannot
            be written.
    """
    file = file_of(node, name, state.site)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("*.pb"):
            if time.time() - old.stat().st_mtime > policy.most_seconds:
                old.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(pack_state(state))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        # A file in the place of the folder exists as well.
        if isinstance(error, FileExistsError) and file.exists():
            raise StateError(
                f"the secure sum {name!r} has begun at this site; it does not begin a second time"
            ) from None
        raise StateError(
            f"{file} cannot be written ({error}); see state-dir in the node-config"
        ) from None


def read(run: Run, node: NodeConfig, name: str, site: str) -> SumState:
    """A sum's state.

    Args:
        run: whose sum it is.
        node: the site's settings.
        name: of the sum.
        site: name of the site.

    Raises:
        StateError: if this site did not begin it, or began it with other settings.
    """
    file = file_of(node, name, site)
    try:
        state = unpack_state(file.read_bytes())
    except OSError as error:
        raise StateError(
            f"this site has no state of the secure sum {name!r} ({type(error).__name__})"
        ) from None
    if state.context != context_of(run, name) or state.site != site:
        raise StateError(
            f"the secure sum {name!r} began with other settings than those of this request"
        )
    return state


def write(node: NodeConfig, name: str, state: SumState) -> None:
    """Replace a sum's state, flushed, before the step that it records leaves this site.

    Args:
        node: the site's settings.
        name: of the sum.
        state: to write.

    Raises:
        StateError: if it cannot be written.
    """
    try:
        replace_file(file_of(node, name, state.site), pack_state(state))
    except OSError as error:
        raise StateError(f"the state of a secure sum cannot be written ({error})") from None
