"""The comparison of each site's class means with those of the others, and its four patterns, against
plain loops over sites, classes and pairs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.strategies.robustness import screening
from fedsurrogate.strategies.robustness.agreement import correlations, unrelated
from fedsurrogate.strategies.robustness.class_points import ClassPoints
from fedsurrogate.strategies.robustness.screening import compare, far, label, moved, screen

Array = NDArray[np.float64]


def drawn(
    sites: int, classes: int, d: int, seed: int, *, noisy: bool, missing: float, power: float
) -> ClassPoints:
    """Sites with classes around common centres; one in four has two in each other's place, one in
    five has one class far away.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    centres = 3 * torch.randn(classes, d, generator=generator)
    means = centres + 0.3 * torch.randn(sites, classes, d, generator=generator)
    for site in range(sites):
        if site % 4 == 3 and classes > 1:
            means[site, :2] = means[site, :2].flip(0)
        if site % 5 == 4:
            means[site, -1] += 8
    counts = (10 + 90 * uniform(sites, classes)) * (uniform(sites, classes) >= missing)
    counts[0] *= 10
    noise = (1 / counts.clamp_min(1)) * (1 + 4 * float(noisy) * uniform(sites, classes))
    stretch = 0.05 * float(noisy) * uniform(sites, classes)
    names = tuple(f"s{at}" for at in range(sites)), tuple(f"c{at}" for at in range(classes))
    shape = 2 * uniform(sites)
    return ClassPoints(*names, means, counts, noise, stretch, shape, float(d), power)


