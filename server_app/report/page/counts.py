"""Template: the tables of noisy counts."""

COUNTS = """\
{% for each in counts %}
<section class="card">
<h2>{{ "Evaluation at the sites" if each.kind == "evaluation" else "Survey of the sites" }}</h2>
<p>{{ each.title }}.</p>
<div class="scroll" tabindex="0"><table>
<thead><tr>{% for column in each.columns %}<th{% if not loop.first %} class="number"{% endif %}>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in each.rows %}
<tr>{% for cell in row %}<td class="{{ "name" if loop.first else "number" }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% for sentence in each.words %}
<p class="after quiet">{{ sentence }}</p>
{% endfor %}
</section>

{% endfor %}
"""
