"""What is about to leave a site: what a method has made, packed, with everything the ledger records about it."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from client_app.features.site_features import SiteFeatures, load_site
from client_app.governance.gate import Gate
from client_app.governance.ledger import Release
from client_app.governance.uncharged import FALLBACK, with_records
from client_app.methods.task import MethodOutput, SiteLimits, Task
from client_app.node_config import NodeConfig, is_protected
from common.config.run_config import RunConfig, run_digest
from common.privacy.accounting import GaussianEvent
from common.privacy.claims import Claim, make_claim, released_in
from common.rules.spec import load
from common.wire.records import Info


@dataclass(frozen=True)
class SurrogateRequest:
    """What a site is requested to make, over the network or by file. question: the payload. info: the numbers with it."""

    run: RunConfig
    node: NodeConfig
    site: str
    flower_run: str
    question: bytes | None = None
    info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A payload that has not left yet, its entry for the ledger, numbers that go along, and how long it took to make.

    failure: why it was made without records in a private run, empty where it was not; for this site's eyes only.
    """

    payload: bytes
    release: Release
    claim: Claim | None
    found: SiteFeatures
    fit_seconds: float
    answer: Info
    keep: tuple[Path, bytes] | None = None
    must_keep: bool = False
    failure: str = ""


def prepare(request: SurrogateRequest, gate: Gate, affordable: bool = True) -> Prepared:
    """Make what is requested of this site; nothing leaves and nothing is charged. Raises FedSurrogateError.

    affordable: refuse before any work what the budget cannot pay for.
    """
    run, node = request.run, request.node
    gate.check_request(run)
    if affordable:
        gate.check_planned(planned(request))
    limits = SiteLimits(node.max_components, node.max_rank, gate.smallest_class(run.mechanism), gate.policy.most_classes)

    def make(found: SiteFeatures, node: NodeConfig) -> tuple[MethodOutput, int, float]:
        gate.check_size(run, found.train.features.shape[1], len(found.classes))
        started = time.perf_counter()
        task = Task(run, node, request.site, found, limits, request.question, request.info)
        return method_of(run)(task), task.round, time.perf_counter() - started

    if is_protected(run, node):
        (made, number, seconds), found, failure = with_records(run, node, make)
    else:
        found, failure = load_site(run, node), ""
        made, number, seconds = make(found, node)
    if failure:
        made = replace(made, facts=made.facts | {FALLBACK: 1.0})
    release = entry(run, request.flower_run, made, number)
    return Prepared(made.payload, release, made.claim, found, seconds, made.answer, made.keep, made.must_keep, failure)


def entry(run: RunConfig, flower_run: str, made: MethodOutput, number: int = 1) -> Release:
    """The ledger's entry for what is made in this round; without a claim one that no privacy protects."""
    claim = made.claim
    noise = claim.noise if claim else {}
    return Release(
        run=run_digest(run),
        flower_run=flower_run,
        method=run.method,
        round=number,
        mechanism=claim.mechanism if claim else "none",
        events=made.events,
        unit=claim.unit if claim else "record",
        epsilon=claim.epsilon if claim else 0.0,
        delta=claim.delta if claim else 0.0,
        sigmas={name: sigma for name, (sigma, _) in noise.items()},
        sensitivities={name: sensitivity for name, (_, sensitivity) in noise.items()},
        facts=made.facts,
        bytes=len(made.payload),
        sha256=hashlib.sha256(made.payload).hexdigest(),
        sealed=made.sealed,
        sample_rate=run.trained.sample_rate if run.mechanism == "dp-sgd" else 1.0,
    )


def planned(request: SurrogateRequest) -> Release:
    """What is known of a release before anything is done for it: run, round and noise. Settings and request decide alone."""
    run, step = request.run, request.info.get("round", 1)
    number = step if isinstance(step, int) else 1
    claim = make_claim(run, "patient" if request.node.protects == "patient" else "record")
    events: tuple[GaussianEvent, ...] = ()
    if claim is not None:
        events = (released_in(run, number),) if claim.mechanism == "dp-sgd" else (GaussianEvent(claim.noise_multiplier),)
    return entry(run, request.flower_run, MethodOutput(b"", claim, events), number)


def method_of(run: RunConfig) -> Callable[[Task], MethodOutput]:
    """What a site does in such a run."""
    function: Callable[[Task], MethodOutput] = load(run.spec.site)
    return function


def keep_file(file: Path, content: bytes) -> None:
    """Write a file in one step."""
    stage_file(file, content).replace(file)


def stage_file(file: Path, content: bytes) -> Path:
    """Write a temporary file next to `file`; renaming it then takes one step. Each process has its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def leave(gate: Gate, release: Release, staged: Path | None, file: Path) -> None:
    """Let a release out; a file staged for it gets its name then, and is gone where the release may not leave."""
    try:
        gate.let_out(release)
    except BaseException:
        if staged is not None:
            staged.unlink(missing_ok=True)
        raise
    if staged is not None:
        staged.replace(file)
