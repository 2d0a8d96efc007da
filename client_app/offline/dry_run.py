"""Dry run: computes the release of a run in full; nothing leaves, and nothing is charged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsurrogate.client_app.audit.output import check_attacks
from fedsurrogate.client_app.features.site_features import site_name
from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.release import prepare
from fedsurrogate.client_app.methods.task import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, FedSurrogateError
from fedsurrogate.common.privacy.budget_remarks import budget_remarks
from fedsurrogate.common.run import Run

DRY = "dry-run"


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        facts: about the release, by name.
        refusal: why the release may not leave; empty if it may.
    """

    facts: dict[str, Any]
    refusal: str


def dry_run(run: Run, node: NodeConfig) -> DryRun:
    """Make the surrogate that this site would send, and check it at the gate.

    A real release draws new noise, so the surrogate of a dry run never leaves.

    Args:
        run: whose release is made.
        node: the site's settings.

    Raises:
        FedSurrogateError: if none can be made.
    """
    if not run.plan.releases_once:
        raise ConfigError(
            f"method = {run.settings.method!r}: a dry run shows the release of a one-shot method; "
            "this method replies to received models, or releases nothing; `coordinator plan` "
            "shows its bytes"
        )
    gate = open_gate(node, run.settings.data, DRY)
    request = SiteRequest(run, node, site_name(node, 0), flower_run=DRY, info={"lineage": "dryrun"})
    prepared = prepare(request, gate, affordable=False)
    release, classes = prepared.release, prepared.found.classes
    own, records = run.settings, len(prepared.found.train.labels)
    facts: dict[str, Any] = {
        "mechanism": release.mechanism,
        "unit": gate.unit_of(release) if release.events else None,
        "epsilon": release.epsilon or None,
        "delta": release.delta or None,
        "bytes": release.bytes,
        # A private release draws new noise each time, so this one's hash would be that of nothing
        # that leaves.
        "sha256": None if release.events else release.sha256,
        "classes": list(classes),
        "records": records,
        "sigmas": release.sigmas,
        "sensitivities": release.sensitivities,
        "facts": release.facts,
        "left_out": [each.why for each in prepared.found.report.left_out],
        "odd": [*prepared.found.report.odd, *budget_remarks(own.epsilon, own.delta, records)],
        "failure": prepared.failure.text or None,
        "epsilon_before": gate.spent(),
        "epsilon_total": gate.policy.epsilon_total,
        "runs_left": gate.runs_left(run.mechanism.events)
        if run.mechanism and release.events
        else None,
    }
    refusal = ""
    if failure := prepared.failure.text:
        refusal = f"THE RECORDS CANNOT BE USED, and pure noise would leave instead: {failure}"
    try:
        facts["epsilon_after"] = gate.check(release)
        check_attacks(run, node, gate.policy)
    except FedSurrogateError as error:
        refusal = f"{refusal}; {error}" if refusal else str(error)
    return DryRun(facts | {"may_leave": not refusal, "refusal": refusal or None}, refusal)
