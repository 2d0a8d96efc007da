"""Labels that sites annotate in sets: the capped code under privacy, and moments of their own without
noise, on the path of a run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.client_app.methods.sums import exact_sums, in_block
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.targets.labels import SET_PART, Labels
from fedsurrogate.server_app.refit import refit
from fedsurrogate.strategies.targets import sums as received
from fedsurrogate.strategies.targets.number import Annotated
from fedsurrogate.strategies.targets.strategy import annotated_of, check_sums
from fedsurrogate.strategies.targets.sums import CodedSums
from tests.coded import capped_code, coded, noisy, ridge_discriminant

NAMES = ("a", "b", "c")
LABELS: dict[str, Scalar] = {"task": "multilabel", "label-columns": ",".join(NAMES)}
PRIVATE: dict[str, Scalar] = {"epsilon": 8.0, "delta": 1e-5}
# Of four sites; each set is that of two of them, with secure aggregation needs it.
SETS = ({"a", "b", "c"}, {"a", "b"}, {"a", "b", "c"}, {"a", "b"})
SET_TEXT = ";".join(f"{site}={','.join(sorted(own))}" for site, own in enumerate(SETS))
SUM: dict[str, Any] = {"secure_aggregation": True, "colluding": 0.0, "dropouts": 0.0}


def site(number: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records of a site, all annotated for its set; no two sites have the same features."""
    draw = torch.Generator().manual_seed(100 * seed + number)
    x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
    x = x * torch.tensor([1.0, 0.5 + number, 2, 1]) + number
    signal = x[:, :3] + torch.randn(size, 3, generator=draw, dtype=torch.float64)
    y = (signal > signal.mean(0)).double()
    y[:, [name not in SETS[number] for name in NAMES]] = torch.nan
    return x, y


def total(run: Run, parts: list[tuple[Tensor, Tensor]]) -> CodedSums:
    """The exact sums of all sites, as messages or secure aggregation bring them."""
    target = run.target
    assert target is not None
    made = [(x, target.code(target.of_site(y, str(at)))) for at, (x, y) in enumerate(parts)]
    if run.settings.secure_aggregation:
        zero = [exact_sums(*each, None) for each in made]
        if target.blocks:
            zero = [
                in_block(each, target.block(str(at)), target.blocks) for at, each in enumerate(zero)
            ]
        return received.around_zero(
            {name: sum(each[name] for each in zero) for name in zero[0]}, {}, target, False
        )
    sums = [received.of_site(exact_sums(*each, each[0].mean(0)), target) for each in made]
    whole = sums[0]
    for each in sums[1:]:
        whole = whole + each
    return whole


@pytest.mark.parametrize("secure", [False, True])
def test_labels_with_own_moments_are_scikit_learns_on_their_annotated_records(
    secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "HALF", 0.0)
    more: dict[str, Scalar] = {"secure-aggregation": True, "colluding": 0.0} if secure else {}
    run = parse_run(LABELS | {"label-sets": SET_TEXT} | more)
    assert isinstance(run.target, Labels)
    parts = [site(number, size) for number, size in enumerate((90, 200, 70, 110))]
    sums = total(run, parts)
    check_sums(sums, run.target)
    x, y = (torch.cat([part[at] for part in parts]) for at in (0, 1))
    annotated = annotated_of(sums, run.target)
    for at, moment in enumerate(sums.moments()):
        known = ~y[:, at].isnan()
        assert float(moment.records) == float(known.sum())
        weight, bias = ridge_discriminant(annotated, at, moment.matrix, 0.0)
        oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(
            x[known].numpy(), y[known, at].numpy()
        )
        theirs = oracle.decision_function(x.numpy())
        assert np.abs((x @ weight + bias).numpy() - theirs).max() < 1e-9 * np.abs(theirs).max()
    # Records that are not annotated for the last label do not count for it, and would change it.
    shared = ridge_discriminant(annotated, 2, sums.covariance, 0.0)[0]
    own = ridge_discriminant(annotated, 2, sums.moments()[2].matrix, 0.0)[0]
    assert not torch.allclose(shared, own, rtol=0.01)
    first, second, _ = sums.moments()
    assert first is second


def test_a_share_of_the_weight_keeps_the_moment_of_a_label() -> None:
    whole = total(parse_run(LABELS), [site(number, 60) for number in range(4)])
    half = whole.scaled(0.5)
    assert half.moments()[2].records == pytest.approx(whole.moments()[2].records / 2)


cells = st.tuples(*3 * [st.sampled_from([0.0, 1.0, float("nan")])])
subsets = st.sets(st.sampled_from(NAMES), min_size=1)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(cells, min_size=1, max_size=12), sets=st.lists(subsets, min_size=1, max_size=3)
)
@example(rows=[(1.0, 1.0, 0.0)], sets=[{"a"}, {"a", "b"}, {"c"}])
def test_the_capped_code_counts_records_of_their_largest_set(
    rows: list[tuple[float, ...]], sets: list[set[str]]
) -> None:
    text = ";".join(f"s{at}={','.join(sorted(each))}" for at, each in enumerate(sets))
    run = parse_run(LABELS | PRIVATE | {"label-sets": text})
    assert isinstance(run.target, Labels)
    values = torch.tensor(rows, dtype=torch.float64)
    code = run.target.code(values)
    named = run.target.label_sets
    assert set(map(frozenset, named)) == set(map(frozenset, sets))
    for row, own in zip(values, code, strict=True):
        known = {name for name, value in zip(NAMES, row.tolist(), strict=True) if value == value}
        whole = [labels for labels in named if set(labels) <= known]
        if not whole:
            assert not own.any()
            continue
        (place,) = own[3:].nonzero().flatten().tolist()
        assert len(named[place]) == max(map(len, whole))
        assert named[place] in whole
        present = [n in named[place] and v == 1 for n, v in zip(NAMES, row.tolist(), strict=True)]
        assert [bool(value > 0) for value in own[:3]] == present
        assert float(own[:3].norm()) == pytest.approx(1.0 if any(present) else 0.0)
        assert float(own[3:].norm()) ** 2 == pytest.approx(SET_PART / (1 - SET_PART))


