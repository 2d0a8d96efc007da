"""What a site counts of a model's decisions and scores, and which of it may leave without noise, with
plain loops over generated records; and the sums of a coded target, record by record.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.features.site_features import (
    LabelledFeatures,
    SiteFeatures,
    image_cells,
)
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods import counting as target_counts
from fedsurrogate.client_app.methods.counting import (
    _in_large_classes,
    _large_enough,
    _tables,
    count_answers,
    count_cells,
    count_decisions,
    count_images,
    histogram_bins,
    large_cells,
    large_topics,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import exact_sums, in_block
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SurrogateError, norm_of_ones
from fedsurrogate.common.image_histograms import HISTOGRAMS, Histogram
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.surrogates.surrogates import Header

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
@given(
    rows=st.lists(st.tuples(st.integers(-1, 2), st.booleans()), max_size=12),
    least=st.integers(0, 4),
    epsilon=st.sampled_from([0.0, 1.0]),
)
def test_only_classes_with_enough_records_are_judged_without_noise(
    rows: list[tuple[int, bool]], least: int, epsilon: float
) -> None:
    labels = torch.tensor([label for label, _ in rows], dtype=torch.int64)
    # Records of no class of the run are never kept.
    kept = torch.tensor([good and label >= 0 for label, good in rows], dtype=torch.bool)
    run: Any = SimpleNamespace(private=bool(epsilon))
    nothing: Any = None
    job = Job(run, nothing, "site", nothing, SiteLimits(smallest_cell=least))
    found = _in_large_classes(labels, kept, 3, job.smallest_cell).tolist()
    own = [label for label, good in rows if good and label >= 0]
    assert found == [
        good and label >= 0 and (bool(epsilon) or own.count(label) >= least) for label, good in rows
    ]


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
def coded(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    count, wide = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    features = 100 + torch.randn(count, 4, generator=generator)
    return features, torch.randn(count, wide, generator=generator).double()


@few
@given(coded(), st.booleans())
def test_sums_of_a_code_are_added_record_by_record(
    own: tuple[Tensor, Tensor], centred: bool
) -> None:
    features, code = own[0].double(), own[1]
    centre = features.mean(0) if centred else None
    found = exact_sums(*own, centre)
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
def test_a_site_adds_to_its_own_block_only(
    own: tuple[Tensor, Tensor], blocks: int, block: int
) -> None:
    before = exact_sums(*own, None)
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


QUESTIONS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def counted(sizes: list[int]) -> Any:
    """A target that is counted with so many cells in each question; a value is its cell."""
    questions = {str(at): range(size) for at, size in enumerate(sizes)}
    rows = [(at, cell) for at, size in enumerate(sizes) for cell in range(size)]
    bound = norm_of_ones(len(sizes))
    return SimpleNamespace(
        questions=questions, rows=rows, bound=bound, cells=lambda values: values.long()
    )


@given(sizes=QUESTIONS, data=st.data(), least=st.integers(0, 4))
def test_a_small_cell_leaves_out_itself_and_of_several_questions_its_question(
    sizes: list[int], data: st.DataObject, least: int
) -> None:
    cells = data.draw(st.lists(st.integers(0, 5), min_size=sum(sizes), max_size=sum(sizes)))
    expected, start = [], 0
    for size in sizes:
        own = cells[start : start + size]
        small = [0 < count < least for count in own]
        out = [any(small)] * size if len(sizes) > 1 else small
        expected += [0 if hidden else count for hidden, count in zip(out, own, strict=True)]
        start += size
    assert large_cells(counted(sizes), torch.tensor(cells), least).tolist() == expected


@given(sizes=QUESTIONS, data=st.data(), records=st.integers(0, 9))
def test_each_record_is_counted_in_its_cell_of_each_question(
    sizes: list[int], data: st.DataObject, records: int
) -> None:
    rows = [[data.draw(st.integers(0, size - 1)) for size in sizes] for _ in range(records)]
    used = [data.draw(st.booleans()) for _ in range(records)]
    values = torch.tensor(rows, dtype=torch.float64).reshape(records, len(sizes))
    found = count_cells(counted(sizes), values, torch.tensor(used).double())
    expected = [
        sum(row[at] == cell for row, counts in zip(rows, used, strict=True) if counts)
        for at, size in enumerate(sizes)
        for cell in range(size)
    ]
    assert found.value.flatten().tolist() == expected


@given(
    rows=st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.booleans()), max_size=12),
    least=st.integers(0, 4),
)
def test_a_topic_needs_enough_of_each_kind_that_is_there(
    rows: list[tuple[int, int, bool]], least: int
) -> None:
    how: Any = SimpleNamespace(kinds=lambda values: values.long())
    values = torch.tensor([row[:2] for row in rows], dtype=torch.float64).reshape(len(rows), 2)
    good = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    expected = []
    for topic in range(2):
        kinds = [row[topic] for row in rows if row[2]]
        sizes = [kinds.count(0), kinds.count(1)]
        expected.append(any(sizes) and all(size == 0 or size >= least for size in sizes))
    assert large_topics(how, values, good, least).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0])), max_size=9),
    topics=st.lists(st.booleans(), min_size=3, max_size=3),
    inner=st.sampled_from([(), (4,), (2, 2)]),
)
def test_an_answer_counts_in_the_topics_that_are_counted_with_the_weight_of_its_record(
    numbers: list[tuple[int, float]], topics: list[bool], inner: tuple[int, ...]
) -> None:
    """Some records at a time, each with its own score, value and weight."""
    shape = (3, *inner)

    def judged(facts: Any, names: Any, scores: Tensor, values: Tensor) -> Tensor:
        assert (facts["name"], names) == ("regression", ("age",))
        units = torch.arange(math.prod(shape)).reshape(shape) % 3 == 0
        size = (scores[:, 0] - 2 * values[:, 0]) / 16
        return units[None] * size.reshape(-1, *(1,) * len(shape)) / math.prod(shape)

    # A record changes each number by less than one.
    table = SimpleNamespace(shape=shape, most=1.0, bound=math.sqrt(math.prod(shape)))
    how: Any = SimpleNamespace(table=table, judged=judged)
    scores = torch.tensor([[n + 0.25] for n, _ in numbers], dtype=torch.float64).reshape(-1, 1)
    values = torch.tensor([[9.0 - n] for n, _ in numbers], dtype=torch.float64).reshape(-1, 1)
    weights = torch.tensor([w for _, w in numbers], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_counts, "ROWS", 2)
        found = count_answers(how, answers(PUBLIC), scores, values, weights, torch.tensor(topics))
    wanted = torch.zeros(shape, dtype=torch.float64)
    for row, (_, weight) in enumerate(numbers):
        own = judged(PUBLIC, ("age",), scores[row : row + 1], values[row : row + 1])[0]
        for topic, counts in enumerate(topics):
            wanted[topic] += weight * own[topic] * counts
    torch.testing.assert_close(found.value, wanted, rtol=0, atol=1e-5)

    def unfit(*given: Any) -> Tensor:
        raise KeyError("deviation")

    how.judged = unfit
    with pytest.raises(SurrogateError, match=r"cannot be counted .'deviation'.$"):
        count_answers(how, answers(PUBLIC), scores, values, weights, torch.tensor(topics))


RUN = parse_run({"task": "regression", "value-columns": "age", "target-range": "0,99"})
assert RUN.target is not None
PUBLIC: dict[str, Any] = json.loads(json.dumps(RUN.target.public))


def answers(facts: dict[str, Any]) -> Head:
    header = Header("fedpft", "r", "coordinator", "f", ("age",))
    text = json.dumps(facts) if facts else ""
    return Head(header, torch.ones(1, 2), torch.zeros(1), target=text)


ANY = st.floats(allow_nan=True, allow_infinity=True)
# Cells as a hostile request may state them: repeated, out of order, not a number, or none at all.
HOSTILE = st.one_of(
    st.builds(Histogram, st.just("x"), st.lists(ANY, max_size=5).map(tuple)),
    st.builds(
        Histogram,
        st.just("x"),
        names=st.lists(st.sampled_from(["a", "a", "PA", ""]), max_size=4).map(tuple),
        open=st.booleans(),
    ),
    st.sampled_from([*HISTOGRAMS.values()]),
)
VALUE = st.one_of(ANY, st.sampled_from(["a", "PA", "L/F", "Siemens"]), st.none())


@st.composite
def sites(draw: Any) -> tuple[dict[str, Histogram], list[dict[str, Any]], list[int]]:
    names = draw(st.lists(st.sampled_from([*HISTOGRAMS]), min_size=1, max_size=4, unique=True))
    histograms = {name: draw(HOSTILE) for name in names}
    facts = draw(
        st.lists(st.fixed_dictionaries(dict.fromkeys(names, VALUE)), min_size=1, max_size=8)
    )
    patients = [draw(st.integers(0, 3)) for _ in facts]
    return histograms, facts, patients


def counts(
    histograms: dict[str, Histogram], facts: list[dict[str, Any]], patients: list[int] | None
) -> list[Tensor]:
    """Each histogram of a site."""
    none = torch.zeros(len(facts), dtype=torch.int64)
    dataset = Dataset("x", none, ("a",), none == 0, "", describe=lambda row: facts[row])
    cells = image_cells(dataset, histograms).long()
    units = None if patients is None else tuple(map(str, patients))
    sizes = [len(each.cells) for each in histograms.values()]
    total = count_images(sizes, cells, unit_weights(units, len(facts)))
    return [*torch.split(total.value, sizes)]


@settings(deadline=None)
@given(sites(), st.booleans())
def test_one_unit_changes_each_histogram_by_at_most_one_and_all_by_the_bound(
    site: tuple[dict[str, Histogram], list[dict[str, Any]], list[int]], of_patients: bool
) -> None:
    histograms, facts, patients = site
    gone = patients[0] if of_patients else None
    rest = [at for at in range(len(facts)) if (patients[at] != gone if of_patients else at)]
    before = counts(histograms, facts, patients if of_patients else None)
    after = counts(
        histograms,
        [facts[at] for at in rest],
        [patients[at] for at in rest] if of_patients else None,
    )
    apart = [a - b for a, b in zip(before, after, strict=True)]
    for own in apart:
        assert float(own.abs().sum()) <= 1 + 1e-9
        assert float(own.min()) >= -1e-9
    assert float(torch.cat(apart).norm()) <= norm_of_ones(len(histograms)) + 1e-9


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(-(2**62), 2**62), min_size=4, max_size=4),
)
def test_a_cell_that_is_none_adds_no_more_than_any_other(
    sizes: list[int], cells: list[int]
) -> None:
    row = torch.tensor([cells[: len(sizes)]])
    total = count_images(sizes, row, torch.ones(1, dtype=torch.float64)).value
    for own in torch.split(total, sizes):
        assert float(own.abs().sum()) == pytest.approx(1)


def test_a_file_that_cannot_be_read_is_unknown_and_others_do_not_change() -> None:
    def describe(row: int) -> dict[str, Any]:
        if row == 1:
            raise ValueError("broken")
        return {"size": 100.0}

    none = torch.zeros(3, dtype=torch.int64)
    dataset = Dataset("x", none, ("a",), none == 0, "", describe=describe)
    size = {"size": HISTOGRAMS["size"]}
    unknown = len(HISTOGRAMS["size"].cells) - 1
    assert image_cells(dataset, size).flatten().tolist() == [1, unknown, 1]
    assert image_cells(Dataset("x", none[:0], (), none[:0] == 0, ""), size).shape == (0, 1)