def nan_median(values: list[float]) -> float:
    """torch's: of an even number the lower one of the middle two."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def compared(points: ClassPoints) -> dict[str, Array]:
    """The table of `Compared`, entry by entry."""
    means, counts, noise = (
        getattr(points, name).double().numpy() for name in ("means", "counts", "noise")
    )
    sites, classes, d = means.shape
    usual = [nan_median([x for x in counts[:, c] if x]) for c in range(classes)]
    weights = np.minimum(counts, usual) ** points.power
    shape = (sites, classes)
    found = {
        name: np.zeros(shape)
        for name in ("own", "nearest", "other", "along", "aligned", "deviation", "spread", "judged")
    }
    found["between"] = np.zeros(sites)
    for s in range(sites):
        others = [k for k in range(sites) if k != s]
        centre, chance, known, scatter, noises = [], [], [], [], []
        for c in range(classes):
            total = max(sum(weights[k, c] for k in others), 1e-30)
            centre.append(sum(weights[k, c] * means[k, c] for k in others) / total)
            chance.append(sum(weights[k, c] ** 2 * noise[k, c] for k in others) / total**2)
            known.append(sum(weights[k, c] > 0 for k in others) >= 2)
            scatter.append(sum(weights[k, c] * (means[k, c] @ means[k, c]) for k in others) / total)
            noises.append(sum(weights[k, c] * noise[k, c] for k in others) / total)

        def square(x: Array, y: Array, variance: float) -> float:
            return float((x - y) @ (x - y)) - d * variance

        pairs = []
        for c in range(classes):
            own = square(means[s, c], centre[c], noise[s, c] + chance[c])
            summed = noise[s, c] + chance[c]
            found["own"][s, c] = own
            found["deviation"][s, c] = (
                2 * math.sqrt(max(own, 0) * summed) + math.sqrt(2 * d) * summed
            )
            found["judged"][s, c] = known[c] and weights[s, c] > 0
            found["spread"][s, c] = (
                scatter[c] - float(centre[c] @ centre[c]) - d * (noises[c] - chance[c])
            )
            nearest, other = math.inf, 0
            for k in range(classes):
                both = chance[c] + chance[k]
                apart = square(centre[c], centre[k], both)
                if k != c and known[c] and known[k]:
                    pairs.append(apart)
                hidden = apart < 3.5 * (
                    2 * math.sqrt(max(apart, 0) * both) + math.sqrt(2 * d) * both
                )
                here = square(means[s, c], centre[k], noise[s, c] + chance[k])
                if k != c and known[k] and not hidden and here < nearest:
                    nearest, other = here, k
            found["nearest"][s, c], found["other"][s, c] = nearest, other
            both = chance[c] + chance[other]
            length = max(square(centre[c], centre[other], both), 1e-30)
            wide = (1 if points.power > 1 else 16) * (noise[s, c] + both)
            way = centre[other] - centre[c]
            error = 2 * math.sqrt(length * wide) + math.sqrt(2 * d) * both
            error += 2 * float(points.stretch[s, c]) * abs(float(centre[c] @ way))
            found["along"][s, c] = (own - nearest - 3.5 * error) / (2 * length) + 0.5
            off = [
                float(way @ (means[s, k] - centre[k]))
                for k in range(classes)
                if k != c and known[k] and weights[s, k] > 0
            ]
            found["aligned"][s, c] = found["along"][s, c] - nan_median(off) / length
        found["between"][s] = max(0.0, nan_median(pairs))
    return found


CASES = {
    "sites": st.integers(3, 7),
    "classes": st.integers(1, 4),
    "d": st.sampled_from([2, 5]),
    "seed": st.integers(0, 999),
    "noisy": st.booleans(),
    "missing": st.sampled_from([0.0, 0.3]),
    "power": st.sampled_from([1.0, 2.0]),
}


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries(CASES), st.sampled_from([1, 2**17]))
def test_each_site_is_compared_with_the_mean_of_the_others(
    case: dict[str, float], at_once: int
) -> None:
    points = drawn(**case)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "NUMBERS", at_once)
        found = compare(points)
    wanted = compared(points)
    judged = wanted["judged"] > 0
    assert (found.judged.numpy() == judged).all()
    for name in ("own", "deviation", "spread"):
        table = getattr(found, name).double().numpy()
        assert table[judged] == pytest.approx(wanted[name][judged], rel=1e-3, abs=2e-3)
    near = judged & np.isfinite(wanted["nearest"])
    assert (np.isfinite(found.nearest.numpy()) == np.isfinite(wanted["nearest"]))[judged].all()
    assert (found.other.numpy() == wanted["other"])[near].all()
    for name in ("nearest", "along", "aligned"):
        table = getattr(found, name).double().numpy()
        assert table[near] == pytest.approx(wanted[name][near], rel=1e-3, abs=2e-3)
    assert found.between.numpy() == pytest.approx(wanted["between"], rel=1e-3, abs=2e-3)
    weighted = points.counts.numpy() > 0
    lengths = (points.means.numpy()[weighted] ** 2).sum(1).tolist()
    assert found.extent == pytest.approx(points.within + nan_median(lengths), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(CASES))
def test_the_patterns_are_what_they_say(case: dict[str, float]) -> None:
    points = drawn(**case)  # type: ignore[arg-type]
    found = compare(points)
    table = {
        name: getattr(found, name).double().numpy()
        for name in ("own", "nearest", "along", "aligned", "deviation", "spread", "between")
    }
    judged = found.judged.numpy()
    sites, classes = judged.shape
    every = [table["own"][s, c] for s in range(sites) for c in range(classes) if judged[s, c]]
    scores = {name: np.zeros((sites, classes)) for name in ("far", "moved", "label")}
    clear = True
    for s in range(sites):
        for c in range(classes):
            own, deviation = table["own"][s, c], table["deviation"][s, c]
            apart = own - 3.5 * deviation if judged[s, c] else 0.0
            most = 12 * found.extent if points.power == 1 else 4.0
            scores["far"][s, c] = max(apart, float(points.shape[s])) / most
            if not judged[s, c]:
                continue
            rest = [table["own"][s, k] for k in range(classes) if k != c and judged[s, k]]
            usual = max(nan_median(rest), nan_median(every), 0.5 * table["between"][s], 1e-30)
            scores["moved"][s, c] = (own - 3.5 * deviation) / (6 * usual)
            near = 6 * max(0.0, table["nearest"][s, c] - deviation) <= own
            sure = min(table["along"][s, c], table["aligned"][s, c])
            clear &= abs(sure - 0.6) > 1e-4
            if near and own > 1.5 * table["spread"][s, c] and sure > 0.6:
                scores["label"][s, c] = 2 * table["along"][s, c]
    assert far(points, found).numpy() == pytest.approx(scores["far"], rel=1e-4, abs=1e-5)
    assert moved(found).numpy() == pytest.approx(scores["moved"], rel=1e-3, abs=1e-4)
    if clear:
        assert label(found).numpy() == pytest.approx(scores["label"], rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries(CASES))
def test_never_half_of_the_sites_are_suspects_and_each_is_one_of_them(
    case: dict[str, float],
) -> None:
    points = drawn(**case)  # type: ignore[arg-type]
    suspects = screen(points)
    names = [each.site for each in suspects]
    assert len(set(names)) == len(names) < len(points.sites) / 2
    assert set(names) <= set(points.sites)
    assert {each.kind for each in suspects} <= {"far", "moved", "label", "unrelated"}
    assert all(each.score >= 1 for each in suspects)
    # The others are compared again without it.
    if suspects:
        rest = points.without(points.sites.index(names[0]))
        assert [each.site for each in screen(rest)][: len(names) - 1] == names[1:]


def worst_by_rules(points: ClassPoints, single_parts: bool) -> tuple[str, str, float, str] | None:
    """The first pattern that a site has, in the order of the patterns."""
    if points.odd is not None and float(points.odd.max()) >= 1:
        at = int(points.odd.argmax())
        return points.sites[at], "far", float(points.odd[at]), "outside the range of the other"
    found = compare(points)
    tables = {"far": far(points, found).numpy()}
    if not single_parts:
        tables |= {"moved": moved(found).numpy(), "label": label(found).numpy()}
    for kind, table in tables.items():
        sums = table.sum(1) if kind == "label" else table.max(1)
        at = int(sums.argmax())
        if sums[at] >= 1:
            index = int(table[at].argmax())
            name = points.classes[index]
            other = points.classes[int(found.other[at, index])]
            why = {
                "far": f"its class {name!r}, or the spread of its data, differs",
                "moved": f"its class {name!r} is far from the same class at the other sites, but",
                "label": f"its class {name!r} lies where the other sites have class {other!r}, not "
                f"where they have {name!r}",
            }[kind]
            return points.sites[at], kind, float(sums[at]), why
    if single_parts:
        return None
    scores = unrelated(correlations(points), points.power > 1, points.means.shape[2])
    at = int(scores.argmax())
    why = "the differences between its class means have nothing in common with those of the other"
    return (points.sites[at], "unrelated", float(scores[at]), why) if scores[at] > 1 else None


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 9999),
    st.sampled_from([2, 5, 9]),
    st.sampled_from(["odd", "far", "moved", "swapped", "drawn", "nothing"]),
    st.booleans(),
    st.booleans(),
)
@example(0, 9, "odd", False, True)
@example(0, 9, "far", False, True)
@example(0, 9, "moved", False, False)
@example(0, 9, "moved", False, True)
@example(0, 9, "swapped", False, True)
@example(0, 9, "drawn", False, True)
@example(0, 9, "drawn", True, False)
@example(0, 9, "nothing", False, True)
def test_suspects_are_named_one_after_the_other_by_the_first_pattern(
    seed: int, sites: int, fault: str, single_parts: bool, plain: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    points = drawn(sites, 4, 12, seed, noisy=not plain, missing=0.0, power=1.0)
    centres = 3 * torch.randn(4, 12, generator=draw)
    means = centres + 0.3 * torch.randn(sites, 4, 12, generator=draw)
    at = seed % sites
    if fault == "far":
        means[at, 2] += 1000
    elif fault == "moved":
        means[at, 1] += 12 * torch.randn(12, generator=draw)
    elif fault == "swapped":
        means[at, :2] = means[at, :2].flip(0)
    elif fault == "drawn":
        means[at] = 3 * torch.randn(4, 12, generator=draw)
    odd = torch.where(torch.arange(sites) == at, 1.5, 0.5) if fault == "odd" else None
    points = replace(points, means=means, shape=torch.zeros(sites), odd=odd)
    left, wanted = points, []
    while len(wanted) < (sites - 1) // 2 and (rule := worst_by_rules(left, single_parts)):
        wanted.append(rule)
        left = left.without(left.sites.index(rule[0]))
    found = screen(points, single_parts=single_parts)
    assert [(each.site, each.kind) for each in found] == [rule[:2] for rule in wanted]
    for each, rule in zip(found, wanted, strict=True):
        assert each.score == pytest.approx(rule[2], rel=1e-5)
        assert rule[3] in each.reason
