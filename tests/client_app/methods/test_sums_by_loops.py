"""Sums of a site's records for heads in closed form, added record by record."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods import sums
from fedsurrogate.client_app.methods import sums as coded_sums
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import class_moments, message, residual_sums
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import unfold
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.surrogate_proto import pack_map
from tests.examples import class_sums_run
from tests.rounds_of_times import hospitals, job_of

NAMES, D = ("a", "b", "c"), 4
PRIVATE = {"epsilon": 3.0, "delta": 1e-5, "classes": "c,a"}
GRAM = {"fedpft.covariance": "gram"}
SUMMED = [
    parse_run({"secure-aggregation": True, "classes": "c,a"} | each)
    for each in (GRAM, GRAM | PRIVATE)
]
ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("pqr")), min_size=1, max_size=11)


def job(run: Run, rows: list[tuple[int, str]], least: int = 1, **more: Any) -> Job:
    labels = torch.tensor([label for label, _ in rows], dtype=torch.int64)
    x = (
        torch.randn(len(rows), D, generator=torch.Generator().manual_seed(len(rows)))
        + labels[:, None]
    )
    part = LabelledFeatures(x, labels, tuple(who for _, who in rows), **more)
    site = SiteFeatures(part, part, NAMES, "f", 0.0, simulated=False)
    return Job(run, NodeConfig(site="north"), "north", site, SiteLimits(smallest_class=least))


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, least=st.integers(1, 4), at_a_time=st.sampled_from([1, 3, 100]))
def test_exact_sums_are_of_classes_with_enough_records(
    rows: list[tuple[int, str]], least: int, at_a_time: int
) -> None:
    asked = job(class_sums_run(), rows, least)
    labels = [label for label, _ in rows]
    # Where one record is enough, a class without any is named as well.
    classes = [label for label in range(3) if labels.count(label) >= least or least == 1]
    if not any(labels.count(label) for label in classes):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "ROWS", at_a_time)
        sent = unpack_parameters(message(asked).payload)
    # Columns of few records may be in a frame of their own.
    x, y, _ = asked.own_data(tuple(NAMES[label] for label in classes))
    own = [x[y == at].double().numpy() for at in range(len(classes))]
    assert sent.header.classes == tuple(NAMES[label] for label in classes)
    assert (sent.records, sent.round) == (sum(map(len, own)), 1)
    wanted = {
        "counts": np.array([float(len(each)) for each in own]),
        "sums": np.stack([each.sum(0) for each in own]),
    }
    assert sent.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(sent.tensors[name], value, rtol=3e-3, atol=3e-3, err_msg=name)


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, run=st.sampled_from(SUMMED))
def test_a_part_of_a_secure_aggregation_is_around_zero_and_of_the_runs_classes_alone(
    rows: list[tuple[int, str]], run: Run
) -> None:
    """Under privacy, of clipped features, in which a patient weighs one."""
    private = run.private
    asked = job(run, rows)
    made = class_moments(asked)
    found, claim = made.values, made.claim
    assert (claim is not None) == private
    x = asked.found.train.features.double().numpy()
    patients = [who for _, who in rows]
    counts, totals, squares = np.zeros(2), np.zeros((2, D)), np.zeros((D, D))
    for own, (label, who) in zip(x, rows, strict=True):
        if NAMES[label] == "b":
            continue
        at, weight = "ca".index(NAMES[label]), 1.0
        if claim is not None:
            own, weight = own / max(np.linalg.norm(own), claim.clip), 1 / patients.count(who)
        counts[at] += weight
        totals[at] += weight * own
        squares += weight * np.outer(own, own)
    np.testing.assert_allclose(found["counts"], counts, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["sums"], totals, rtol=1e-4, atol=1e-4)
    if "squares" in found and not private:
        np.testing.assert_allclose(unfold(found["squares"], D), squares, rtol=1e-6, atol=1e-6)
    # What is withheld is another part of the sum.
    names = {each.name for each in run.plan.combination.sums}
    assert found.keys() == names - {"withheld"}


NUMBER = {"task": "regression", "target-range": "-3,3", "value-columns": "size"}


def of_number(run: Run, count: int, least: int) -> Job:
    draw = torch.Generator().manual_seed(count)
    values = torch.randn(count, 1, generator=draw).double().clamp(-3, 3)
    return job(run, [(0, "p")] * count, least, values=values)


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_few_records_with_a_target_are_refused_and_in_a_secure_aggregation_zeros(
    count: int,
) -> None:
    run = parse_run(NUMBER)
    asked = of_number(run, count, 4)
    if count < 4:
        with pytest.raises(DataError, match=f"{count} training records with a target; .* is 4"):
            message(asked)
    else:
        sent = unpack_parameters(message(asked).payload)
        assert (sent.records, sent.round) == (count, 1)
        assert sent.tensors.keys() == {each.name for each in run.plan.messages.sends}
        x = asked.found.train.features.double()
        np.testing.assert_allclose(sent.tensors["totals"], x.sum(0), rtol=2e-3, atol=2e-3)
    summed = parse_run(NUMBER | {"secure-aggregation": True})
    made = coded_sums.coded_moments(of_number(summed, count, 4))
    found, claim = made.values, made.claim
    assert claim is None
    assert found.keys() == {each.name for each in summed.plan.combination.sums} - {"withheld"}
    assert any(bool(value.any()) for value in found.values()) == (count >= 4)
    if count >= 4:
        values = asked.found.train.values
        assert values is not None
        code = summed.target.code(values)  # type: ignore[union-attr]
        whole = coded_sums.exact_sums(asked.found.train.features, code, None)
        for name, value in found.items():
            torch.testing.assert_close(value, whole[name])


def test_a_private_message_of_another_target_has_the_first_round_and_no_number_of_records() -> None:
    run = parse_run(NUMBER | {"epsilon": 3.0, "delta": 1e-5})
    made = message(of_number(run, 9, 1))
    sent = unpack_parameters(made.payload)
    assert (sent.round, sent.records) == (1, 0)
    assert sent.claim is not None
    assert sent.tensors.keys() == sent.claim.noise.keys()
    assert made.facts.keys() == {f"signal-to-noise-{name}" for name in sent.claim.noise}


RESIDUALS = {
    "task": "survival",
    "horizon": 3.0,
    "bins": 4,
    "time-head": "residuals",
    "secure-aggregation": True,
}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(("count", "least"), [(20, 20), (20, 21), (7, 1)])
def test_a_part_of_a_survival_sum_is_of_all_records_or_of_none(
    private: bool, count: int, least: int
) -> None:
    run = parse_run(RESIDUALS | ({"epsilon": 3.0, "delta": 1e-5} if private else {}))
    ((x, y),) = hospitals((count,), seed=4)
    values = torch.linspace(-1, 1, 9)
    cells = []
    for time, event in y:
        if event and time <= 3:
            cells.append(max(0, math.ceil(time / 0.75) - 1))
        else:
            cells.append(4 + min(int(time / 0.75 + 0.5), 4))
    for number in (1, 2):
        made = residual_sums(job_of(run, (x, y), {"values": values}, number, least))
        found, claim = made.values, made.claim
        assert (claim is not None) == private
        there = private or count >= least
        if number == 1:
            wanted = [cells.count(cell) * there for cell in range(9)]
            assert found["code"].tolist() == pytest.approx(wanted, abs=1e-4)
            continue
        assert "sums" in found
        if private:
            continue
        weights = np.array([float(values[cell]) for cell in cells]) * there
        np.testing.assert_allclose(found["code"], [weights.sum()], atol=1e-5)
        np.testing.assert_allclose(found["sums"][0], weights @ x, rtol=1e-4, atol=1e-4)


ALONE = {key: value for key, value in RESIDUALS.items() if key != "secure-aggregation"}
PRIVATE_SUMS = {"epsilon": 3.0, "delta": 1e-5}
SURVIVAL = [parse_run(ALONE), parse_run(ALONE | PRIVATE_SUMS)]


@pytest.mark.parametrize("run", SURVIVAL, ids=["exact", "private"])
def test_a_message_of_a_survival_round_is_around_the_sites_mean_or_has_noise(run: Run) -> None:
    ((x, y),) = hospitals((40,), seed=4)
    values = torch.linspace(-1, 1, 9)
    for number in (1, 2):
        asked = job_of(run, (x, y), {"values": values}, number)
        summed = parse_run(RESIDUALS | (PRIVATE_SUMS if run.private else {}))
        found = residual_sums(job_of(summed, (x, y), {"values": values}, number)).values
        sent = unpack_parameters(message(asked).payload)
        assert sent.round == number
        assert sent.records == (0 if run.private else 40)
        assert sent.header.classes == run.target.rows  # type: ignore[union-attr]
        names = {"code"} if number == 1 else set(found)
        assert sent.tensors.keys() == names == found.keys()
        if run.private:
            assert sent.claim is not None
            facts = message(asked).facts
            assert facts.keys() == {f"signal-to-noise-{name}" for name in names}
            noise = {name: float((sent.tensors[name] - found[name]).norm()) for name in names}
            for name, off in noise.items():
                sigma = sent.claim.noise[name][0]
                assert 0 < off < 6 * sigma * sent.tensors[name].numel() ** 0.5
            continue
        assert sent.claim is None
        np.testing.assert_allclose(sent.tensors["code"], found["code"], rtol=2e-3, atol=2e-3)
        if number == 2:
            around = found["sums"][0] - found["code"][0] * torch.as_tensor(x.mean(0))
            np.testing.assert_allclose(sent.tensors["sums"][0], around, rtol=5e-3, atol=2e-2)


def test_a_site_without_records_in_large_cells_is_refused() -> None:
    x, y = np.zeros((0, 4)), np.zeros((0, 2))
    for least in (1, 5):
        with pytest.raises(DataError, match=f"no training records in cells of {least} or more"):
            message(job_of(SURVIVAL[0], (x, y), {}, 1, least))


@pytest.mark.parametrize("target", [False, True])
def test_a_part_of_a_sum_is_of_features_in_the_runs_public_map(target: bool) -> None:
    public = PublicMap(torch.randn(2, D, generator=torch.Generator().manual_seed(3)), torch.ones(D))
    rows = [(label % 3, "p") for label in range(9)]
    if target:
        run = parse_run(NUMBER | {"secure-aggregation": True})
        asked = replace(of_number(run, 9, 1), payload=pack_map(public))
        found = coded_sums.coded_moments(asked).values
        total = found["totals"]
    else:
        asked = replace(job(SUMMED[0], rows), payload=pack_map(public))
        found = class_moments(asked).values
        total = found["sums"].sum(0)
    assert public.projection is not None
    x = asked.found.train.features.double()
    if not target:
        x = x[[NAMES[label] != "b" for label, _ in rows]]
    mapped = (x - 1) @ public.projection.double().T
    # A map travels at 16 bits.
    torch.testing.assert_close(total, mapped.sum(0), rtol=1e-2, atol=5e-2)


def test_records_that_are_left_out_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Those without an event where they are fewer than the policy asks for."""
    x = np.random.default_rng(0).normal(size=(20, 4))
    for censored in (0, 3):
        caplog.clear()
        y = np.stack([np.full(20, 0.5), np.arange(20) >= censored], 1)
        with caplog.at_level("WARNING", "fedsurrogate.site"):
            sent = unpack_parameters(message(job_of(SURVIVAL[0], (x, y), {}, 1, 5)).payload)
        assert sent.records == 20 - censored
        words = f"{censored} records without an event are left out of what this site sends: fewer than 5"
        assert [each.getMessage() for each in caplog.records] == ([words] if censored else [])
