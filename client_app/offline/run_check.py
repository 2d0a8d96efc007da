"""A check of a run at a site: what it would send, what that costs, and whether the gate lets it. A run
of one round is computed in full, without sending or charging it.
"""

from __future__ import annotations

from typing import Any

from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.run import Run

from ..audit.output import check_attacks
from ..features.site_features import site_name
from ..governance.gate import Gate, open_gate
from ..governance.release import Verdict, prepare, verdict, without_records
from ..methods.job import SiteRequest
from ..node_config import NodeConfig

CHECK = "check"


def check_run(run: Run, node: NodeConfig) -> dict[str, Any]:
    """Ask the gate about a run, and make the surrogate that this site would send in a run of one round.

    A real release draws new noise, so the surrogate of a check never leaves.

    Args:
        run: of the coordinator.
        node: the site's settings.

    Raises:
        FedSurrogateError: of one round, if no release can be made.
    """
    gate = open_gate(node, run.settings.data, CHECK)
    facts, refusal = _made(run, node, gate) if run.plan.releases_once else _planned(run, node, gate)
    return facts | {"may_leave": not refusal, "refusal": refusal or None}


def _made(run: Run, node: NodeConfig, gate: Gate) -> tuple[dict[str, Any], str]:
    request = SiteRequest(
        run, node, site_name(node, 0), flower_run=CHECK, info={"lineage": "check"}
    )
    prepared = prepare(request, gate, affordable=False)
    release, records = prepared.release, len(prepared.found.train.labels)
    found = verdict(run, gate, node, records)
    facts: dict[str, Any] = {
        "mechanism": release.mechanism,
        "unit": gate.unit_of(release) if release.events else None,
        "epsilon": release.epsilon or None,
        "delta": release.delta or None,
        "bytes": release.bytes,
        # A private release draws new noise each time, so this one's hash would be that of nothing
        # that leaves.
        "sha256": None if release.events else release.sha256,
        "classes": list(prepared.found.classes),
        "records": records,
        "sigmas": release.sigmas,
        "sensitivities": release.sensitivities,
        "facts": release.facts,
        "left_out": [each.why for each in prepared.found.report.left_out],
        "warnings": [*prepared.found.report.warnings, *found.warnings],
        "failure": prepared.failure.text or None,
    } | _budget(found)
    refusal = ""
    if failure := prepared.failure.text:
        refusal = f"THE RECORDS CANNOT BE USED, and pure noise would leave instead: {failure}"
    try:
        facts["epsilon_after"] = gate.check(release)
        check_attacks(run, node, gate.policy)
    except FedSurrogateError as error:
        refusal = f"{refusal}; {error}" if refusal else str(error)
    return facts, refusal


def _planned(run: Run, node: NodeConfig, gate: Gate) -> tuple[dict[str, Any], str]:
    """Of a run in rounds: what its settings say. Its releases depend on models that are not there."""
    found, own = verdict(run, gate, node), run.settings
    claim = run.mechanism_for("patient" if node.protects == "patient" else "record")
    classes = max(1, len(own.classes))
    try:
        dimension = without_records(run, node).train.features.shape[1]
        cost = costs(run, dimension, classes, 0, 1)[0]
    except FedSurrogateError:
        cost = None  # Only the images tell the dimension.
    facts: dict[str, Any] = {
        "mechanism": claim.name if claim else "none",
        "unit": claim.unit if claim else None,
        "epsilon": own.epsilon or None,
        "delta": own.delta if own.epsilon else None,
        "rounds": run.rounds,
        "sends": [f"{each.name} ({each.shape})" for each in run.plan.messages.sends],
        "bytes": cost.up if cost else None,
        "bytes_received": cost.down if cost else None,
        "warnings": list(found.warnings),
    } | _budget(found)
    return facts, found.refusal


def _budget(found: Verdict) -> dict[str, Any]:
    return {
        "epsilon_before": found.spent,
        "epsilon_total": found.total,
        "runs_left": found.runs_left,
    }
