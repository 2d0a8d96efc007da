"""A site's key for sealed relays, and whose keys it trusts."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from client_app.settings import NodeConfig
from common.errors import ConfigError, SealError
from common.sealing import KEY_BYTES, new_key

log = logging.getLogger("fedsurrogate.site")


def private_key(node: NodeConfig, site: str) -> bytes:
    """This site's private key, made when first needed; only its owner may read the file."""
    file = node.state / "keys" / f"{site}.key"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            # Made aside and linked: two processes at once agree on one key, and nobody ever reads half of it.
            aside = file.with_name(f".{site}.{os.getpid()}")
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                stream.write(new_key())
            try:
                os.link(aside, file)
            except FileExistsError:
                log.info("another process has made the key of %s", site)
            finally:
                aside.unlink()
        key = file.read_bytes()
    except OSError as error:
        raise SealError(f"the key {str(file)!r} cannot be used ({error}); see state-dir in the node-config") from None
    if len(key) != KEY_BYTES:
        raise SealError(f"the key {str(file)!r} is damaged; remove it, and tell the other sites the new one")
    return key


def told_keys(node: NodeConfig, text: object) -> dict[str, bytes]:
    """Public keys by site as the coordinator tells them (JSON of hex). Raises SealError where `peers` says otherwise.

    Without `peers` in the node-config the coordinator is believed: then it must not be one that lies about keys.
    """
    try:
        told = {name: bytes.fromhex(key) for name, key in json.loads(str(text)).items()}
    except (ValueError, AttributeError, TypeError):
        raise SealError("keys of other sites that cannot be read") from None
    if node.peers:
        known = read_peers(Path(node.peers).expanduser())
        for name, key in told.items():
            if known.get(name) != key:
                raise SealError(f"the key told for site {name!r} is not the one in peers = {node.peers!r}")
    return told


def read_peers(file: Path) -> Mapping[str, bytes]:
    """Public keys by site: lines `name = "hex"`, as `site key` prints them. Raises ConfigError."""
    try:
        return {name: bytes.fromhex(key) for name, key in tomllib.loads(file.read_text("utf-8-sig")).items()}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'peers = {str(file)!r} cannot be read ({error}); write lines such as north = "hex"') from None
