"""What a site counts of a model's decisions and scores, and which of it may leave without noise, with
plain loops over generated records; and the sums of a coded target, record by record.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.counting import (
    _large_enough,
    _tables,
    count_decisions,
    histogram_bins,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import CodedRecords, exact_sums, in_block
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import CountingSettings

few = settings(max_examples=40, deadline=None)
WEIGHTS = st.sampled_from([1.0, 0.5, 0.25])


@few
@given(
    seed=st.integers(0, 9999),
    classes=st.integers(1, 4),
    bins=st.sampled_from([1, 2, 5, 16]),
    weights=st.lists(WEIGHTS, max_size=12),
    wide=st.sampled_from([1.0, 30.0]),
)
def test_a_record_counts_in_its_decision_and_in_the_bin_of_its_log_odds(
    seed: int, classes: int, bins: int, weights: list[float], wide: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(weights)
    scores = wide * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (count,), generator=generator)
    found = count_decisions(
        scores, labels, torch.tensor(weights, dtype=torch.float64), classes, bins
    )
    decisions = torch.zeros(classes, classes)
    # Of two classes, the second one says all.
    scored = [1] if classes == 2 else list(range(classes))
    histograms = torch.zeros(len(scored), 2, bins)
    places = histogram_bins(scores, bins)
    for n, weight in enumerate(weights):
        row, label = scores[n].tolist(), int(labels[n])
        decisions[label, row.index(max(row))] += weight
        for place, k in enumerate(scored):
            others = [math.exp(each - row[k]) for at, each in enumerate(row) if at != k]
            odds = -math.log(sum(others)) if others else 8.0
            at = min(max(math.floor((odds + 8) / 16 * bins), 0), bins - 1)
            histograms[place, int(label == k), at] += weight
            assert int(places[n, k]) == at
    assert torch.allclose(found["decisions"].value, decisions.double())
    assert torch.allclose(found["scores"].value, histograms.double())
    # One unit in each table for each record, as their bounds say.
    assert float(found["decisions"].value.sum()) == pytest.approx(sum(weights))


def test_scores_that_are_no_numbers_are_in_the_middle_or_at_an_end() -> None:
    inf = math.inf
    rows = torch.tensor([[inf, inf, 0.0], [-inf, -inf, -inf], [inf, 0.0, 0.0], [-inf, 0.0, 0.0]])
    places = histogram_bins(rows, 4)[:, 0].tolist()
    assert places == [2, 2, 3, 0]


@few
@given(st.lists(st.integers(0, 6), min_size=3, max_size=3), st.integers(0, 6))
def test_counts_of_few_records_look_like_none(counts: list[int], least: int) -> None:
    table = torch.tensor(counts).double()

    def left(name: str) -> list[int]:
        found = _large_enough({name: table + 1e-9}, least, None, CountingSettings())
        assert found.keys() == {name}
        assert found[name].dtype == torch.int64
        return found[name].tolist()

    assert left("records") == [each if each >= least else 0 for each in counts]
    assert left("scores") == counts, "their records are left out already"


@few
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("pqr")), max_size=12),
    patients=st.booleans(),
    epsilon=st.sampled_from([0.0, 1.0]),
)
def test_a_survey_counts_records_of_the_runs_classes_and_under_privacy_a_patient_once(
    rows: list[tuple[int, str]], patients: bool, epsilon: float
) -> None:
    budget = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {}
    run = parse_run({"counting.kind": "survey", "classes": "a,b,c"} | budget)
    units = tuple(who for _, who in rows)
    labels = torch.tensor([label for label, _ in rows], dtype=torch.int64)
    own = LabelledFeatures(torch.ones(len(rows), 2), labels, units=units if patients else None)
    # The last class is none of the run's.
    site = SiteFeatures(own, own, ("a", "b", "c", "d"), "f", 0.0, simulated=False)
    found = _tables(Job(run, NodeConfig(), "north", site, SiteLimits()))["records"].value
    wanted = [0.0, 0.0, 0.0]
    for label, who in rows:
        if label < 3:
            wanted[label] += 1 / units.count(who) if patients and epsilon else 1.0
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


@st.composite
def coded(draw: st.DrawFn) -> CodedRecords:
    count, wide = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    features = 100 + torch.randn(count, 4, generator=generator)
    return CodedRecords(features, torch.randn(count, wide, generator=generator).double())


@few
@given(coded(), st.booleans())
def test_sums_of_a_code_are_added_record_by_record(own: CodedRecords, centred: bool) -> None:
    features, code = own.features.double(), own.code
    centre = features.mean(0) if centred else None
    found = exact_sums(own, centre)
    around = features - (features.mean(0) if centred else 0)
    apart = code - (code.mean(0) if centred else 0)
    squares, products, sums = (
        torch.stack([torch.outer(a, b) for a, b in zip(one, other, strict=True)]).sum(0)
        for one, other in ((around, around), (apart, apart), (code, around))
    )
    wanted = {
        "records": torch.tensor([float(len(code))]),
        "totals": features.sum(0),
        "code": code.sum(0),
        "sums": sums,
        "squares": upper(squares),
        "products": upper(products),
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == torch.float64
        assert torch.allclose(found[name], value.double(), rtol=1e-9, atol=1e-7), name


def upper(matrix: Tensor) -> Tensor:
    """The half of a symmetric matrix that travels: its length is that of all sums with it."""
    d = len(matrix)
    rows, columns = torch.triu_indices(d, d)
    weights = 1 + (2**0.5 - 1) * (rows != columns).double()
    return matrix[rows, columns] * weights


@few
@given(coded(), st.integers(1, 3), st.integers(0, 2))
def test_a_site_adds_to_its_own_block_only(own: CodedRecords, blocks: int, block: int) -> None:
    before = exact_sums(own, None)
    found = in_block(before, block % blocks, blocks)
    assert found.keys() == before.keys()
    for name, value in before.items():
        if name not in ("records", "totals", "squares"):
            assert found[name] is value
            continue
        assert len(found[name]) == blocks
        for at, row in enumerate(found[name]):
            expected = value.flatten() if at == block % blocks else torch.zeros(value.numel())
            assert torch.equal(row.flatten(), expected.double())
