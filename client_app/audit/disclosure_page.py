"""The page of a disclosure sheet: one file, no network, to be printed and signed."""

from __future__ import annotations

from typing import Any

from fedsurrogate.common.pages.html import render_page
from fedsurrogate.common.pages.style import page_head

PARTS = {
    "projects": ("Safe projects", "What is this release for?"),
    "people": ("Safe people", "Who receives it?"),
    "data": ("Safe data", "What is it made from?"),
    "settings": ("Safe settings", "Where does it go, and within which limits?"),
    "outputs": ("Safe outputs", "What leaves, and what does it show?"),
}
PAGE = (
    page_head("Disclosure · {{ s.projects.method }}")
    + """\
<style>
section.card { margin: 0 0 18px; } dl.facts { display: grid; grid-template-columns: minmax(150px, 230px) 1fr; gap: 7px 18px; margin: 0; }
dl.facts dt { color: var(--quiet); } dl.facts dd { margin: 0; } dl.facts ul { margin: 0; padding-left: 18px; }
.sign { display: grid; grid-template-columns: 1fr 1fr 1fr; gap: 30px; margin-top: 56px; } .sign span { border-top: 1px solid var(--ink); padding-top: 4px; font-size: 13px; }
@media (max-width: 640px) { dl.facts { grid-template-columns: 1fr; gap: 2px; } dl.facts dd { margin-bottom: 8px; } }
</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">Disclosure sheet · run {{ s.run }} · {{ s.site }} · written {{ s.written }}</p>
<h1>What would leave this site for {{ s.projects.method }}: {{ s.outputs.bytes }} bytes.</h1>
<p>Facts for the person who decides, by the five safes (UK Data Service; SATRE). This sheet gives no verdict. Nothing has left, and nothing was charged. It stays at this site,
at the address <b>{{ address }}</b> in the state folder; the ledger's entry has the same address once the release leaves.</p>
</header>
{% macro show(value) %}{% if value is mapping %}<dl class="facts">{% for k, v in value.items() %}<dt>{{ k | replace("_", " ") }}</dt><dd>{{ show(v) }}</dd>{% endfor %}</dl>
{% elif value is iterable and value is not string %}{% if value %}<ul>{% for v in value %}<li>{{ show(v) }}</li>{% endfor %}</ul>{% else %}none{% endif %}
{% elif value is sameas true %}yes{% elif value is sameas false %}no{% elif value is none %}none{% elif value is float %}{{ "%.4g" | format(value) }}{% else %}{{ value }}{% endif %}{% endmacro %}
{% for key, (title, question) in parts.items() %}<section class="card"><h2>{{ title }}</h2><p class="quiet">{{ question }}</p>
<dl class="facts">{% for name, value in s[key].items() %}<dt>{{ name }}</dt><dd>
{% if name == "attacks" %}<div class="scroll"><table><thead><tr><th>attack</th><th class="number">AUC (0.5 is a guess)</th><th class="number">95 % interval</th><th class="number">found at 1 %</th><th class="number">at 0.1 %</th></tr></thead><tbody>
{% for attack, r in value.items() %}<tr><td>{{ attack }}</td><td class="number">{{ "%.3f" | format(r.auc) }}</td><td class="number">{{ "%.3f" | format(r.low) }} to {{ "%.3f" | format(r.high) }}</td><td class="number">{{ "%.1f" | format(100 * r.rate_at_one_percent) }} %</td><td class="number">{{ "%.2f" | format(100 * r.rate_at_one_in_thousand) }} %</td></tr>{% endfor %}
</tbody></table></div>Other attacks may do better: attacks prove leaks, never their absence.
{% else %}{{ show(value) }}{% endif %}</dd>{% endfor %}</dl></section>
{% endfor %}
<div class="sign"><span>name and role</span><span>date</span><span>signature</span></div>
</main>
</body>
</html>
"""
)


def page_of(content: dict[str, Any], address: str) -> str:
    """The page of a sheet, HTML.

    Args:
        content: of the sheet.
        address: of its files in the state folder.
    """
    return render_page(PAGE, {"s": content, "parts": PARTS, "address": address})
