"""Template: sites, settings, and how to repeat the run."""

SITES = """\
<section class="card">
<h2>Sites</h2>
{% if card %}
<p>{{ card.invited }} invited{% if card.never_came %}, {{ card.never_came }} never connected{% endif %}:
{{ card.used }} used, {{ card.late }} late, {{ card.rejected }} rejected, {{ card.dropped }} dropped.
A site that has not reported its number of records is counted like the largest site.
{% if card.names == "registered" %}Every site has the name of its registered key.
{% elif card.names == "claimed" %}The sites chose their names themselves: the coordinator's app had no table of registered sites
(<code>coordinator register</code>). So a site could take the name of a site that had not yet replied.{% endif %}</p>
{% if card.suspects %}
<p><strong class="bad">Suspected:</strong> {{ card.suspects | join(", ") }}. The data that {{ "it" if card.suspects | length == 1 else "they" }} sent do not agree with those of the other sites, and are left out of the model; the table gives the reason.
They stay stored. An honest site can differ from all others: contact it before you trust either side.</p>
{% endif %}
{% if card.capped %}
<p>Weights were capped at <code>max-share</code> times the median site's records. {% for name, share in card.capped %}{{ name }} counts with {{ share | percent if share >= 0.001 else "less than 0.1%" }} of its reported records{{ ", " if not loop.last }}{% endfor %}.</p>
{% endif %}
{% endif %}
{% if sites %}
<div class="scroll" tabindex="0"><table>
<thead><tr><th>Site</th><th>Status and reason</th><th class="number">{{ counted | capitalize }}{{ " (noisy)" if noisy }}</th><th class="number">Sent</th><th class="number">Time</th>{% if sources %}{% for source in sources %}<th class="number">Accuracy, {{ source }}</th>{% endfor %}{% else %}<th class="number">Accuracy</th>{% endif %}</tr></thead>
<tbody>
{% for site in sites %}
<tr><td class="name">{{ site.name }}</td><td class="reason"><span class="{{ 'good' if site.status in ('used', 'replied') else 'bad' }}">{{ site.status }}</span>{% for what, why in site.troubles %}{{ ", " if loop.first else "; " }}{{ what ~ ": " if what != site.status }}{{ why }}{% endfor %}</td><td class="number">{{ or_dash(site.records) }}</td><td class="number">{{ or_dash(site.bytes, "bytes") }}</td><td class="number">{{ or_dash(site.seconds, "seconds") }}</td>{% if sources %}{% for source in sources %}<td class="number">{{ or_dash(run.downstream(site.name).get(source), "percent") }}</td>{% endfor %}{% else %}<td class="number">{{ or_dash(site.accuracy, "percent") }}</td>{% endif %}</tr>
{% endfor %}
</tbody></table></div>
{% if run.numbers("accuracy", "per_site") %}
<p class="after quiet">Accuracy at a site: {{ run.tested }}, on the site's own test records.{% if sources %} Own: a head on the site's own records. Synthetic: a head on synthetic embeddings of all classes. Mixed: both, weighted on the site's validation records.{% endif %}</p>
{% endif %}
<p class="csv">{{ csv("sites") }} {{ csv("classes") }} {{ csv("rounds") }}</p>
{% else %}
<p>No site is recorded.</p>
{% endif %}
</section>

<section class="card">
<h2>Settings</h2>
{% if changed or unchanged %}
{% if changed %}
<div class="scroll"><table>
<thead><tr><th>Changed for this run</th><th>Value</th><th>Default</th></tr></thead>
<tbody>
{% for key, value, default in changed %}
<tr class="changed"><td><code>{{ key }}</code></td><td><code>{{ value or "not set" }}</code></td><td><code>{{ default or "not set" }}</code></td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
<ul class="rest" aria-label="Settings at their defaults">
{% for key, value in unchanged %}
<li><code class="quiet">{{ key }}</code> <code>{{ value or "not set" }}</code></li>
{% endfor %}
</ul>
<p class="csv">{{ csv("settings") }}</p>
{% else %}
<p>Not recorded.</p>
{% endif %}
</section>

<footer class="card">
<h2>To repeat this run</h2>
<dl>
{% for key, name in (("run", "Run"), ("started", "Started"), ("seed", "Seed"), ("fingerprint", "Backbone fingerprint"), ("git_commit", "Git commit")) %}
<dt>{{ name }}</dt><dd><code>{{ run.manifest[key] if run.manifest.get(key) not in (none, "") else "not recorded" }}</code></dd>
{% endfor %}
<dt>Versions</dt><dd>{% for name, version in versions %}<code>{{ name }} {{ version }}</code>{{ " · " if not loop.last }}{% else %}<code>not recorded</code>{% endfor %}</dd>
</dl>
</footer>
</main>
</body>
</html>
"""
