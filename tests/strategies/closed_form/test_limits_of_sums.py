"""What a site's class sums cannot be: just within each limit they pass, just beyond it they are refused with
the reason; and what is kept of them for some classes and under caps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import Sums, fold, lengths, unfold
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.strategy import (
    FromStatistics,
    _check_noisy,
    of_classes,
    pooled_sums,
)
from fedsurrogate.strategies.heads.analytic import Analytic
from fedsurrogate.strategies.heads.gaussian_heads import GaussianHeads
from fedsurrogate.strategies.pooling.site_weights import shares_kept

CLASSES, D = ("a", "b", "c"), 4
few = settings(max_examples=40, deadline=None)
AFL = parse_run({"method": "afl", "defence": "none"})
NB = parse_run({"method": "gh-ofl", "ghofl.head": "nb-diag", "defence": "none"})


def sums_of(seed: int, run: Run, names: tuple[str, ...] = CLASSES, n: int = 30) -> Parameters:
    draw = np.random.default_rng(seed)
    y = np.arange(n) % len(names)
    x = draw.normal(size=(n, D)) + 2 * np.eye(len(names), D)[y]
    counts = np.bincount(y, minlength=len(names)).astype(float)
    sums = np.stack([x[y == c].sum(0) for c in range(len(names))])
    apart = x - (sums / counts[:, None])[y]
    tensors = {
        "counts": counts,
        "sums": sums,
        "squares": fold(torch.from_numpy(apart.T @ apart)).numpy(),
    }
    if run is NB:
        tensors["variances"] = np.stack([apart[y == c].var(0) for c in range(len(names))])
        tensors["variances"] = np.stack([(apart[y == c] ** 2).mean(0) for c in range(len(names))])
    header = Header(run.settings.method, run.digest, f"s{seed}", "f", names)
    return Parameters(header, 1, {k: torch.from_numpy(v).float() for k, v in tensors.items()}, n)


def strategy_of(run: Run) -> FromStatistics:
    return (GaussianHeads if run is NB else Analytic)(run)


def refusal(sent: Parameters, run: Run, **changed: Tensor) -> str:
    try:
        strategy_of(run).check(replace(sent, tensors={**sent.tensors, **changed}))
    except SurrogateError as error:
        return str(error)
    return ""


@few
@given(st.integers(0, 9999), st.floats(0.01, 0.1))
def test_an_eigenvalue_may_be_below_zero_by_a_thousandth_of_the_trace(seed: int, by: float) -> None:
    sent = sums_of(seed, AFL)
    assert refusal(sent, AFL) == ""
    draw = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(draw.normal(size=(D, D)))
    others = draw.uniform(1, 3, D - 1)
    edge = -1e-3 * others.sum() / 1.001
    for beyond in (1 - by, 1 + by):
        values = np.append(others, beyond * edge)
        matrix = fold(torch.from_numpy(vectors * values @ vectors.T)).float()
        wanted = "second moments that no records have: the matrix has a negative eigenvalue"
        assert refusal(sent, AFL, squares=matrix) == (wanted if beyond > 1 else "")
    assert "negative eigenvalue" in refusal(sent, AFL, squares=-fold(torch.eye(D)))
    assert refusal(sent, AFL, squares=torch.zeros(D * (D + 1) // 2)) == ""


@few
@given(st.integers(0, 9999), st.integers(0, 2), st.integers(0, D - 1), st.sampled_from([-1.0, 1.0]))
def test_variances_sum_to_the_second_moment_within_a_hundredth(
    seed: int, at: int, column: int, sign: float
) -> None:
    sent = sums_of(seed, NB)
    assert refusal(sent, NB) == ""
    own = unfold(sent.tensors["squares"].double(), D).diagonal()
    room = 0.01 * float(own[column]) + 1e-3 * float(own.mean())
    for beyond in (0.99, 1.01):
        variances = sent.tensors["variances"].clone()
        variances[at, column] += sign * beyond * room / sent.tensors["counts"][at]
        wanted = "variances of the classes that do not sum to the second moments"
        assert refusal(sent, NB, variances=variances) == (wanted if beyond > 1 else "")


def test_a_class_without_records_has_no_sum() -> None:
    sent = sums_of(0, AFL)
    counts, sums = sent.tensors["counts"].clone(), sent.tensors["sums"].clone()
    counts[0] += counts[2]
    counts[2] = 0.0
    wanted = "the sum of a class without records is not zero"
    assert refusal(sent, AFL, counts=counts) == wanted
    sums[2] = 0.0
    assert refusal(sent, AFL, counts=counts, sums=sums) == ""


CLAIM = NoisySums("sums", 4.0, 1e-5, {"counts": 0.1, "sums": 0.5, "squares": 0.4}).mechanism()


@few
@given(st.integers(0, 3), st.integers(0, 2))
def test_noisy_sums_are_refused_beyond_what_noise_makes_likely(which: int, at: int) -> None:
    sigmas = {name: sigma for name, (sigma, _) in CLAIM.noise.items()}
    counts, sums = torch.full((3,), 500.0), torch.zeros(3, D)
    squares = torch.zeros(D * (D + 1) // 2)
    header = Header("afl", "r", "s", "f", CLASSES)

    def sent(value: float) -> Parameters:
        own = [counts.clone(), sums.clone(), squares.clone()]
        if which == 0:
            own[0][at] = -value
        elif which == 1:
            own[1][at, 1] = value
        elif which == 2:
            own[1][:, 2] = value
        else:
            own[2][0] = value
        tensors = dict(zip(("counts", "sums", "squares"), own, strict=True))
        return Parameters(header, 1, tensors, 0, CLAIM)

    def beyond(value: float) -> tuple[str, float, float] | None:
        own = sent(value).tensors
        for name, length, most in lengths(Sums(own["counts"], own["sums"], own["squares"], sigmas)):
            if bool((length > most).any()):
                worst = int(torch.argmax(length - most))
                return name, float(length[worst]), float(most[worst])
        return None

    low, high = 0.0, 1e6
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) is None else (low, middle)
    _check_noisy(sent(0.999 * low))
    found = beyond(1.001 * high)
    assert found is not None
    name, length, most = found
    with pytest.raises(SurrogateError) as caught:
        _check_noisy(sent(1.001 * high))
    assert str(caught.value) == (
        f"{name} is {length:.4g}; records and noise give {most:.4g} at most"
    )
    with pytest.raises(SurrogateError, match="sums without a privacy claim"):
        _check_noisy(replace(sent(0.0), claim=None))
    less = {name: sent(0.0).tensors[name] for name in ("counts", "sums")}
    with pytest.raises(SurrogateError) as caught:
        _check_noisy(replace(sent(0.0), tensors=less))
    assert str(caught.value) == f"noise for {', '.join(sigmas)}, but sums counts, sums"


@few
@given(st.integers(0, 99), st.sets(st.sampled_from("abcz"), min_size=1), st.sampled_from([AFL, NB]))
def test_some_classes_keep_their_rows_and_their_part_of_the_second_moment(
    seed: int, kept: set[str], run: Run
) -> None:
    sent = sums_of(seed, run, n=31)
    found = strategy_of(run).restricted(sent, sorted(kept))
    names = tuple(name for name in CLASSES if name in kept)
    if not names:
        assert found is None
        return
    assert found is not None
    assert found.header == replace(sent.header, classes=names)
    rows = [CLASSES.index(name) for name in names]
    share = float(sent.tensors["counts"][rows].sum()) / 31
    assert found.records == round(31 * share)
    assert found.tensors.keys() == sent.tensors.keys()
    for name, tensor in found.tensors.items():
        wanted = share * sent.tensors[name] if name == "squares" else sent.tensors[name][rows]
        torch.testing.assert_close(tensor, wanted)
    few_ = of_classes(replace(sent, tensors={"counts": 0.3 * torch.ones(3)}), names, ["counts"])
    assert few_ is not None
    assert few_.records == max(1, round(0.3 * len(names)))


@few
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4), st.integers(0, 99))
def test_noisy_sums_of_sites_add_up_with_the_weight_that_they_keep(
    shares: list[float], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    sent = [
        Parameters(
            Header("afl", "r", f"s{at}", "f", CLASSES),
            1,
            {
                "counts": 20 * torch.rand(3, generator=draw) - 1,
                "sums": torch.randn(3, D, generator=draw),
                "squares": torch.randn(D * (D + 1) // 2, generator=draw),
            },
            0,
            CLAIM,
        )
        for at in range(len(shares))
    ]
    capped = {f"s{at}": share for at, share in enumerate(shares) if share < 0.9}
    own = [capped.get(each.header.site, 1.0) for each in sent]
    total = {
        name: sum(s * each.tensors[name].double() for s, each in zip(own, sent, strict=True))
        for name in ("counts", "sums", "squares")
    }
    counts: Any = torch.as_tensor(total["counts"]).clamp_min(0)
    found = pooled_sums(sent, capped, CLASSES)
    torch.testing.assert_close(found.counts, counts)
    means = torch.as_tensor(total["sums"]) / counts.clamp_min(1)[:, None]
    torch.testing.assert_close(found.means, means)
    n = counts.sum().clamp_min(1)
    second = unfold(torch.as_tensor(total["squares"]), D) / n
    around = sum(c / n * torch.outer(m, m) for c, m in zip(counts, means, strict=True))
    torch.testing.assert_close(found.matrix, second - around, rtol=1e-6, atol=1e-7)


@few
@given(
    st.lists(st.tuples(st.sampled_from([9, 30, 300]), st.sampled_from([1.0, 20.0])), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.integers(0, 99),
)  # fmt: skip
def test_a_site_is_capped_by_records_and_by_the_spread_of_its_records(
    sites: list[tuple[int, float]], most: float, seed: int
) -> None:
    sent = []
    for at, (n, wide) in enumerate(sites):
        one = sums_of(seed + at, AFL, n=n)
        scales = {"counts": 1.0, "sums": wide, "squares": wide**2}
        tensors = {name: scales[name] * tensor for name, tensor in one.tensors.items()}
        sent.append(replace(one, tensors=tensors))
    own = AFL.settings.model_copy(update={"max_share": most})
    defended = Analytic(replace(AFL, settings=own)).defend(sent, CLASSES)
    assert defended.kept == sent
    shares = shares_kept([each.tensors["counts"].tolist() for each in sent], most)
    if most and len(sent) >= 3:
        means = [
            each.tensors["sums"].double().sum(0) / each.tensors["counts"].sum() for each in sent
        ]
        centre = torch.stack(means).median(0).values
        spreads = []
        for each in sent:
            counts = each.tensors["counts"].double()
            apart = each.tensors["sums"].double() / counts[:, None] - centre
            within = float(unfold(each.tensors["squares"].double(), D).trace())
            spreads.append(float(counts @ apart.square().sum(1)) + within)
        usual = sorted(spreads)[(len(spreads) - 1) // 2]
        shares = [min(s, most * usual / own) for s, own in zip(shares, spreads, strict=True)]
    wanted = {each.header.site: s for each, s in zip(sent, shares, strict=True) if s < 1}
    assert defended.capped == pytest.approx(wanted, rel=1e-5)
