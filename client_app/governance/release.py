"""A release before it leaves: a method's packed output, and its entry for the ledger."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from fedsurrogate.client_app.features.site_features import SiteFeatures, load_site
from fedsurrogate.client_app.governance.entries import Release
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.uncharged import FALLBACK, Failure, with_records
from fedsurrogate.client_app.methods.task import MethodOutput, SiteRequest, Task
from fedsurrogate.client_app.node_config import NodeConfig, is_protected
from fedsurrogate.common.errors import LedgerError
from fedsurrogate.common.files import put_in_place
from fedsurrogate.common.methods.method import Combination, load
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS
from fedsurrogate.common.run import Run

# Folder of the disclosure sheets, in the state folder.
DISCLOSURES = "disclosures"


@dataclass(frozen=True)
class Prepared:
    """A payload before its release.

    Attributes:
        made: what may leave.
        release: its entry for the ledger.
        found: the site's features that it was made from.
        fit_seconds: the time that it took.
        failure: why it was made without records in a private run. It stays at the site.
    """

    made: MethodOutput
    release: Release
    found: SiteFeatures
    fit_seconds: float
    failure: Failure


def prepare(request: SiteRequest, gate: Gate, affordable: bool = True) -> Prepared:
    """Make the requested payload; nothing leaves and nothing is charged.

    Args:
        request: what is asked for.
        gate: of the site.
        affordable: whether to refuse, before any work, a release that the budget cannot pay for.

    Raises:
        FedSurrogateError: for a request that the site refuses or cannot serve.
    """
    run, node = request.run, request.node
    gate.check_request(run)
    if affordable:
        gate.check_planned(planned(request))
    limits = gate.limits(run.plan.mechanism_name, node)

    def make(site_features: SiteFeatures, node: NodeConfig) -> tuple[MethodOutput, int, float]:
        named = max(len(site_features.classes), len(run.settings.classes))
        gate.check_size(run.plan.work, site_features.train.features.shape[1], named)
        started, task = time.perf_counter(), replace(request, node=node).task(site_features, limits)
        return site_function(run.plan.combination)(task), task.round, time.perf_counter() - started

    if is_protected(run.hides_sites, node):
        (made, number, seconds), site_features, failure = with_records(
            run, node, gate.policy.cache_mib, make
        )
    else:
        site_features, failure = load_site(run, node, gate.policy.cache_mib), Failure()
        made, number, seconds = make(site_features, node)
    if failure.text:
        made = replace(made, facts=made.facts | {FALLBACK: 1.0})
    release = replace(
        entry(run, request.flower_run, made, number), disclosure=disclosure_of(node, run.digest)
    )
    if gate.exact_counts(run):
        release = replace(release, mechanism=EXACT_COUNTS)
    return Prepared(made, release, site_features, seconds, failure)


def entry(run: Run, flower_run: str, made: MethodOutput, number: int = 1) -> Release:
    """The ledger's entry for the output of a round.

    Args:
        run: whose settings made it.
        flower_run: id of the run.
        made: the output; without a claim it is a release without privacy.
        number: of the round, from one.
    """
    claim = made.claim
    noise = claim.noise if claim else {}
    return Release(
        run=run.full_digest,
        flower_run=flower_run,
        method=run.method.name,
        round=number,
        mechanism=claim.name if claim else "none",
        events=(claim.event(number),) if claim else (),
        unit=claim.unit if claim else "record",
        epsilon=claim.epsilon if claim else 0.0,
        delta=claim.delta if claim else 0.0,
        sigmas={name: sigma for name, (sigma, _) in noise.items()},
        sensitivities={name: sensitivity for name, (_, sensitivity) in noise.items()},
        facts=made.facts,
        bytes=len(made.payload),
        sha256=hashlib.sha256(made.payload).hexdigest(),
        sealed=made.sealed,
        sample_rate=run.trained.sample_rate if run.plan.mechanism_name == "dp-sgd" else 1.0,
        rounds=claim.rounds if claim else 0,
        opens=bool(claim) and run.plan.messages.first is not None,
    )


def disclosure_of(node: NodeConfig, run: str) -> str:
    """The address of the newest disclosure sheet for a run, relative to the state folder; empty if
    there is none.
    """
    sheets = sorted(
        (node.state / DISCLOSURES).glob(f"{run}-*.json"),
        key=lambda file: (file.stat().st_mtime_ns, file.name),
    )
    return f"{DISCLOSURES}/{sheets[-1].stem}" if sheets else ""


def planned(request: SiteRequest) -> Release:
    """The entry of a release before any work: run, round and noise. It depends on settings and
    request only. Raises SurrogateError for a round below one.
    """
    run, number = request.run, request.round
    claim = run.mechanism_for("patient" if request.node.protects == "patient" else "record")
    return entry(run, request.flower_run, MethodOutput(b"", claim), number)


def site_function(combination: Combination) -> Callable[[Task], MethodOutput]:
    """The function that computes a site's part of the run's method."""
    function: Callable[[Task], MethodOutput] = load(combination.site)
    return function


def charge_and_release(
    gate: Gate,
    release: Release,
    staged: Mapping[Path, Path],
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Charge a release, then give its staged files their final names.

    Staged files are deleted if the release may not leave.

    Args:
        gate: that charges it.
        release: its entry.
        staged: the temporary file of each file.
        guard: see `MethodOutput`.

    Raises:
        LedgerError: if a file cannot get its name.
    """
    try:
        with guard():
            gate.let_out(release)
            for file, temporary in staged.items():
                # Flushed before the release leaves: after a power failure, a site must not mask a
                # second vector with the same masks.
                _put(temporary, file)
    except BaseException:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
        raise


def _put(temporary: Path, file: Path) -> None:
    try:
        put_in_place(temporary, file)
    except OSError as error:
        raise LedgerError(
            f"{file} cannot be written ({error}), so the charged release does not leave"
        ) from None
