"""A release into a file, for sites without a line to the coordinator."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from client_app.gate import check_receipts, new_receipt, open_gate
from client_app.keys import private_key
from client_app.ledger import Release
from client_app.release import keep_file, leave, prepare, stage_file
from client_app.settings import NodeConfig
from client_app.site import site_name
from common.bundles import Request, pack_bundle
from common.errors import ConfigError, LedgerError


def release_to(file: Path, request: Request, node: NodeConfig) -> Release:
    """Make the surrogate a request asks for, charge it to the ledger, and write it as a signed bundle.

    The surrogate is the one that would have left over the network. Written in full before it is charged, and named
    `file` after: nothing is paid for that is lost. Raises FedSurrogateError; then nothing has left.
    """
    if not (node.site or node.num_partitions > 1):
        raise ConfigError("the node-config names no site, and the coordinator knows keys by name; set site")
    if file.exists():
        raise ConfigError(f"{str(file)!r} exists; a bundle is never replaced, because its release is in the ledger")
    run, site = request.run(), site_name(node, 0)
    before = check_receipts(node, request.receipts.get(site, ""))
    flower_run = f"bundle-{request.id}"
    gate = open_gate(node, run, flower_run)
    prepared = prepare(run, node, site, gate, flower_run, request.centre)
    told, key = _told(prepared.release), private_key(node, site)
    try:
        staged = stage_file(file, pack_bundle(request, site, prepared.payload, told, key))
    except OSError as error:
        raise LedgerError(f"{str(file)!r} cannot be written ({error.strerror}); nothing was charged") from None
    leave(gate, prepared.release, staged, file)
    if receipt := new_receipt(node, before):
        # Only now is it known. Where it finds no room the bundle is good without it.
        with suppress(OSError):
            keep_file(file, pack_bundle(request, site, prepared.payload, told | receipt, key))
    return prepared.release


def _told(release: Release) -> dict[str, Any]:
    """The ledger's entry without the facts about clipping and the like, which are exact."""
    return {key: value for key, value in asdict(release).items() if key not in ("facts", "flower_run")}
