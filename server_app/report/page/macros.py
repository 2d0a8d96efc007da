"""Template: values and parts that the other parts of the page use."""

MACROS = """\
{% set run_ok = run.failure is none %}
{% set model = run.number("accuracy", "model") %}
{% set oracle = run.number("accuracy", "oracle") %}
{% set sent = run.number("bytes", "up") %}
{% set private = privacy.private %}
{% set noisy = private and not privacy.tight %}
{% set counted = privacy.units | join("s or ") ~ "s" if private else "records" %}
{% macro sites_of(used, invited) %}{{ used }} of {{ invited }} {{ "site" if invited == 1 else "sites" }}{% endmacro %}
{% macro or_dash(value, kind="") %}
{% if value is none %}<span class="quiet">–</span>{% elif kind == "bytes" %}{{ value | bytes }}{% elif kind == "seconds" %}{{ value | seconds }}{% elif kind == "percent" %}{{ value | percent }}{% else %}{{ "{:,.0f}".format(value) }}{% endif %}
{% endmacro %}
{% macro number(value) %}{{ "–" if value is none or value is undefined else "%.3g" | format(value) }}{% endmacro %}
{% macro tile(name, value, note) %}
<div class="tile"><dt>{{ name }}</dt><dd>{{ value }}</dd><dd class="quiet">{{ note }}</dd></div>
{% endmacro %}
{% macro csv(name) %}
{% if name in tables %}<a class="csv" download="{{ name }}.csv" href="{{ tables[name] }}">{{ name }}.csv</a>{% endif %}
{% endmacro %}
{% set titles = {"features": ["Real, held by the sites", "Synthetic, sampled from surrogates"], "sheets": sheet_rounds, "curves": ["Round by round", "Byte by byte"]} %}
"""
