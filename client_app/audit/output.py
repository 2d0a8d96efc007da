"""What an audit leaves at the site: its page, files and pictures, and a refusal if the policy has
limits.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedsurrogate.common.errors import ConfigError, DataError, PolicyError, told_as
from fedsurrogate.common.escapes import for_html
from fedsurrogate.common.files import kept_secret, replace_file
from fedsurrogate.common.pages import svg
from fedsurrogate.common.run import Run

from ..datasets.partition import share
from ..features.site_features import SiteFeatures, in_simulation, load_site
from ..governance.ledger import dataset_id
from ..governance.policy import Policy
from ..node_config import NodeConfig
from .release_audit import FEWEST, ReleaseAudit, audit_release

TEMPLATES = Path(__file__).with_name("templates")


def page_of(audit: ReleaseAudit, broken: str = "", pictures: Sequence[bytes] = ()) -> str:
    """The page of an audit, HTML.

    Args:
        audit: of a release.
        broken: what contradicts the claim; empty for nothing.
        pictures: PNG files of the records that stand out, in their order.
    """
    faces = [base64.b64encode(content).decode() for content in pictures]
    curve = svg.trusted(svg.render("audit-curve", 3.4, lambda figure: _draw(figure, audit)))
    values = {
        "head": svg.trusted(svg.page_head(for_html(f"Audit · {audit.method}"))),
        "a": audit,
        "broken": broken,
        "faces": faces,
        "curve": curve,
        "undrawn": svg.undrawn(),
    }
    return svg.render_page("audit.html.j2.md", values, TEMPLATES)


def _draw(figure: Any, audit: ReleaseAudit) -> None:
    axes = svg.make_axes(figure, left=0.72, right=0.3, top=0.15, bottom=0.55)
    false, true = zip(*audit.attack.curve, strict=True)
    axes.plot([1e-4, 1], [1e-4, 1], color=svg.LINE, linewidth=1, linestyle=(0, (4, 4)))
    axes.plot(false, [max(rate, 1e-4) for rate in true], color=svg.BLUE, linewidth=1.8)
    axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1))
    ticks = {1e-4: "0.01 %", 1e-3: "0.1 %", 1e-2: "1 %", 1e-1: "10 %", 1.0: "100 %"}
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(list(ticks), ticks.values())
        axis.set_ticks([], minor=True)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.grid(color=svg.FAINT, linewidth=0.8)


SECRET_BYTES = 32
# Most pixels of a picture's side.
SIDE = 96
NEEDED = "limits on attacks need it; see state-dir"


def write_audit(
    audit: ReleaseAudit, folder: Path, pictures: Sequence[bytes] = ()
) -> tuple[Path, Path]:
    """Write audit.json and audit.html; only their owner may read them, for they name records.

    Args:
        audit: of a release.
        folder: of the files.
        pictures: PNG files of the records that stand out.

    Returns:
        The files audit.json and audit.html.

    Raises:
        OSError: if they cannot be written.
    """
    facts, page = folder / "audit.json", folder / "audit.html"
    replace_file(facts, (json.dumps(asdict(audit), indent=2, allow_nan=False) + "\n").encode())
    replace_file(page, page_of(audit, claim_broken(audit), pictures).encode())
    return facts, page


def pictures_of(run: Run, node: NodeConfig, rows: Sequence[int]) -> list[bytes]:
    """Small PNG files of training records, as far as the data are images.

    Args:
        run: whose records are shown.
        node: the site's settings.
        rows: of the records in their data set.
    """
    dataset, pictures = share(run, node, in_simulation()).dataset, []
    for row in rows if dataset.opener is not None else ():
        image = dataset.open_image(row)
        image.thumbnail((SIDE, SIDE))
        content = BytesIO()
        image.save(content, "PNG")
        pictures.append(content.getvalue())
    return pictures


def claim_broken(audit: ReleaseAudit) -> str:
    """What contradicts the run's claim of privacy; empty if nothing does, or nothing is claimed."""
    if not audit.epsilon:
        return ""
    proofs = []
    for name, each in audit.attacks.items():
        if each.low > audit.allowed or each.high < 1 - audit.allowed:
            proofs.append(
                f"{name}: AUC {each.auc:.3f} ({each.low:.3f} to {each.high:.3f}), "
                f"{audit.allowed:.3f} is allowed"
            )
        if (excess := audit.excess[name]) is not None and excess.low > 0:
            rates = f"{excess.true_rate:.2%} right at {excess.false_rate:.2%} false"
            proofs.append(f"{name}: {rates}, {excess.excess:.2%} more than allowed")
    if audit.proven > audit.epsilon:
        proofs.append(f"the attack proves an epsilon above {audit.proven:.2f}")
    if not proofs:
        return ""
    proof = f"more than epsilon = {audit.epsilon:g} allows ({'; '.join(proofs)})"
    return f"{proof}. Do not release; report this as an error of the software"


