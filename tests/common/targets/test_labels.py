"""Labels record by record, in plain loops: both codes, what settings decide of them, who annotates
what, and the loss of a model.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.targets.labels import CODES, MOMENTS, SET_PART, Labels
from fedsurrogate.common.targets.target import CODE, RECORDS, SQUARES, SUMS, TOTALS

NAMES = ("a", "b", "c")
LABEL = st.sampled_from([0.0, 1.0, math.nan])
ROWS = st.lists(st.tuples(LABEL, LABEL, LABEL), min_size=1, max_size=7)
SITES = st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=5)


def labels_of(sites: list[set[str]], **more: Any) -> Labels:
    sets = tuple((f"s{at}", tuple(sorted(own, reverse=True))) for at, own in enumerate(sites))
    return Labels(NAMES, sets, **more)


def whole_sets(sites: list[set[str]]) -> list[tuple[str, ...]]:
    """Each set once, in the order of the sites, its labels in that of the columns."""
    return list(dict.fromkeys(tuple(sorted(own)) for own in sites)) or [NAMES]


def is_known(row: tuple[float, ...], labels: tuple[str, ...]) -> bool:
    return not any(math.isnan(row[NAMES.index(name)]) for name in labels)


@settings(max_examples=100, deadline=None)
@given(ROWS, SITES)
@example([(1.0, 1.0, 1.0), (1.0, 0.0, math.nan)], [{"a"}, {"a", "b"}, {"a", "b", "c"}])
def test_a_record_has_its_largest_whole_set_and_what_of_it_is_present(
    rows: list[tuple[float, ...]], sites: list[set[str]]
) -> None:
    labels, sets = labels_of(sites, capped=True), whole_sets(sites)
    assert labels.label_sets == tuple(sets)
    assert labels.members.tolist() == [[name in own for name in NAMES] for own in sets]
    entry, unused, annotated = math.sqrt(SET_PART / (1 - SET_PART)), 0, 0
    for row, code in zip(rows, labels.code(torch.tensor(rows)).tolist(), strict=True):
        whole = [own for own in sets if is_known(row, own)]
        if not whole:
            assert code == [0.0] * (3 + len(sets))
            unused += 1
            continue
        annotated += 1
        own = max(whole, key=len)
        present = [name for name in own if row[NAMES.index(name)] == 1]
        share = 1 / math.sqrt(len(present)) if present else 0.0
        wanted = [share * (name in present) for name in NAMES]
        wanted += [entry * (each == own) for each in sets]
        assert code == pytest.approx(wanted)
        # The set is this part of the squared norm of a record with a label.
        if present:
            assert entry**2 / sum(each**2 for each in code) == pytest.approx(SET_PART)
    assert labels.rows[:3] == ("a: present", "b: present", "c: present")
    assert labels.rows[3:] == tuple(f"annotated for set {k + 1}" for k in range(len(sets)))
    assert labels.counted(labels.code(torch.tensor(rows)).sum(0)) == pytest.approx(annotated)
    warnings = labels.warnings(torch.tensor(rows))
    assert len(warnings) == bool(unused)
    assert not unused or warnings[0].startswith(f"{unused} of {len(rows)} records are not")


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_exact_code_has_both_answers_of_each_label(rows: list[tuple[float, ...]]) -> None:
    labels = Labels(NAMES)
    code = labels.code(torch.tensor(rows))
    assert code.dtype == torch.float64
    wanted = [[float(own == there) for own in row for there in (1.0, 0.0)] for row in rows]
    assert code.tolist() == wanted
    assert labels.rows == tuple(f"{n}: {there}" for n in NAMES for there in ("present", "absent"))
    assert labels.warnings(torch.tensor(rows)) == []
    known = [sum(not math.isnan(row[at]) for row in rows) for at in range(3)]
    assert labels.counted(code.sum(0)) == max(known)
    assert labels.known(code.sum(0)) == ()
    assert Labels(NAMES, own=True).known(code.sum(0)) == tuple(count > 0 for count in known)


@settings(max_examples=60, deadline=None)
@given(ROWS, SITES.filter(bool), st.data())
def test_a_site_has_the_labels_that_settings_say_and_no_others(
    rows: list[tuple[float, ...]], sites: list[set[str]], data: st.DataObject
) -> None:
    labels = labels_of(sites)
    at = data.draw(st.integers(0, len(sites) - 1))
    found = labels.of_site(torch.tensor(rows), f"s{at}")
    for row, kept in zip(rows, found.tolist(), strict=True):
        wanted = [x if n in sites[at] else math.nan for n, x in zip(NAMES, row, strict=True)]
        assert kept == pytest.approx(wanted, nan_ok=True)
    with pytest.raises(ConfigError, match="do not name site 'north'"):
        labels.of_site(torch.tensor(rows), "north")
    assert torch.equal(
        Labels(NAMES).of_site(torch.tensor(rows), "north").nan_to_num(9),
        torch.tensor(rows).nan_to_num(9),
    )


@settings(max_examples=80, deadline=None)
@given(SITES.filter(bool), st.none() | st.sets(st.sampled_from(["s0", "s1", "s2", "s3"])))
def test_the_rarest_is_a_label_or_a_whole_set_of_the_sites_that_take_part(
    sites: list[set[str]], taken: set[str] | None
) -> None:
    labels = labels_of(sites)
    own = [each for at, each in enumerate(sites) if taken is None or f"s{at}" in taken]
    counts = Counter({name: sum(name in each for each in own) for name in NAMES})
    for each in own:
        # A set of one label is named as that label, of which more sites are.
        counts[", ".join(sorted(each))] = sum(other == each for other in own)
    least = min((n for n in counts.values() if n or taken is None), default=0)
    name, sites_of_it = labels.fewest(taken)
    assert sites_of_it == least
    assert counts[name] == least


@settings(max_examples=80, deadline=None)
@given(
    sites=st.lists(st.sampled_from([{"a"}, {"a", "b"}, {"b", "c"}, {"c"}, {"a", "b", "c"}, {"b"}]), max_size=6),
    private=st.booleans(),
    summed=st.booleans(),
)  # fmt: skip
def test_code_and_moment_follow_from_noise_sums_and_who_annotates(
    sites: list[set[str]], private: bool, summed: bool
) -> None:
    listed = [f"s{at}={','.join(sorted(own))}" for at, own in enumerate(2 * sites)]
    flat: dict[str, Any] = {"task": "multilabel", "label-columns": "a,b,c"}
    flat |= {"label-sets": ";".join(listed), "secure-aggregation": summed, "colluding": 0.0}
    flat |= {"epsilon": 2.0, "delta": 1e-5} if private else {}
    if summed and not private and (not sites or set().union(*sites) != set(NAMES)):
        with pytest.raises(ConfigError, match=r"label-sets|annotated by"):
            parse_run(flat)
        return
    run = parse_run(flat)
    target, many = run.target, len(whole_sets(sites))
    assert isinstance(target, Labels)
    assert target.capped == (private and bool(sites))
    assert target.own == (not private and (not summed or 1 < many <= 4))
    assert target.summed == summed
    assert target.blocks == (many if target.own and summed else 0)
    assert ("label code" in target.choices) == private
    if private:
        assert target.choices["label code"] == CODES["capped" if sites else "unknown"]
    few = "one set" if many == 1 else "many sets" if many > 4 else "own in a sum"
    why = "noise" if private else few if summed else "own"
    assert target.choices["label moment"] == MOMENTS[why]
    public = {"name": "multilabel", "columns": list(NAMES)}
    if sites:
        public["sets"] = {f"s{at}": sorted(own) for at, own in enumerate(2 * sites)}
    if target.capped:
        public["code"] = "capped"
    if target.blocks:
        public["moments"] = "of label sets"
    assert target.public == public
    assert target.known_in_blocks() == tuple(
        tuple(name in own for name in NAMES) for own in whole_sets(sites)
    )
    for at, own in enumerate(sites):
        place = whole_sets(sites).index(tuple(sorted(own)))
        assert target.block(f"s{at}") == (place if target.blocks else 0)


@settings(max_examples=40, deadline=None)
@given(SITES, st.booleans())
def test_sums_of_labels_have_the_bound_of_the_longest_code(
    sites: list[set[str]], private: bool
) -> None:
    """A record's code is no longer than its bound, and some record's is as long."""
    rows = torch.cartesian_prod(*[torch.tensor([0.0, 1.0, math.nan])] * 3)
    for capped in (False, True):
        labels = labels_of(sites, capped=capped)
        found = {each.name: each for each in labels.statistics(private)}
        assert list(found) == [*([] if private else [RECORDS, TOTALS]), CODE, SUMS, SQUARES]
        longest = float(labels.code(rows).norm(dim=1).max())
        assert found[CODE].bound == found[SUMS].bound == pytest.approx(longest)
        assert sum(each.share for each in found.values()) == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(0, 99))
def test_the_loss_is_the_cross_entropy_of_annotated_labels(
    rows: list[tuple[float, ...]], seed: int
) -> None:
    outputs = 3 * torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(seed))
    labels = Labels(NAMES)
    objective = labels.objective()
    found = objective.losses(outputs, labels.code(torch.tensor(rows)))
    for row, own, loss in zip(rows, outputs.tolist(), found.tolist(), strict=True):
        chances = [1 / (1 + math.exp(-each)) for each in own]
        wanted = sum(
            -math.log(p if x == 1 else 1 - p)
            for p, x in zip(chances, row, strict=True)
            if not math.isnan(x)
        )
        assert loss == pytest.approx(wanted, abs=1e-5)
