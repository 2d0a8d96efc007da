"""Template: the section on privacy."""

PRIVACY = """\
{% set sent_as = "counts" if counting else "surrogate" %}
<section class="card">
<h2>Privacy</h2>
{% if not run.metrics %}
<p>Not recorded: the run ended before it wrote its result. Treat the data that the sites sent as unprotected.</p>
{% elif private %}
<div{% if "privacy" in pictures %} class="beside"{% endif %}>
<div>
<p><strong>Single {{ counted }} are protected{{ " in part" if privacy.tight }}.</strong> {% if privacy.sum %}The sites together added random noise to their sum. {% else %}Each site added random noise to its {{ sent_as }} before sending {{ "them" if counting else "it" }}. {% endif %}To
{{ privacy.relation }} in a site's {{ "data" if counting else "training data" }} changes the odds of any conclusion from {{ "those" if counting else "that" }} {{ "sum" if privacy.sum else sent_as }} by at
most a factor of e<sup>ε</sup>{% if privacy.factor is not none %} ({{ "%.3g" | format(privacy.factor) if privacy.factor < 1e6 else "over a million" }} for ε = {{ "%g" | format(privacy.epsilon) }}){% endif %},
except with probability δ{% if privacy.one_in %} (1 in {{ "{:,}".format(privacy.one_in) }}){% endif %}. This holds for every reader of the {{ "sum" if privacy.sum else sent_as }}, including the coordinator, and for any prior knowledge.
{% if privacy.certainty is not none %}A reader who first considers both cases equally likely can be at most
{{ "%.1f%%" | format(100 * privacy.certainty) if privacy.certainty < 0.9995 else "99.9% and more" }} sure afterwards. {% endif %}Smaller ε and δ protect more.</p>
{% for sentence in privacy.sum %}
<p>{{ sentence }}</p>
{% endfor %}
{% if privacy.covers %}
<p><strong>Covered:</strong> {{ privacy.covers }}.</p>
{% endif %}
{% if privacy.not_covered %}
<p class="before"><strong>Not covered:</strong></p>
<ul class="plain">
{% for item in privacy.not_covered %}
<li>{{ item }}</li>
{% endfor %}
</ul>
{% endif %}
</div>
{% if "privacy" in pictures %}
<figure>
<h3>Signal-to-noise ratio of the statistics</h3>
<div class="plots" role="img" aria-label="Signal-to-noise ratio of the statistics">{{ pictures.privacy[0] }}</div>
<figcaption>Estimated from the released statistics of each site. Right of the dashed line the signal is larger than the
noise. Left of it one site alone carries little information; the sum over S similar sites raises the ratio by √S.</figcaption>
</figure>
{% endif %}
</div>
<div class="scroll" tabindex="0"><table>
<thead><tr><th>Site</th><th>Protects one</th><th class="number">ε</th>{% if privacy.tight %}<th class="number">ε of this noise</th>{% endif %}<th class="number">δ</th><th>Mechanism</th><th class="number">Noise multiplier</th>{% for _, text in privacy.statistics %}<th class="number">σ, {{ text }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in privacy.rows %}
<tr><td>{{ row.name }}</td><td>{{ row.unit or "–" }}</td><td class="number">{{ number(row.epsilon) }}</td>{% if privacy.tight %}<td class="number">{{ number(row.tight) }}</td>{% endif %}<td class="number">{{ number(row.delta) }}</td><td class="kind">{{ row.mechanism or "–" }}</td><td class="number">{{ number(row.multiplier) }}</td>{% for key, _ in privacy.statistics %}<td class="number">{{ number(row.noise.get(key)) }}</td>{% endfor %}</tr>
{% else %}
<tr><td>all sites</td><td>–</td><td class="number">{{ number(privacy.epsilon) }}</td><td class="number">{{ number(privacy.delta) }}</td><td>–</td><td class="number">–</td></tr>
{% endfor %}
</tbody></table></div>
<p class="csv">{{ csv("privacy") }}</p>
{% if privacy.statistics %}
<p class="after quiet">The noise multiplier is the noise divided by the largest change that one {{ privacy.units | join(" or ") }} can cause. σ is the standard deviation of the
noise in every entry of a sum over {{ counted }}, whose features have norm at most one{{ "; a mean of n records has 1/n of it" if privacy.tight }}.{% if privacy.tight %} "ε of this noise" is the exact ε of the noise, which can differ from the ε of the published theorem.{% endif %}</p>
{% endif %}
{% if unprotected and privacy.rows %}
<p class="after"><strong class="bad">No budget is recorded for {{ unprotected }}:</strong> data from there are unprotected.</p>
{% endif %}
{% elif privacy.asked %}
<p><strong>No surrogate was used, so there is no privacy guarantee to report.</strong> The run requested ε = {{ "%g" | format(privacy.asked) }} from every
site. The ledger of each site records what the site has sent.</p>
{% elif privacy.sum %}
<p><strong>Nothing of a single site was visible.</strong></p>
{% for sentence in privacy.sum %}
<p>{{ sentence }}</p>
{% endfor %}
{% else %}
<p><strong>Nothing protects single records in this run:</strong> the sites added no noise to the data that they released. Images
stayed at the sites. But a surrogate is a summary of real patients' features, and its reader may learn something about single
records, above all in small classes. Protect the surrogates and the model like the original data.</p>
{% endif %}
</section>

"""
