"""What is about to leave a site: its surrogate, packed, with everything the ledger wants to know of it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from torch import Tensor

from client_app import fedpft
from client_app.gate import Gate
from client_app.ledger import Release
from client_app.settings import NodeConfig
from client_app.site import SiteFeatures, load_site, site_device
from common.accounting import GaussianEvent
from common.claims import Claim
from common.config import RunConfig, run_digest
from common.wire import pack_surrogate

METHODS = {"fedpft": fedpft.make_surrogate}


@dataclass(frozen=True)
class Prepared:
    """A payload that has not left yet, its entry for the ledger, and how long it took to fit."""

    payload: bytes
    release: Release
    claim: Claim | None
    found: SiteFeatures
    fit_seconds: float


def prepare(
    run: RunConfig, node: NodeConfig, site: str, gate: Gate, flower_run: str, centre: Tensor | None = None
) -> Prepared:
    """Make this site's surrogate; nothing leaves and nothing is charged. Raises FedSurrogateError."""
    gate.check_request(run)
    found = load_site(run, node)
    started = time.perf_counter()
    made = METHODS[run.method](
        found.train.features.to(site_device(run, node)),
        found.train.labels,
        found.classes,
        found.fingerprint,
        site,
        run,
        fedpft.Limits(node.max_components, node.max_rank, gate.smallest_class(run.mechanism)),
        found.train.units,
        centre,
    )
    payload = pack_surrogate(made.surrogate)
    release = entry(run, flower_run, payload, made.surrogate.claim, made.facts)
    return Prepared(payload, release, made.surrogate.claim, found, time.perf_counter() - started)


def entry(run: RunConfig, flower_run: str, payload: bytes, claim: Claim | None, facts: dict[str, float]) -> Release:
    """The ledger's entry for a payload; without a claim one that no privacy protects."""
    noise = claim.noise if claim else {}
    return Release(
        run=run_digest(run),
        flower_run=flower_run,
        method=run.method,
        round=1,
        mechanism=claim.mechanism if claim else "none",
        events=(GaussianEvent(claim.noise_multiplier),) if claim else (),
        unit=claim.unit if claim else "record",
        epsilon=claim.epsilon if claim else 0.0,
        delta=claim.delta if claim else 0.0,
        sigmas={name: sigma for name, (sigma, _) in noise.items()},
        sensitivities={name: sensitivity for name, (_, sensitivity) in noise.items()},
        facts=facts,
        bytes=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )
