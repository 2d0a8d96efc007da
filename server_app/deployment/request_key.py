"""The coordinator's key for signing requests and models, in the certificates folder:
`coordinator.key`; sites get `coordinator.pub`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.files import create_file
from fedsurrogate.common.security.sealing import SEED_BYTES, new_key, public_key

KEY, PUBLIC = "coordinator.key", "coordinator.pub"
# Environment variable of the coordinator's app: the folder of the key. Without it the key is in
# this folder of output-dir.
VARIABLE, FOLDER = "FEDSURROGATE_SIGNING", "signing"


def signing_key(output: Path, environment: Mapping[str, str]) -> bytes:
    """The private key that signs the models of runs: the coordinator's own, or one made for their
    folder.

    Args:
        output: folder of all runs.
        environment: in which `VARIABLE` names the folder of the coordinator's key.

    Returns:
        The key.

    Raises:
        ConfigError: it cannot be read or made.
    """
    if named := environment.get(VARIABLE):
        return read_request_key(Path(named))
    folder = output.expanduser().absolute() / FOLDER
    make_request_key(folder)
    return read_request_key(folder)


def make_request_key(folder: Path) -> None:
    """Make the key if there is none. An existing key is never replaced, as sites may have pinned
    it.

    Args:
        folder: for the key and its public key; it is created.

    Raises:
        ConfigError: a file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     make_request_key(Path(folder))
        ...     len(read_request_key(Path(folder))), len(request_public_key(Path(folder)))
        (32, 128)
    """
    key, public = folder / KEY, folder / PUBLIC
    try:
        if not (key.exists() or public.exists()):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            create_file(key, new_key(), mode=0o600)
        if key.exists() and not public.exists():
            create_file(public, f"{request_public_key(folder)}\n".encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"{key} cannot be written ({error.strerror})") from None


def read_request_key(folder: Path) -> bytes:
    """The private key.

    Args:
        folder: of the key.

    Returns:
        The key.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    file = folder / KEY
    try:
        key = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}), and sites reply only to requests that it "
            f"signs; restore it; if it is lost, remove {PUBLIC}, make another with `coordinator "
            f"sites key {shlex.quote(str(folder))}`; sites need its public key"
        ) from None
    if len(key) != SEED_BYTES:
        raise ConfigError(f"{file} is damaged; restore it")
    return key


def request_public_key(folder: Path) -> str:
    """The public key in hexadecimal digits, as sites pin it.

    Args:
        folder: of the key.

    Returns:
        The digits.

    Raises:
        ConfigError: the key cannot be read, or is damaged.
    """
    return public_key(read_request_key(folder)).hex()
