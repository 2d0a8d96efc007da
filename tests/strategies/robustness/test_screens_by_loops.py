"""The screen of updates against the same rule as plain loops, and the share of scaled sums."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.pooling.site_weights import scaled
from fedsurrogate.strategies.robustness.defence import screen_updates

Array = NDArray[np.float64]
CLAIM = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()


def geometric_median(rows: Array) -> Array:
    middle = rows.mean(0)
    for _ in range(2000):
        apart = np.linalg.norm(rows - middle, axis=1)
        pulls = 1 / np.maximum(apart, 1e-6 * apart.mean() + 1e-30)
        middle, last = (pulls / pulls.sum()) @ rows, middle
        if np.array_equal(middle, last):
            break
    return middle


def far(rows: Array, times: float = 5.0, least: float = 0.0) -> Array:
    """Distances from the geometric median of the others, over the allowed one."""
    apart = [
        np.linalg.norm(row - geometric_median(np.delete(rows, at, 0)))
        for at, row in enumerate(rows)
    ]
    usual = np.sort(apart)[(len(apart) - 1) // 2]
    lengths = np.sort((rows**2).sum(1))[(len(rows) - 1) // 2]
    found: Array = np.array(apart) / max(times * usual, 1e-5 * math.sqrt(lengths), least, 1e-30)
    return found


def screened(tables: dict[str, Array]) -> tuple[list[tuple[int, str, float]], bool]:
    """Suspects with their scores; and whether every decision was clear."""
    left, found, clear = list(range(len(tables["rows"]))), list[tuple[int, str, float]](), True
    most = (len(left) - 1) // 2
    while len(found) < most and len(left) >= 4:
        now = {name: table[left] for name, table in tables.items()}
        scores = {}
        if "control" in now:
            scores["control"] = far(now["control"], 25.0)
        for name in ("mean", "deviation"):
            if "deviation" in now:
                wide = tables["deviation"]
                usual = np.sort(np.abs(wide), 0)[(len(wide) - 1) // 2]
                scores[name] = far(now[name], 5.0, 3.0 * float(np.linalg.norm(usual)))
        scores["rows"] = far(now["rows"])
        clear &= all(abs(float(each.max()) - 1) > 0.02 for each in scores.values())
        for each in scores.values():
            if each.max() >= 1:
                site, kind, score = int(each.argmax()), "far", float(each.max())
                break
        else:
            unit = now["rows"] / np.linalg.norm(now["rows"], axis=1, keepdims=True)
            agreement = ((unit @ unit.T).sum(1) - 1) / (len(left) - 1)
            usual_one = np.sort(agreement)[(len(left) - 1) // 2]
            least = 0.1 if usual_one >= 0.5 else -0.15 - 0.8 / (len(left) - 1)
            site, kind = int(agreement.argmin()), "opposed"
            score = 1 + least - float(agreement[site])
            clear &= abs(score - 1) > 1e-6 and abs(usual_one - 0.5) > 1e-6
            if score <= 1:
                break
        found.append((left.pop(site), kind, score))
    return found, clear


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(3, 9),
    kinds=st.lists(
        st.sampled_from(["long", "turned", "random", "control", "mean", "deviation"]), max_size=3
    ),
    size=st.sampled_from([4.0, 15.0, 60.0]),
    extras=st.sampled_from(["", "control", "moments"]),
    agree=st.sampled_from([0.2, 1.0, 4.0]),
)
def test_updates_are_screened_one_after_the_other(
    seed: int, count: int, kinds: list[str], size: float, extras: str, agree: float
) -> None:
    random = np.random.default_rng(seed)
    tables = {"rows": random.normal(size=30) + agree * random.normal(size=(count, 30))}
    if extras == "control":
        tables["control"] = 0.1 * random.normal(size=30) + random.normal(size=(count, 30))
    if extras == "moments":
        tables["mean"] = random.normal(size=(count, 6))
        tables["deviation"] = 1 + 0.1 * random.random((count, 6))
    for site, kind in enumerate(kinds[:count]):
        if kind == "long":
            tables["rows"][site] *= size
        elif kind == "turned":
            tables["rows"][site] *= -1
        elif kind == "random":
            tables["rows"][site] = random.normal(size=30)
        elif kind in tables:
            tables[kind][site] *= 10 * size
    sent = [sent_by(site, tables) for site in range(count)]
    wanted, clear = screened(tables)
    if clear:
        found = screen_updates(sent)
        assert [(int(each.site), each.kind) for each in found] == [each[:2] for each in wanted]
        scores = [each[2] for each in wanted]
        assert [each.score for each in found] == pytest.approx(scores, rel=0.02)


def sent_by(site: int, tables: dict[str, Array]) -> Parameters:
    """A site's rows as a head of three classes, with what else it sends."""
    rows = tables["rows"][site].reshape(3, 10)
    tensors = {"weight": rows[:, :9], "bias": rows[:, 9]}
    if "control" in tables:
        tensors[CONTROL + "weight"] = tables["control"][site].reshape(3, 10)
    tensors |= {name: tables[name][site] for name in ("mean", "deviation") if name in tables}
    own = {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in tensors.items()}
    header = Header("average", "r", str(site), "f", ("a", "b", "c"))
    return Parameters(header, 1, own, 10)


@pytest.mark.parametrize("share", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("moments", [False, True])
def test_scaled_sums_have_their_share_of_all_and_the_same_relative_noise(
    share: float, moments: bool
) -> None:
    squares = torch.rand(3) if moments else None
    sums = Sums(torch.rand(2), torch.rand(2, 3), squares, {"counts": 2.0, "sums": 3.0})
    sent = SumsSurrogate(Header("fedpft", "r", "s", "f", ("a", "b")), sums, CLAIM)
    found = scaled(sent, share)
    if share >= 1:
        assert found is sent
        return
    assert isinstance(found, SumsSurrogate)
    assert found == replace(sent, sums=found.sums)
    for name in ("counts", "sums") + (("squares",) if moments else ()):
        torch.testing.assert_close(getattr(found.sums, name), share * getattr(sums, name))
    assert found.sums.sigmas == {name: share * sigma for name, sigma in sums.sigmas.items()}
    assert (found.sums.squares is None) == (not moments)
