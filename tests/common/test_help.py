"""Every setting describes itself, and what it says is what the parser does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.help import Description, descriptions, without_effect
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.counting import KINDS_OF_COUNTS
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import flatten
from fedsurrogate.server_app.deployment.local_engine import simulate_here

ROWS = descriptions()
NUMBER = r"[\d.e+-]+"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_every_key_has_a_sentence_a_kind_a_range_and_a_method(row: Description) -> None:
    assert re.fullmatch(r"[A-Z][^\n]{8,220}\.", row.text), (
        "one sentence that begins with a capital and ends with a full stop"
    )
    assert row.kind
    assert row.range
    assert max(map(len, row.range.split())) < 40, "no number of hundreds of digits"
    assert row.methods
    assert set(row.methods) <= METHODS.keys() | KINDS_OF_COUNTS.keys()


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.kind in ("whole number", "number")], ids=lambda row: row.key
)
def test_a_number_outside_the_described_range_is_refused(row: Description) -> None:
    found = re.fullmatch(
        rf"(0, or )?(?:(above|at least|at most) )?({NUMBER})(?: to (below )?({NUMBER}))?", row.range
    )
    if not found:
        assert row.range == row.kind or row.key == "sites", "no limit, or names in its place"
        return
    first, most = float(found[3]), found[5] and float(found[5])
    step = 1.0 if row.kind == "whole number" else 1e-9
    outside = (
        [first + step]
        if found[2] == "at most"
        else [first if found[2] == "above" else first - step]
    )
    outside += [most if found[4] else most * (1 + 1e-9) + step] if most else []
    for value in outside:
        with pytest.raises(ConfigError, match=rf"{re.escape(row.key)} = "):
            parse_run({row.key: int(value) if row.kind == "whole number" else value})


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if " or " in row.range and row.kind == "text"],
    ids=lambda row: row.key,
)
def test_a_refused_choice_names_the_described_ones(row: Description) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run({row.key: "zzz"})
    for choice in re.split(r", | or ", row.range):
        assert f"'{choice}'" in str(caught.value)


@pytest.mark.parametrize("spec", METHODS.values(), ids=METHODS)
def test_the_settings_of_a_method_include_all_sections_that_decide_what_a_site_sends(
    spec: object,
) -> None:
    name = getattr(spec, "name")  # noqa: B009
    rows = descriptions(method=name)
    assert all(name in row.methods for row in rows)
    assert {"method", "seed", "backbone"} <= {row.key for row in rows}
    sections = {row.section for row in rows if row.section}
    assert sections == {
        section for section in METHODS[name].sections if _has_keys(section, name)
    } | ({"fedpft"} if "order" in METHODS[name].usual.allows else set())
    assert sections


def _has_keys(section: str, method: str) -> bool:
    return any(row.section == section and method in row.methods for row in ROWS)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("fedpft.rnk", "fedpft.rank"),
        ("rank", "fedpft.rank"),
        ("deadlin", "deadline"),
        ("learning-rate", "head.learning-rate"),
    ],
)
def test_an_unknown_key_is_refused_with_the_names_close_to_it(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{wrong}'; did you mean .*'{meant}'"):
        descriptions(wrong)


def test_a_setting_of_another_method_is_named_before_the_start(tmp_path: Path) -> None:
    """Also where the settings come whole, as from a run folder: their defaults are no remark."""
    run = parse_run(
        {"method": "average", "fedavg.keep": 0.25, "fedlap.model": "mlp", "head.epochs": 2}
    )
    first, second = without_effect(run.method, run.settings.flat())
    assert (
        first
        == "fedavg.keep = 0.25 has no effect: method = 'average' does not use it, but dsfl does"
    )
    assert second.startswith(
        "fedlap.model = 'mlp' has no effect: method = 'average' does not use it, but fedlap and "
    )
    for name in METHODS:
        private = {"epsilon": 1.0, "delta": 1e-5} if METHODS[name].needs_budget else {}
        whole = flatten(
            parse_run({"method": name} | private).settings.model_dump(by_alias=True, mode="json")
        )
        run = parse_run(whole)
        assert not without_effect(run.method, run.settings.flat()), name
    events: list[dict[str, object]] = []
    settings = {"method": "average", "fedavg.keep": 0.25, "output-dir": str(tmp_path)}
    simulate_here(2, settings, events.append, report=False)
    reasons = [str(event["reason"]) for event in events if event["event"] == "warning"]
    assert [each for each in reasons if "has no effect" in each] == [first]