def limit_broken(audit: ReleaseAudit, policy: Policy) -> str:
    """Why this audit speaks against the release: the claim, or a limit of the policy.

    The policy's limit is compared with the upper end of each attack's interval: a release passes if
    it is likely below.

    Args:
        audit: of a release.
        policy: of the site.

    Returns:
        The reason; empty if there is none.
    """
    if broken := claim_broken(audit):
        return broken
    for name, each in audit.attacks.items():
        if max(each.high, 1 - each.low) > policy.largest_attack_auc:
            limit = f"largest-attack-auc = {policy.largest_attack_auc:g}"
            return (
                f"{name} reaches an AUC of {each.auc:.3f} ({each.low:.3f} to {each.high:.3f}); "
                f"the policy has {limit}"
            )
    # A private release without means is bounded by its claim.
    if policy.smallest_nearest_ratio and (audit.nearest is not None or not audit.epsilon):
        limit = f"smallest-nearest-ratio = {policy.smallest_nearest_ratio:g} in the policy"
        if audit.nearest is None:
            return (
                f"method = {audit.method!r} sends no means, so their distance from records is "
                f"unknown; {limit}"
            )
        if audit.nearest.ratio < policy.smallest_nearest_ratio:
            distance = f"{audit.nearest.ratio:.2f} of the distance"
            return f"the means are nearer to the records used than to others ({distance}); {limit}"
    return ""


def check_attacks(run: Run, node: NodeConfig, policy: Policy) -> None:
    """Refuse a release without privacy if attacks on it get beyond the policy's limits.

    The refusal depends on data, so a private run is never refused: its claim bounds every attack.
    Counts have limits of their own (`exact-counts`, `smallest-cell`).

    Args:
        run: whose release is attacked.
        node: the site's settings.
        policy: of the site.

    Raises:
        PolicyError: if a limit is exceeded, or the attacks cannot be made.
    """
    if run.settings.epsilon or run.plan.counts or not policy.limits_attacks:
        return
    method = f"method = {run.settings.method!r}"
    unknown = (
        f"{method}: the policy limits attacks on releases without privacy, and what this "
        "method sends "
    )
    if not run.plan.releases_once:
        raise PolicyError(f"{unknown}cannot be attacked before it leaves")
    try:
        selected = load_site(run, node, policy.cache_mib)
        _same_records(node, selected, {} if run.target is None else run.target.public)
        audit = audit_release(run, node, most=FEWEST, seed=_seed(node))
    except (ConfigError, DataError) as error:
        raise PolicyError(f"{unknown}cannot be attacked: {error}") from None
    if broken := limit_broken(audit, policy):
        raise PolicyError(broken)


def _same_records(
    node: NodeConfig, site_features: SiteFeatures, target: Mapping[str, object]
) -> None:
    """Raise PolicyError where a run selects other records of the same files than the first run
    under limits.

    With other records (seed, test-fraction, classes), the halves would be new, and two releases
    that pass show by their difference the records of one alone. So do two ranges of a number.
    """
    of = json.dumps(target, sort_keys=True) if target else node.label_column
    chosen = hashlib.sha256(f"{of}\0{site_features.selected}".encode()).digest()
    file = (
        node.state / "audited" / f"{dataset_id(node.data, node.data_dir)}-{site_features.key[:32]}"
    )
    with told_as(PolicyError, f"{str(file)!r} cannot be used", NEEDED):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=60):
            if not file.exists():
                replace_file(file, chosen)
            elif file.read_bytes() != chosen:
                raise PolicyError(
                    "the run selects other records than an earlier one under limits on attacks "
                    "(seed, test-fraction, classes), or another target; the difference of both would "
                    "show these; "
                    f"remove {str(file)!r} to allow it"
                )


def _seed(node: NodeConfig) -> int:
    """The seed of the halves: a secret of the site, the same for all runs.

    With new halves for each request, or for each seed of a run, a coordinator could repeat a
    request until it passes.
    """
    file = node.state / "audit.key"
    with told_as(PolicyError, f"{str(file)!r} cannot be used", NEEDED):
        secret = kept_secret(file, SECRET_BYTES)
    if len(secret) != SECRET_BYTES:
        raise PolicyError(f"{str(file)!r} is damaged, and limits on attacks need it; remove it")
    return int.from_bytes(secret)