def test_capped_sums_are_read_as_they_were_made() -> None:
    """Against the code of the benchmarks, whose rows of sets are not scaled."""
    x, y = (torch.cat([site(number, 80)[at] for number in range(4)]) for at in (0, 1))
    run = parse_run(LABELS | PRIVATE | {"label-sets": SET_TEXT})
    target = run.target
    assert isinstance(target, Labels)
    assert target.capped
    of = torch.tensor([0, 1, 0, 1]).repeat_interleave(80)
    known = y.nan_to_num(0.0)
    plain = Annotated.capped(coded(capped_code(known, of, 2, 1.0), x), target.members)
    ours = annotated_of(coded(target.code(y), x), target)
    assert torch.allclose(ours.positive, plain.positive)
    assert torch.allclose(ours.annotated, plain.annotated)
    assert torch.allclose(ours.annotated, torch.tensor([320.0, 320.0, 160.0]).double())
    assert torch.allclose(ours.annotated_sums, plain.annotated_sums)
    exact = coded(target.code(y), x)
    one, two = torch.full((5,), 3.0).double(), torch.full((5,), 2.0).double()
    noise = annotated_of(noisy(exact, one, two, 1.0, 0, centre=True), target)
    # A label of both sets has the noise of both rows, each larger by the scale.
    assert noise.annotated_noise[0].tolist() == pytest.approx([6 * 2**0.5, 6 * 2**0.5, 6.0])
    assert noise.annotated_noise[1].tolist() == pytest.approx([4 * 2**0.5, 4 * 2**0.5, 4.0])
    assert noise.positive_noise.tolist() == [[3.0] * 3, [2.0] * 3]


@pytest.mark.parametrize(
    ("more", "code", "moment"),
    [
        ({}, None, "own: .* their messages hold it"),
        ({"label-sets": SET_TEXT}, None, "own: .* their messages hold it"),
        (PRIVATE, "exact, because no label-sets", "shared: noise"),
        (PRIVATE | {"label-sets": SET_TEXT}, "capped, with less noise", "shared: noise"),
        ({"secure-aggregation": True, "label-sets": SET_TEXT, "colluding": 0.0}, None, "one for each"),
        (
            {"secure-aggregation": True, "label-sets": "x=a,b,c;y=a,b,c", "colluding": 0.0},
            None,
            "all sites annotate the same",
        ),
        (
            {
                "secure-aggregation": True,
                "colluding": 0.0,
                "label-sets": ";".join(
                    f"{at}{twin}={own}"
                    for at, own in enumerate(("a,b,c", "a,b", "a,c", "b,c", "a"))
                    for twin in "xy"
                ),
            },
            None,
            "more than 4 moments",
        ),
    ],
)  # fmt: skip
def test_a_run_says_which_code_and_moment_labels_have_and_why(
    more: dict[str, Scalar], code: str | None, moment: str | None
) -> None:
    target = parse_run(LABELS | more).target
    assert isinstance(target, Labels)
    said = target.choices
    for key, expected in (("label code", code), ("label moment", moment)):
        if expected is None:
            assert key not in said
        else:
            assert re.match(f".*{expected}", said[key])
    assert target.capped == (code is not None and code.startswith("capped"))


def hospitals(sizes: tuple[int, ...] = (300, 250, 200, 350)) -> list[Any]:
    made = [site(number, size) for number, size in enumerate(sizes)]
    return [(x.float().numpy(), y.numpy()) for x, y in made]


@pytest.mark.parametrize("more", [{}, SUM], ids=["sites", "sum"])
def test_a_run_learns_from_the_capped_code(more: dict[str, Any], tmp_path: Path) -> None:
    private: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "label_sets": SET_TEXT}
    settings: dict[str, Any] = {"task": "multilabel", "label_columns": list(NAMES)}
    run = fs.simulate(hospitals(), output_dir=tmp_path, **settings, **private, **more)
    assert run.metrics["learning"]["label code"].startswith("capped")
    assert "label code: capped, with less noise" in run.report().read_text()
    private_run = parse_run(LABELS | PRIVATE | {"label-sets": SET_TEXT})
    assert "label code capped, with less noise" in private_run.plan.head
    assert all(own["auroc"] > 0.6 for own in run.metric_values.values()), run.metric_values
    if not more:
        _, same = refit(run.folder, without=[])
        assert torch.equal(same.arrays()["weight"], run.model.classifier.arrays()["weight"])
        _, left = refit(run.folder, without=["0"])
        assert not torch.equal(left.arrays()["weight"], same.arrays()["weight"])


def test_a_record_that_lacks_a_label_of_its_set_is_left_out_alone() -> None:
    """What it says of other records is nothing; a person reads of it in the data report."""
    target = parse_run(LABELS | PRIVATE | {"label-sets": "x=a,b,c"}).target
    assert target is not None
    y = torch.tensor([[1.0, 0.0, 1.0], [1.0, float("nan"), 0.0]])
    assert not target.faults(y)["a label that is not 1, 0 or empty"].any()
    assert target.code(y)[1].tolist() == [0.0] * 4
    assert torch.equal(target.code(y)[0], target.code(y[:1])[0])
    (said,) = target.warnings(y)
    assert said.startswith("1 of 2 records are not annotated for all labels")
    assert not target.warnings(y[:1])
