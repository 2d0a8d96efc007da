"""Register and revoke the sites' keys at the SuperLink over its Control API, and store the table of
node ids.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import SITE_NAME, ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.interface import FlowerNode
from fedsurrogate.common.security.documents import key_fingerprint
from fedsurrogate.common.security.registrations import (
    REVOKED,
    TABLE,
    VARIABLE,
    Registration,
    read_revoked,
    read_table,
    revoke,
    write_table,
)

from .certificates import valid_until
from .fleet_guard import fingerprint_of, key_bytes

if TYPE_CHECKING:
    from fedsurrogate.common.flower.v134_fleet import Control


def table_file(folder: Path) -> Path:
    """The file of the table of registered sites: from the environment, else in the folder of
    `coordinator sites certs`.
    """
    return Path(os.environ.get(VARIABLE) or folder / TABLE)


def check_not_revoked(folder: Path, site: str, line: str) -> None:
    """Raise ConfigError for a revoked key.

    Args:
        folder: of `coordinator sites certs`.
        site: that has the key.
        line: the key, as ssh writes it.

    Raises:
        RunError: a list of revoked keys cannot be read.
    """
    if key_fingerprint(line.encode()) in _revoked(folder):
        raise ConfigError(
            f"the key of site {site!r} was revoked, and is never accepted again; the site needs a "
            f"new key: `coordinator sites certs {shlex.quote(str(folder))} --site {site} --new-key`, or, where the hospital "
            "makes its own, `site enrol` after it has removed certificates/site.key"
        )


def _revoked(folder: Path) -> frozenset[str]:
    """Of the lists next to the certificates and next to the table."""
    return read_revoked(folder / REVOKED, table_file(folder).with_name(REVOKED))


def register(
    folder: Path, address: str, authority: Path | None, wait: float = 0.0
) -> dict[str, str]:
    """Register the keys of all sites, and write the table of names, keys and node ids.

    Args:
        folder: of `coordinator sites certs`, with the keys.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        wait: seconds to wait until the SuperLink listens.

    Returns:
        By site: "registered"; "known", if it was registered before; "replaced", if its name had
        another key, which is now revoked; or "taken back", if its key was revoked earlier, here or
        at the SuperLink. Such a site is not in the table, whatever the SuperLink remembers.

    Raises:
        ConfigError: the folder has no keys, two sites have the same key, a certificate cannot be
            read, or the table cannot be written.
        RunError: the SuperLink does not respond, or refuses a key; or a list of revoked keys cannot
            be read or written.
    """
    keys = _keys(folder)
    until = {name: valid_until(folder / "sites" / name) for name in keys}
    table = table_file(folder)
    before = read_table(table) if table.is_file() else {}
    states: dict[str, str] = {}
    # First the list: the guard obeys it at once, and a later `register` goes on from it.
    replaced = [name for name in keys if name in before and before[name].key != keys[name]]
    barred = dict.fromkeys(_revoked(folder), "") | {_print(before[n].key): n for n in replaced}
    with _control(address, authority, wait) as (control, nodes):
        barred |= {fingerprint_of(key): "" for key, node in nodes.items() if node.revoked}
        revoke(table.with_name(REVOKED), barred)
        for key, node in nodes.items():
            if key and not node.revoked and fingerprint_of(key) in barred:
                control.unregister(node.id)
        after = {
            name: replace(each, node=nodes[key_bytes(each.key)].id)
            for name, each in before.items()
            if name not in keys and _holds(nodes, each.key) and _print(each.key) not in barred
        }
        for name, line in keys.items():
            if _print(line) in barred:
                states[name] = "taken back"
                continue
            found = nodes.get(key_bytes(line))
            states[name] = "registered" if found is None else "known"
            if name in replaced:
                states[name] = "replaced"
            number = control.register(key_bytes(line)) if found is None else found.id
            after[name] = Registration(line, number, until[name])
    try:
        write_table(table, after)
    except OSError as error:
        raise ConfigError(
            f"{table}: the table of registered sites cannot be written ({error.strerror})"
        ) from None
    return states


def not_registered(folder: Path) -> dict[str, str]:
    """Sites whose key `register` would let in, and the key's fingerprint: those that the table does
    not have with this key, which was not revoked.

    Args:
        folder: of `coordinator sites certs`.

    Raises:
        ConfigError: the folder has no keys.
        RunError: the table or a list of revoked keys cannot be read.
    """
    table = table_file(folder)
    known = read_table(table) if table.is_file() else {}
    return {
        name: _print(key)
        for name, key in _keys(folder).items()
        if (name not in known or known[name].key != key) and _print(key) not in _revoked(folder)
    }


def forget(folder: Path, site: str, address: str, authority: Path | None) -> bool:
    """Revoke a site's key, for ever: its holder is disconnected and cannot connect again, also after
    the SuperLink has lost its database.

    This revokes the keys of the site in the folder of `coordinator sites certs` and in the table of
    registered sites.

    Args:
        folder: of `coordinator sites certs`.
        site: its name.
        address: of the Control API, host:port.
        authority: as for `register`.

    Returns:
        False if no key was registered; they are revoked nevertheless.

    Raises:
        ConfigError: there is neither.
        RunError: the SuperLink does not respond, or the list of revoked keys cannot be written.
    """
    table, file = table_file(folder), folder / "sites" / site / "site.pub"
    before = read_table(table) if table.is_file() else {}
    if not file.is_file() and site not in before:
        raise ConfigError(
            f"{str(file)!r} is not a site's public key; `coordinator sites certs` makes it"
        )
    keys = {_key(file)} if file.is_file() else set()
    if site in before:
        keys.add(before[site].key)
    # Without the SuperLink, too: its guard reads the list, and so does the next `register`.
    revoke(table.with_name(REVOKED), {_print(key): site for key in keys})
    with _control(address, authority) as (control, nodes):
        held = [key for key in keys if _holds(nodes, key)]
        for key in held:
            control.unregister(nodes[key_bytes(key)].id)
    if site in before:
        write_table(table, {name: each for name, each in before.items() if name != site})
    return bool(held)


def _keys(folder: Path) -> dict[str, str]:
    """Public keys by site. Raises ConfigError."""
    keys = {file.parent.name: _key(file) for file in sorted((folder / "sites").glob("*/site.pub"))}
    if not keys:
        raise ConfigError(
            f"{folder} has no key of a site; `coordinator sites certs {shlex.quote(str(folder))} --site NAME` makes one"
        )
    if wrong := [name for name in keys if not SITE_NAME.fullmatch(name)]:
        raise ConfigError(
            f"{folder}/sites/{wrong[0]}: a site's name must have 1 to 64 letters, digits and . _ -"
        )
    owners: dict[str, str] = {}
    for name, key in keys.items():
        if (other := owners.setdefault(key, name)) != name:
            raise ConfigError(
                f"{folder}: sites {other!r} and {name!r} have the same key; each needs its own key"
            )
    return keys


def _key(file: Path) -> str:
    """Type and key from a public key file, without its comment."""
    try:
        line = " ".join(file.read_text().split()[:2])
        key_bytes(line)
    except (OSError, ValueError):
        raise ConfigError(
            f"{str(file)!r} is not a site's public key; `coordinator sites certs` makes it"
        ) from None
    return line


def _print(line: str) -> str:
    return key_fingerprint(line.encode())


def _holds(nodes: dict[bytes, FlowerNode], key: str) -> bool:
    node = nodes.get(key_bytes(key))
    return node is not None and not node.revoked


@contextmanager
def _control(
    address: str, authority: Path | None, wait: float = 0.0
) -> Iterator[tuple[Control, dict[bytes, FlowerNode]]]:
    """The Control API, and its nodes by public key. Raises RunError."""
    with flower().control(address, authority) as control:
        yield control, {node.key: node for node in control.nodes(wait)}
