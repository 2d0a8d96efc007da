"""Template: the beginning of the page: heading, problems, and the main numbers."""

TOP = """\
</head>
<body>
<main>
<header>
<p class="eyebrow">Federated run · {{ folder }}{% if run.manifest.get("started") %} · started {{ run.manifest.started }}{% endif %}</p>
<h1>
{%- if not run_ok -%}
{{ run.method }} did not finish: {{ sites_of(run.used, run.invited) }} had replied
{%- if sent %}, {{ sent | bytes }} received{% endif %}.
{%- elif counting -%}
{{ counting }}.
{%- else -%}
{{ run.method }} {{ "on the surrogates of" if run.sends_surrogates else "with" }} {{ sites_of(run.used, run.invited) }}
{%- if model is not none %} reaches {{ model | percent }} accuracy
{%- if oracle is not none %}, against {{ oracle | percent }} with pooled real features{% endif %}
{%- elif run.accuracy is not none %} reaches {{ run.accuracy | percent }} accuracy {{ "on the site's own" if run.used == 1 else "averaged over the sites' own" }} test data
{%- else %} finished; its accuracy was not measured{% endif %}
{%- if sent is not none %}; {{ "it" if run.used == 1 else "they" }} sent {{ sent | bytes }} in total{% endif %}.
{%- endif -%}
</h1>
{% if run.head %}<p>The head: {{ run.head }}.</p>{% endif %}
</header>

{% set stopped = run.metrics.get("stopped") %}
{% if warnings %}
<div class="banner little" role="alert">
<h2>Read this result with care</h2>
{% for warning in warnings %}
<p>{{ warning }}</p>
{% endfor %}
</div>
{% endif %}
{% if not run_ok or stopped or troubles or run.notes or run.used < run.invited or privacy.dropped or card.get("never_came") %}
<div class="banner{{ " little" if run_ok and card.get("state") in ("green", "amber") }}" role="alert">
{% if not run_ok %}<h2>The run {{ "was interrupted" if run.metrics.get("status") == "interrupted" else "failed" }}</h2> <p>{{ run.failure }}</p>
{% elif stopped %}<h2>The run stopped early; the result is the model at that point</h2> <p>{{ stopped }}</p>
{% elif run.used < run.invited %}<h2>{{ run.invited - run.used }} of {{ run.invited }} sites {{ "is" if run.invited - run.used == 1 else "are" }} not in this result</h2>
{% elif troubles %}<h2>Some sites did not reply correctly</h2>
{% elif privacy.dropped and not run.notes %}<h2>The model has not learned every class</h2>
{% else %}<h2>This report is incomplete</h2>{% endif %}
{% if run_ok and card.get("missing_share") %}<p>About {{ card.missing_share | percent }} of all records {{ "are missing. The model may not be valid for them." if card.state == "red" else "are missing." }}</p>{% endif %}
{% if troubles or run.notes or privacy.dropped or card.get("never_came") %}
<ul>
{% if card.get("nameless") %}<li><strong>{{ card.nameless }} more</strong>: expected by the settings, but never connected</li>{% endif %}
{% for who, what, why in troubles %}
<li><strong>{{ who }}</strong>: {{ what }}, {{ why }}</li>
{% endfor %}
{% if privacy.dropped %}
{% set one = privacy.dropped | length == 1 %}
<li><strong>{{ "Class" if one else "Classes" }} {{ privacy.dropped | join(", ") }}</strong>: not learned. Either no site has {{ "it" if one else "them" }}, or too few {{ counted }} for {{ "it" if one else "them" }} to stand out from the privacy noise.</li>
{% endif %}
{% for note in run.notes %}
<li>{{ note }}; parts that need it are left out below.</li>
{% endfor %}
</ul>
{% endif %}
</div>
{% endif %}

<dl class="tiles">
{% if model is not none %}
{{ tile("Accuracy", model | percent, "%.1f points %s pooled features" | format(100 * (model - oracle) | abs, "below" if model < oracle else "above") if oracle is not none else "on the test split") }}
{% elif run.accuracy is not none %}
{{ tile("Accuracy", run.accuracy | percent, "on the site's own data" if run.used == 1 else "mean over the sites") }}
{% endif %}
{{ tile("Sites", run.used ~ " of " ~ run.invited, "used, of invited" if run_ok else "replied, of invited") }}
{% if sent is not none %}
{% set rounds = run.metrics.get("rounds") or [] %}
{{ tile("Sent up", sent | bytes, (sent / rounds | length) | bytes ~ " a round" if rounds | length > 1 else (run.number("bytes", "down") | bytes) ~ " sent down" if run.number("bytes", "down") is not none else "by all sites") }}
{% endif %}
{% if run.number("seconds", "command") is not none %}
{{ tile("Duration", run.number("seconds", "command") | seconds, "the command; the federation " ~ (run.number("seconds", "total") or 0) | seconds) }}
{% elif run.number("seconds", "total") is not none %}
{{ tile("Duration", run.number("seconds", "total") | seconds, "from start to end") }}
{% endif %}
{% if run.metrics %}
{% if privacy.epsilon is not none %}
{{ tile("Privacy", "ε = %g" | format(privacy.epsilon), "for one " ~ privacy.units | join(" or ") ~ (", δ = %g" | format(privacy.delta) if privacy.delta is not none else "")) }}
{% elif not private %}
{{ tile("Privacy", "none added", "not differentially private") }}
{% endif %}
{% endif %}
</dl>

"""
