"""Template: pictures and their captions."""

PICTURES = """\
{% macro outcomes_caption() %}
Higher is better, further left is cheaper. The accuracy axis is zoomed to the values.
{% if model is none and run.numbers("accuracy", "per_site") | length > 1 %}The dot is the mean of the sites. The line goes from the worst site to the best.{% endif %}
{% if run.number("accuracy", "ensemble") is not none %}
<em>Pooled real features</em>: one head trained on the features of all sites together, the upper reference.
<em>Ensemble</em> and <em>average of heads</em>: every site trains its own head and sends it.
{% endif %}
{% endmacro %}
{% macro progress_caption() %}
{% if run.metrics.get("hops") %}Every site trains a head on its own records and on the surrogate from the site before it. Shown: accuracy of its head on all test data. {% else %}Accuracy of the model on all test data after every round. {% endif %}
This is known only because the run was a simulation.
{% endmacro %}
{% macro curves_caption() %}
Accuracy on all test data, by round and by the bytes that all sites together had sent up. A diamond is a run whose sites send once; its dashed line is the accuracy that the others have to reach.
{% endmacro %}
{% macro sheets_caption() %}
Synthetic images, one row per class, from the first site that has the class; contrast is increased. They have the gradients of real images, but need not
look like them{% if private %}. They include the privacy noise{% else %}. Without privacy, nothing guarantees that a record cannot be guessed from them{% endif %}.
{% endmacro %}
{% macro radii_caption() %}
Grey: the distance from the round's model within which each site's synthetic images approximate its real ones. Black: the radius that the
coordinator used{% if run.manifest.get("config", {}).get("fedlap.rule") %}, by rule <code>{{ run.manifest.config["fedlap.rule"] }}</code>{% endif %}. Blue: how far the model moved.
{% endmacro %}
{% macro downstream_caption() %}
Heads trained on a site's own records, on synthetic embeddings of all classes, and a mixture of both. λ: weight of the site's own head, chosen on its validation records.
{% if run.number("fidelity", "sliced") is not none %}Distance between synthetic and real embeddings of the same classes, mean over the sites:
{{ "%.3g" | format(run.number("fidelity", "sliced")) }} sliced, {{ "%.3g" | format(run.number("fidelity", "sinkhorn") or 0) }} Sinkhorn Wasserstein; embeddings have norm one. {% endif %}
{% if run.number("parameters") is not none %}A site sends {{ "{:,.0f}".format(run.number("parameters")) }} parameters a round.{% endif %}
{% endmacro %}
{% macro epsilons_caption() %}
Every round is charged to the site's ledger before its data leave the site. The curve is the epsilon of all rounds together.
{% endmacro %}
{% macro time_caption() %}
{% if run.number("seconds", "total") is not none %}The federation took {{ run.number("seconds", "total") | seconds }}. {% endif %}
{% if run.number("seconds", "command") is not none %}The command took {{ run.number("seconds", "command") | seconds }} until this report.{% endif %}
{% endmacro %}
{% macro accuracy_caption() %}
Tested: {{ run.tested }}, on the site's own test records. Dashed: {{ "the global model on the common test split" if model is not none else "the mean of the sites" }}.
{% if lowest %}Lowest: {% for site in lowest %}{{ site.label }} ({{ site.accuracy | percent }}){{ ", " if not loop.last }}{% endfor %}.{% endif %}
{% endmacro %}
{% macro counts_caption() %}
{% if noisy %}Counts of {{ counted }} in the surrogates, noise included{% else %}Records per site and class{% endif %}; the stronger the colour, the more{% if run.sites | length > 24 %}; sites in the same order as in the accuracy picture{% endif %}.
{% endmacro %}
{% macro map_caption() %}
Near points: similar surrogates, mean of the Bures-Wasserstein distances over the classes{% if private %}, privacy noise subtracted{% endif %}. {% for sentence in map_words %}<strong>{{ sentence }}</strong> {% else %}No site stands apart. {% endfor %}
A site may be far away because its patients or scanners differ; that alone is no fault.
{% endmacro %}
{% macro values_caption() %}
Bars: the mean gain in accuracy when a site joins those before it, over all orders (Shapley). Diamonds: the accuracy of all sites minus that without the site. Lines, if any: two standard deviations of the privacy noise in the bar. Measured without a defence against hostile sites. {% for sentence in value_words %}<strong>{{ sentence }}</strong> {% endfor %}
A site whose patients the test records lack has a low value too.
{% endmacro %}
{% macro evaluation_caption() %}
On held-out records of the sites, which no run trains on. Lines: 95 % intervals{% if private %}, which include the privacy noise{% endif %}. A measure that is not drawn is hidden by the noise.
{% endmacro %}
{% macro survey_caption() %}
All sites together. Lines: 95 % intervals{% if private %} of the privacy noise{% endif %}.
{% endmacro %}
{% macro features_caption() %}
Both in the same two dimensions, one colour per class{% if run.classes | length > 10 %} (the ten largest; the others are grey){% endif %}, at
most 1,500 points each. Similar clouds mean that the surrogates represent the data well, as far as two dimensions can show.
This picture exists only because the run was a simulation. In a deployment the real points never leave a hospital.
{% endmacro %}
{% set captions = {"outcomes": outcomes_caption, "progress": progress_caption, "curves": curves_caption, "sheets": sheets_caption, "radii": radii_caption, "downstream": downstream_caption, "epsilons": epsilons_caption, "time": time_caption, "accuracy": accuracy_caption, "counts": counts_caption, "features": features_caption, "map": map_caption, "values": values_caption, "evaluation": evaluation_caption, "survey": survey_caption} %}
<div class="grid">
{% for key, title, place in layout %}
<figure class="card {{ place }}">
<div>
<h2>{{ title }}</h2>
<div class="plots" role="img" aria-label="{{ title }}">{% for svg in pictures[key] %}{% if titles.get(key) %}<div><h3>{{ titles[key][loop.index0] }}</h3>{{ svg }}</div>{% else %}{{ svg }}{% endif %}{% endfor %}</div>
</div>
<figcaption>{{ captions[key]() }}{% if key == "counts" %} {{ csv("classes") }}{% elif key == "progress" %} {{ csv("rounds") }}{% elif key == "curves" %} {{ csv("comparison") }}{% endif %}</figcaption>
</figure>
{% endfor %}
</div>
{% if without_pictures %}
<p class="quiet">{{ without_pictures }}.</p>
{% endif %}
{% if undrawn %}
<p class="quiet" style="margin-top: 14px; font-size: 14px">Not drawn, because the numbers are missing: {{ undrawn | join(", ") }}.</p>
{% endif %}

"""
