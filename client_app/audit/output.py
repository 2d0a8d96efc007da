"""What an audit leaves at the site: files, pictures, and a refusal if the policy has limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from client_app.audit.page import page_of
from client_app.audit.release_audit import FEWEST, ReleaseAudit, audit_release
from client_app.datasets.partition import share
from client_app.features.site_features import in_simulation
from client_app.governance.policy import Policy
from client_app.governance.release import keep_file
from client_app.node_config import NodeConfig
from common.config.run_config import RunConfig
from common.errors import PolicyError


def write_audit(found: ReleaseAudit, folder: Path, pictures: Sequence[bytes] = ()) -> tuple[Path, Path]:
    """Write audit.json and audit.html into a folder; only their owner may read them, for they name records.

    pictures: PNG files of the records that stand out. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts, page = folder / "audit.json", folder / "audit.html"
    keep_file(facts, (json.dumps(found.facts(), indent=2, allow_nan=False) + "\n").encode())
    keep_file(page, page_of(found, pictures).encode())
    return facts, page


def pictures_of(run: RunConfig, node: NodeConfig, rows: Sequence[int], side: int = 96) -> list[bytes]:
    """Small PNG files of training records, as far as the data are images."""
    dataset, found = share(run, node, in_simulation()).dataset, []
    for row in rows if dataset.opener is not None else ():
        image = dataset.open_image(row)
        image.thumbnail((side, side))
        content = BytesIO()
        image.save(content, "PNG")
        found.append(content.getvalue())
    return found


def limit_broken(found: ReleaseAudit, policy: Policy) -> str:
    """Why this audit speaks against the release: the claim, or a limit of the policy; empty if nothing does."""
    attack, nearest = found.attack, found.nearest
    if attack.low > found.allowed or found.proven > found.epsilon > 0:
        return (
            f"the attack reaches an AUC of {attack.auc:.3f} ({attack.low:.3f} to {attack.high:.3f}), and proves an epsilon "
            f"above {found.proven:.2f}; epsilon = {found.epsilon:g} allows an AUC of {found.allowed:.3f}. Do not release; "
            "report this as an error of the software"
        )
    if attack.auc > policy.largest_attack_auc:
        limit = f"largest-attack-auc = {policy.largest_attack_auc:g}"
        return f"the attack reaches an AUC of {attack.auc:.3f}; the policy has {limit}"
    if nearest is not None and nearest.ratio < policy.smallest_nearest_ratio:
        return (
            f"the means are nearer to the records used than to others ({nearest.ratio:.2f} of the distance); "
            f"smallest-nearest-ratio = {policy.smallest_nearest_ratio:g} in the policy"
        )
    return ""


def check_attacks(run: RunConfig, node: NodeConfig, policy: Policy) -> None:
    """Raise PolicyError if attacks on a release without privacy get beyond the policy's limits, or cannot be made.

    The refusal depends on data, so a private run is never refused: its claim bounds every attack.
    """
    if run.epsilon or (policy.largest_attack_auc == 1 and not policy.smallest_nearest_ratio):
        return
    if not run.spec.releases_once:
        raise PolicyError(
            f"method = {run.method!r}: the policy limits attacks on releases without privacy, and what this method sends "
            "cannot be attacked before it leaves"
        )
    if broken := limit_broken(audit_release(run, node, most=FEWEST), policy):
        raise PolicyError(broken)
