"""The page of an audit: one file, no network. It stays at the site, because it names records."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.pages.html import render_page, trusted
from fedsurrogate.common.pages.style import page_head
from fedsurrogate.common.pages.svg import BLUE, FAINT, LINE, make_axes, render, undrawn

if TYPE_CHECKING:
    from fedsurrogate.client_app.audit.release_audit import ReleaseAudit

PAGE = (
    page_head("Audit · {{ a.method }}")
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
    curve = trusted(render("audit-curve", 3.4, lambda figure: _draw(figure, audit)))
    values = {"a": audit, "broken": broken, "faces": faces, "curve": curve, "undrawn": undrawn()}
    return render_page(PAGE, values)


def _draw(figure: Any, audit: ReleaseAudit) -> None:
    axes = make_axes(figure, left=0.72, right=0.3, top=0.15, bottom=0.55)
    false, true = zip(*audit.attack.curve, strict=True)
    axes.plot([1e-4, 1], [1e-4, 1], color=LINE, linewidth=1, linestyle=(0, (4, 4)))
    axes.plot(false, [max(rate, 1e-4) for rate in true], color=BLUE, linewidth=1.8)
    axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1))
    ticks = {1e-4: "0.01 %", 1e-3: "0.1 %", 1e-2: "1 %", 1e-1: "10 %", 1.0: "100 %"}
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(list(ticks), ticks.values())
        axis.set_ticks([], minor=True)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.grid(color=FAINT, linewidth=0.8)
