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
from fedsurrogate.common.surrogates.class_sums import Sums, lengths
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies import heads as module
from fedsurrogate.strategies.heads import FromStatistics, _check_noisy, pooled_sums
from fedsurrogate.strategies.pooling.site_weights import shares_kept
from tests.examples import class_sums_run

CLASSES, D = ("a", "b", "c"), 4
few = settings(max_examples=40, deadline=None)
RUN = class_sums_run()


def sums_of(seed: int, n: int = 30) -> Parameters:
    draw = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = draw.normal(size=(n, D)) + 2 * np.eye(3, D)[y]
    counts = np.bincount(y, minlength=3).astype(float)
    tensors = {"counts": counts, "sums": np.stack([x[y == c].sum(0) for c in range(3)])}
    header = Header(RUN.settings.method, RUN.digest, f"s{seed}", "f", CLASSES)
    return Parameters(header, 1, {k: torch.from_numpy(v).float() for k, v in tensors.items()}, n)


def refusal(sent: Parameters, **changed: Tensor) -> str:
    try:
        FromStatistics(RUN).check(replace(sent, tensors={**sent.tensors, **changed}))
    except SurrogateError as error:
        return str(error)
    return ""


def test_a_class_without_records_has_no_sum() -> None:
    sent = sums_of(0)
    counts, sums = sent.tensors["counts"].clone(), sent.tensors["sums"].clone()
    counts[0] += counts[2]
    counts[2] = 0.0
    wanted = "the sum of a class without records is not zero"
    assert refusal(sent, counts=counts) == wanted
    sums[2] = 0.0
    assert refusal(sent, counts=counts, sums=sums) == ""


def test_counts_are_the_records_of_a_site_and_dimensions_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = sums_of(0)
    assert refusal(sent) == ""
    wrong = replace(sent, records=100)
    assert refusal(wrong) == "classes of 30 records together, but 100 records"
    monkeypatch.setattr(module, "MOST_DIMENSIONS", D - 1)
    assert "features of dimension 4; a coordinator takes at most 3" in refusal(sent)


CLAIM = NoisySums("sums", 4.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()


@few
@given(st.integers(0, 2), st.integers(0, 2))
def test_noisy_sums_are_refused_beyond_what_noise_makes_likely(which: int, at: int) -> None:
    sigmas = {name: sigma for name, (sigma, _) in CLAIM.noise.items()}
    counts, sums = torch.full((3,), 500.0), torch.zeros(3, D)
    header = Header("nearest-mean", "r", "s", "f", CLASSES)

    def sent(value: float) -> Parameters:
        own = [counts.clone(), sums.clone()]
        if which == 0:
            own[0][at] = -value
        elif which == 1:
            own[1][at, 1] = value
        else:
            own[1][:, 2] = value
        tensors = dict(zip(("counts", "sums"), own, strict=True))
        return Parameters(header, 1, tensors, 0, CLAIM)

    def beyond(value: float) -> tuple[str, float, float] | None:
        own = sent(value).tensors
        for name, length, most in lengths(Sums(own["counts"], own["sums"], None, sigmas)):
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
        f"{name} (length {length:.4g}; at most {most:.4g} is possible for this number of records and "
        "the noise)"
    )
    with pytest.raises(SurrogateError, match="sums without a privacy claim"):
        _check_noisy(replace(sent(0.0), claim=None))
    less = {"counts": sent(0.0).tensors["counts"]}
    with pytest.raises(SurrogateError) as caught:
        _check_noisy(replace(sent(0.0), tensors=less))
    assert str(caught.value) == f"noise for {', '.join(sigmas)}, but sums counts"


@few
@given(st.integers(0, 99), st.sets(st.sampled_from("abcz"), min_size=1))
def test_some_classes_keep_their_rows(seed: int, kept: set[str]) -> None:
    sent = sums_of(seed, n=31)
    strategy = FromStatistics(RUN)
    found = strategy.restricted(sent, sorted(kept))
    names = tuple(name for name in CLASSES if name in kept)
    if not names:
        assert found is None
        return
    assert found is not None
    assert found.header == replace(sent.header, classes=names)
    rows = [CLASSES.index(name) for name in names]
    assert found.records == round(float(sent.tensors["counts"][rows].sum()))
    assert found.tensors.keys() == sent.tensors.keys()
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, sent.tensors[name][rows])
    few_ = strategy.restricted(
        replace(sent, tensors={**sent.tensors, "counts": 0.3 * torch.ones(3)}), names
    )
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
            Header("nearest-mean", "r", f"s{at}", "f", CLASSES),
            1,
            {
                "counts": 20 * torch.rand(3, generator=draw) - 1,
                "sums": torch.randn(3, D, generator=draw),
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
        for name in ("counts", "sums")
    }
    counts: Any = torch.as_tensor(total["counts"]).clamp_min(0)
    found = pooled_sums(sent, capped, CLASSES)
    torch.testing.assert_close(found.counts, counts)
    means = torch.as_tensor(total["sums"]) / counts.clamp_min(1)[:, None]
    torch.testing.assert_close(found.means, means)
    assert not found.matrix.any(), "no second moment was sent"


@few
@given(
    st.lists(st.tuples(st.sampled_from([9, 30, 300]), st.sampled_from([1.0, 20.0])), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.integers(0, 99),
)  # fmt: skip
def test_a_site_is_capped_by_records_and_by_the_spread_of_its_class_means(
    sites: list[tuple[int, float]], most: float, seed: int
) -> None:
    sent = []
    for at, (n, wide) in enumerate(sites):
        one = sums_of(seed + at, n=n)
        scales = {"counts": 1.0, "sums": wide}
        tensors = {name: scales[name] * tensor for name, tensor in one.tensors.items()}
        sent.append(replace(one, tensors=tensors))
    defended = FromStatistics(class_sums_run(**{"max-share": most})).defend(sent, CLASSES)
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
            spreads.append(float(counts @ apart.square().sum(1)))
        usual = sorted(spreads)[(len(spreads) - 1) // 2]
        shares = [min(s, most * usual / own) for s, own in zip(shares, spreads, strict=True)]
    wanted = {each.header.site: s for each, s in zip(sent, shares, strict=True) if s < 1}
    assert defended.capped == pytest.approx(wanted, rel=1e-5)
