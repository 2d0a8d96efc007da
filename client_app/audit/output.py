"""What an audit leaves at the site: its page, files and pictures, and a refusal if the policy has
limits.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedsurrogate.common.errors import ConfigError, DataError, PolicyError, told_as
from fedsurrogate.common.files import kept_secret, replace_file
from fedsurrogate.common.pages import svg
from fedsurrogate.common.run import Run

from ..datasets.partition import share
from ..features.site_features import SiteFeatures, in_simulation, load_site
from ..governance.ledger import dataset_id
from ..governance.policy import Policy
from ..node_config import NodeConfig
from .release_audit import FEWEST, ReleaseAudit, audit_release

PAGE = (
    svg.page_head("Audit · {{ a.method }}")
    + """\
<style>
.grid section.card { margin-top: 0; } .grid + .banner { margin-top: 20px; }
.faces { display: flex; flex-wrap: wrap; gap: 12px; } .faces figure { margin: 0; max-width: 110px; font-size: 12px; overflow-wrap: anywhere; }
.faces img { width: 96px; height: 96px; object-fit: contain; image-rendering: pixelated; }
</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">Audit of a release · {{ a.method }} · stays at this site</p>
<h1>An attacker who knows every record separates used from unused ones with AUC {{ "%.3f" | format(a.attack.auc) }}.</h1>
<p>0.5 is a guess, 1 is certainty. {{ a.releases }} releases were made from random halves of {{ a.records }} {% if a.records < a.of %}of {{ a.of }} {% endif %}training records, by the
code and settings of this site. For each, the attacker knew all records and the releases of other halves, and guessed which records were used. A real release has twice
the records, and shows less of each. Nothing has left, and nothing was charged.</p>
</header>
{% if broken %}<div class="banner" role="alert"><h2>More than the claim allows</h2>
<p>{{ broken }}.</p></div>{% endif %}
<dl class="tiles">
<div class="tile"><dt>attack AUC</dt><dd>{{ "%.3f" | format(a.attack.auc) }}</dd><dd class="quiet">95 % interval {{ "%.3f" | format(a.attack.low) }} to {{ "%.3f" | format(a.attack.high) }}</dd></div>
<div class="tile"><dt>found at 1 % false alarms</dt><dd>{{ "%.1f" | format(100 * a.attack.rate_at_one_percent) }} %</dd><dd class="quiet">a guess finds 1 %</dd></div>
<div class="tile"><dt>found at 0.1 % false alarms</dt><dd>{{ "%.2f" | format(100 * a.attack.rate_at_one_in_thousand) }} %</dd><dd class="quiet">a guess finds 0.1 %</dd></div>
<div class="tile"><dt>records that stand out</dt><dd>{{ a.standing_out_count }}</dd><dd class="quiet">found in most releases with them</dd></div>
{% if a.epsilon %}<div class="tile"><dt>epsilon {{ a.epsilon }}</dt><dd>{{ "%.3f" | format(a.allowed) }}</dd><dd class="quiet">largest AUC that the claim allows</dd></div>{% endif %}
{% if a.nearest %}<div class="tile"><dt>means that are nearly a record</dt><dd>{{ "%.1f" | format(100 * a.nearest.copies) }} %</dd><dd class="quiet">nearest used record at {{ "%.2f" | format(a.nearest.ratio) }} of the distance of the nearest other (smallest {{ "%.2f" | format(a.nearest.smallest) }})</dd></div>{% endif %}
</dl>
<div class="grid">
<figure class="card"><h2>Success of the attack</h2><div class="plots">{{ curve }}</div><figcaption>{{ undrawn }}{% if not undrawn %}Both axes are logarithmic: what matters is whether some records are found with few false alarms.{% endif %}</figcaption></figure>
<section class="card"><h2>By class</h2><div class="scroll"><table><thead><tr><th>class</th><th class="number">records</th><th class="number">attack AUC</th></tr></thead><tbody>
{% for name, pair in a.per_class.items() %}<tr><td>{{ name }}</td><td class="number">{{ pair[0] }}</td><td class="number">{{ "%.3f" | format(pair[1]) }}</td></tr>{% endfor %}
</tbody></table></div></section>
</div>
{% if a.others %}<section class="card"><h2>By attack</h2><div class="scroll"><table><thead><tr><th>attack</th><th class="number">AUC</th><th class="number">95 % interval</th><th class="number">found at 1 %</th><th class="number">found at 0.1 %</th></tr></thead><tbody>
{% for name, r in a.attacks.items() %}<tr><td>{{ name }}</td><td class="number">{{ "%.3f" | format(r.auc) }}</td><td class="number">{{ "%.3f" | format(r.low) }} to {{ "%.3f" | format(r.high) }}</td><td class="number">{{ "%.1f" | format(100 * r.rate_at_one_percent) }} %</td><td class="number">{{ "%.2f" | format(100 * r.rate_at_one_in_thousand) }} %</td></tr>{% endfor %}
</tbody></table></div></section>{% endif %}
{% if a.nearest and a.nearest.classes %}<div class="banner little" role="alert"><h2>A mean shows a record</h2>
<p>{{ a.nearest.classes | join(", ") }}: a released mean is nearly one record. The class may consist of copies of one image, or its components of single records.</p></div>{% endif %}
{% if a.standing_out %}
<section class="card"><h2>Records that stand out</h2>
<p class="quiet">Look at them: a rare case, a broken image, a wrong label or a copy. Without them, or with a larger class or a smaller epsilon, the release shows less.</p>
{% if faces %}<div class="faces">{% for face in faces %}<figure><img src="data:image/png;base64,{{ face }}" alt=""><figcaption>{{ a.standing_out[loop.index0].class_name }}</figcaption></figure>{% endfor %}</div>{% endif %}
<div class="scroll"><table><thead><tr><th>class</th><th>record</th><th class="number">standard deviations</th></tr></thead><tbody>
{% for each in a.standing_out %}<tr><td>{{ each.class_name }}</td><td>{{ each.where }}</td><td class="number">{{ "%.1f" | format(each.distance) }}</td></tr>{% endfor %}
</tbody></table></div></section>
{% endif %}
<footer class="card"><dl>
<dt>what this does not show</dt><dd>Other attacks may do better; an audit proves leaks, never their absence. Only a claim (epsilon, delta) bounds every attack.</dd>
<dt>mechanism</dt><dd>{{ a.mechanism }}</dd><dt>duration</dt><dd>{{ "%.0f" | format(a.seconds) }} s</dd>
</dl></footer>
</main>
</body>
</html>
"""
)


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
        "a": audit,
        "broken": broken,
        "faces": faces,
        "curve": curve,
        "undrawn": svg.undrawn(),
    }
    return svg.render_page(PAGE, values)


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
    replace_file(facts, (json.dumps(audit.facts(), indent=2, allow_nan=False) + "\n").encode())
    replace_file(page, page_of(audit, claim_broken(audit), pictures).encode())
    return facts, page


def pictures_of(run: Run, node: NodeConfig, rows: Sequence[int], side: int = 96) -> list[bytes]:
    """Small PNG files of training records, as far as the data are images.

    Args:
        run: whose records are shown.
        node: the site's settings.
        rows: of the records in their data set.
        side: of a picture at most, pixels.
    """
    dataset, pictures = share(run, node, in_simulation()).dataset, []
    for row in rows if dataset.opener is not None else ():
        image = dataset.open_image(row)
        image.thumbnail((side, side))
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
