"""The disclosure sheet of a release: facts for the person who signs, by the five safes. It gives no
verdict.

A check of a run at a site: what it would send, what that costs, and whether the gate lets it. A run
of one round is computed in full, without sending or charging it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.escapes import for_html
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.methods.method import Field
from fedsurrogate.common.pages.svg import page_head, render_page, trusted
from fedsurrogate.common.privacy.mechanism import NOT_COVERED
from fedsurrogate.common.run import Run, parse_run

from ..audit.output import TEMPLATES, check_attacks
from ..features.site_features import site_name
from ..governance.gate import Gate, open_gate
from ..governance.ledger import own_ledger
from ..governance.policy import policy_of
from ..governance.release import DISCLOSURES, Verdict, prepare, verdict, without_records
from ..methods.job import SiteRequest
from ..node_config import NodeConfig
from ..offline.keys import coordinator_key
from .release_audit import FEWEST, ReleaseAudit, audit_release

CHECK = "check"
Part = dict[str, Any]


def check_run(run: Run, node: NodeConfig) -> Part:
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


def _made(run: Run, node: NodeConfig, gate: Gate) -> tuple[Part, str]:
    request = SiteRequest(
        run, node, site_name(node, 0), flower_run=CHECK, info={"lineage": "check"}
    )
    prepared = prepare(request, gate, affordable=False)
    release, records = prepared.release, len(prepared.found.train.labels)
    found = verdict(run, gate, node, records)
    facts: Part = {
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


def _planned(run: Run, node: NodeConfig, gate: Gate) -> tuple[Part, str]:
    """Of a run in rounds: what its settings say. Its releases depend on models that are not there."""
    found, own = verdict(run, gate, node), run.settings
    claim = run.mechanism_for("patient" if node.protects == "patient" else "record")
    classes = max(1, len(own.classes))
    try:
        dimension = without_records(run, node).train.features.shape[1]
        cost = costs(run, dimension, classes, 0, 1)[0]
    except FedSurrogateError:
        cost = None  # Only the images tell the dimension.
    facts: Part = {
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


def _budget(found: Verdict) -> Part:
    own = {"epsilon_before": found.spent, "epsilon_total": found.total}
    return own | {"runs_left": found.runs_left}


PARTS = {
    "projects": ("Safe projects", "What is this release for?"),
    "people": ("Safe people", "Who receives it?"),
    "data": ("Safe data", "What is it made from?"),
    "settings": ("Safe settings", "Where does it go, and within which limits?"),
    "outputs": ("Safe outputs", "What leaves, and what does it show?"),
}


def page_of(content: Part, address: str) -> str:
    """The page of a sheet, HTML.

    Args:
        content: of the sheet.
        address: of its files in the state folder.
    """
    head = trusted(page_head(for_html(f"Disclosure · {content['projects']['method']}")))
    values = {"head": head, "s": content, "parts": PARTS, "address": address}
    return render_page("disclosure.html.j2.md", values, TEMPLATES)


# Settings that name folders and files of this machine.
PLACES = ("data-dir", "output-dir", "weights-path")
REFUSALS = (
    "that the policy refuses a release without privacy because of an attack, which depends "
    "on the records"
)


def disclose(run: Run, node: NodeConfig, seconds: float = 0.0) -> tuple[Part, Path, Path]:
    """Write the sheet of a one-shot run into the state folder.

    Nothing leaves and nothing is charged. The files' name is the run's digest and the hash of the
    JSON file. The ledger's entry of the release, once it leaves, has this address.

    Args:
        run: whose release is attacked.
        node: the site's settings.
        seconds: for attacks beyond the first eight releases.

    Returns:
        The sheet's content, its JSON file, and its page.

    Raises:
        ConfigError: for other methods.
        FedSurrogateError: if no release can be made.
    """
    made = check_run(run, node)
    content = sheet(run, node, made, audit_release(run, node, seconds, most=max(FEWEST, 16)))
    packed = (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
    name = f"{run.digest}-{hashlib.sha256(packed).hexdigest()[:16]}"
    facts, page = (node.state / DISCLOSURES / f"{name}.{kind}" for kind in ("json", "html"))
    replace_file(page, page_of(content, f"{DISCLOSURES}/{name}").encode())
    replace_file(facts, packed)
    return content, facts, page


def sheet(run: Run, node: NodeConfig, made: Part, audit: ReleaseAudit) -> Part:
    """The content of a sheet: five parts, each with facts by name.

    Args:
        run: whose release it is.
        node: the site's settings.
        made: the release, as a check makes it.
        audit: attacks on such releases.
    """
    method, settings, policy = run.method, run.settings, policy_of(node)
    limits = policy.model_dump(mode="json")
    usual = parse_run({"method": method.name}).settings.flat()
    alone = (
        "the sum of all sites only"
        if settings.secure_aggregation
        else "this site's release by itself"
    )
    key = coordinator_key(node).hex() if node.coordinator_key else ""
    bag = settings.features.bag
    pooled = "" if bag == "none" else f"; a record is a bag, the {bag} of its images' features"
    return {
        "schema": 1,
        "run": run.digest,
        "site": node.site,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "projects": {
            "method": method.name,
            "title": method.title,
            "source": method.paper,
            "purpose": "to be filled in by hand",
            "settings that differ from the defaults": {
                key: value
                for key, value in settings.flat().items()
                if value != usual[key] and key not in PLACES
            },
        },
        "people": {
            "receives it": "the coordinator whose requests this site answers",
            "key of the coordinator": key
            or "none is set: any coordinator that the connection admits",
            "others who may read it": "the coordinator's network and whoever it forwards the release "
            "or the learned model to",
        },
        "data": {
            "kind": node.data or settings.data,
            "records used": made["records"],
            "classes": made["classes"],
            "left out": made["left_out"],
            "warnings": made["warnings"],
            "unit that the claim protects": made["unit"] or "none",
            "what the records become first": f"features of the backbone {settings.backbone!r}{pooled}",
        },
        "settings": {
            "the coordinator sees": alone,
            "sealed for other sites": settings.fedpft.seal,
        }
        | {f"policy: {name.replace('_', '-')}": limits[name] for name in LIMITS},
        "outputs": _outputs(run.plan.messages.sends, node, made, audit),
    }


# Limits of the policy that a sheet shows.
LIMITS = (
    *("methods", "mechanisms", "epsilon_per_run", "epsilon_total", "delta", "without_dp"),
    *("smallest_class", "largest_payload_mib"),
)


def _outputs(sends: Sequence[Field], node: NodeConfig, facts: Part, audit: ReleaseAudit) -> Part:
    ledger = own_ledger(node)
    entries = ledger.entries() if ledger is not None else []
    shown = ("auc", "low", "high", "rate_at_one_percent", "rate_at_one_in_thousand")
    claim = {
        key: facts[key]
        for key in ("mechanism", "epsilon", "delta", "unit", "sigmas", "sensitivities")
        if facts[key]
    }
    return {
        "what leaves": [f"{each.name} ({each.shape}), {each.bits} bits a number" for each in sends],
        "bytes": facts["bytes"],
        "sha256 of the payload": facts["sha256"]
        or "new noise is drawn when it leaves; the ledger's entry has the hash",
        "claim": claim if facts["epsilon"] else "no privacy is claimed",
        "not covered": [*NOT_COVERED, REFUSALS] if facts["epsilon"] else [REFUSALS],
        "attacks": {
            name: {key: value for key, value in asdict(each).items() if key in shown}
            for name, each in audit.attacks.items()
        },
        "attacked": {
            "records": audit.records,
            "of": audit.of,
            "releases": audit.releases,
            "largest AUC allowed": audit.allowed,
        },
        "records that stand out": audit.standing_out_count,
        "nearest records": None if audit.nearest is None else asdict(audit.nearest),
        "ledger before": {
            "entries": len(entries),
            "last hash": entries[-1]["hash"] if entries else "",
            "epsilon spent": facts["epsilon_before"],
        },
        "ledger after": {
            "entries": len(entries) + 1,
            "epsilon spent": facts.get("epsilon_after"),
            "epsilon total": facts["epsilon_total"],
        },
        "the gate": facts["refusal"] or "would let it out",
    }
