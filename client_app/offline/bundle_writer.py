"""Release into a signed file (bundle), for sites without a network connection to the coordinator."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedsurrogate.client_app.audit.output import check_attacks
from fedsurrogate.client_app.governance.entries import Release
from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.release import charge_and_release, prepare
from fedsurrogate.client_app.methods.task import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import coordinator_key, key_name, private_key
from fedsurrogate.common.errors import ConfigError, DataError, LedgerError, PolicyError
from fedsurrogate.common.files import replace_file, stage_file
from fedsurrogate.common.security.signed_requests import Request, read_request
from fedsurrogate.common.wire.bundles import pack_bundle


def release_to(file: Path, request_file: Path, node: NodeConfig) -> Release:
    """Make the requested surrogate, charge it to the ledger, and write it as a signed bundle.

    Checked before any work: the request is signed with the coordinator's key in the node-config,
    has not expired, and was not answered yet. The surrogate is the same as over the network. It is
    written in full before the charge and renamed after it, so no charged surrogate is lost.

    Args:
        file: the bundle to write.
        request_file: of the coordinator.
        node: the site's settings.

    Returns:
        The entry in the ledger.

    Raises:
        FedSurrogateError: and then nothing has left.
    """
    site = key_name(node)
    if file.exists():
        raise ConfigError(
            f"{str(file)!r} exists; a bundle is never replaced, because its release is in the "
            "ledger"
        )
    request = read_request(request_file, coordinator_key(node))
    run = request.run()
    flower_run = f"bundle-{request.id}"
    gate = open_gate(node, run.settings.data, flower_run)
    before = gate.check_receipts(request.receipts.get(site, ""))
    _check_first_answer(gate.ledger, request, flower_run)
    asked = SiteRequest(run, node, site, flower_run=flower_run, payload=request.centre)
    prepared = prepare(asked, gate)
    if failure := prepared.failure.text:
        # Over the network the site would reply with noise; here a person reads this error and can
        # correct the records.
        raise DataError(f"the records cannot be used ({failure}); nothing was charged")
    check_attacks(run, node, gate.policy)
    facts, key = _facts(prepared.release), private_key(node, site)
    try:
        staged = stage_file(file, pack_bundle(request, site, prepared.made.payload, facts, key))
    except OSError as error:
        raise LedgerError(
            f"{str(file)!r} cannot be written ({error.strerror}); nothing was charged"
        ) from None
    charge_and_release(gate, prepared.release, {file: staged}, prepared.made.guard)
    if receipt := gate.new_receipt(before):
        # The receipt exists only after the charge. If it cannot be written, the bundle is valid
        # without it.
        with suppress(OSError):
            again = pack_bundle(request, site, prepared.made.payload, facts | receipt, key)
            replace_file(file, again)
    return prepared.release


def _check_first_answer(ledger: Ledger, request: Request, flower_run: str) -> None:
    """Raise PolicyError for an answered request: a second answer has new noise and would be charged
    again.
    """
    if flower_run in ledger.answered():
        when = [
            f" on {entry['time'][:10]}"
            for entry in ledger.entries()
            if entry["flower_run"] == flower_run
        ]
        raise PolicyError(
            f"request {request.id} was answered{''.join(when[:1])}; a second answer would spend "
            "the budget again. Send the bundle that was written then; if it is lost, ask the "
            "coordinator for a new request"
        )


def _facts(release: Release) -> dict[str, Any]:
    """The ledger's entry without `facts`, whose clip fractions and similar numbers are exact, and
    without `selection`, which has the site's own names.
    """
    return {
        key: value
        for key, value in asdict(release).items()
        if key not in ("facts", "flower_run", "rounds", "selection")
    }
