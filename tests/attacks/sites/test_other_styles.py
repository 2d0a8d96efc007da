"""An honest site whose images are of another style than all others', with few classes and records,
keeps its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.honest_hospitals import DEVICES
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.strategies.fedpft.private_head import SITES_DIFFER, _pooled
from fedsurrogate.strategies.fedpft.strategy import learn
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from tests.hostile_sites import surrogate_of, uneven_digits

CLASSES, D, DIGITS = tuple("abcdefg"), 1280, tuple(map(str, range(10)))
# The correlation of photos and sketches of the same classes, measured on the images of PACS.
ALIKE = 0.09


def style(own: Tensor, common: Tensor) -> Tensor:
    return ALIKE**0.5 * common + (1 - ALIKE) ** 0.5 * own


def all_sent(parts: Sequence[tuple[Tensor, Tensor]], run: Run) -> list[Any]:
    """What sites with these digits send."""
    return [surrogate_of(part, DIGITS, "f" * 16, str(at), run) for at, part in enumerate(parts)]


def under_noise(classes: Sequence[str], seed: int) -> Run:
    own = {"epsilon": 8.0, "delta": 1e-5, "fedpft.covariance": "spherical"}
    return parse_run(own | {"classes": ",".join(classes), "seed": seed})


def drawn(seed: int) -> tuple[torch.Generator, Tensor, Tensor, Tensor]:
    """A generator, and means that are common, of photos and of sketches."""
    generator = torch.Generator().manual_seed(seed)
    common, photo, sketch = (
        0.5 * torch.randn(len(CLASSES), D, generator=generator) for _ in range(3)
    )
    return generator, common, photo, sketch


def site(
    means: Tensor, classes: list[int], count: int, name: str, generator: torch.Generator
) -> AnySurrogate:
    labels = torch.tensor(classes).repeat_interleave(count)
    features = means[labels] + torch.randn(len(labels), D, generator=generator)
    return surrogate_of(
        (features, labels), CLASSES, "f" * 16, name, parse_run({"fedpft.covariance": "diag"})
    )


@pytest.mark.parametrize("count", [8, 30])
@pytest.mark.parametrize("classes", [[0, 1], [0, 1, 2], [3, 4, 5, 6]])
def test_a_site_of_another_style_keeps_its_weight(classes: list[int], count: int) -> None:
    for seed in range(2):
        generator, common, photo, sketch = drawn(seed)
        sites = [
            site(style(photo, common), list(range(7)), 60, f"photos {i}", generator)
            for i in range(8)
        ]
        # Of another style there is little data. So chance hides most of its correlation with the
        # others.
        sites.append(site(style(sketch, common), classes, count, "sketches", generator))
        found = defend_surrogates(sites, "harm", 3.0, CLASSES)
        assert not found.suspects
        assert all(each.kept == 1 for each in found.effects.values())


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("device", ["blurred", "moved", "mirrored", "turned"])
def test_a_site_with_another_device_keeps_its_weight_in_few_columns(
    count: int, device: str
) -> None:
    """All others are alike, and lose a little by it, but its own records are placed right."""
    for seed in range(3):
        parts, _ = uneven_digits(100.0, seed, count)
        images, labels = parts[0]
        parts[0] = (DEVICES[device](images.reshape(-1, 1, 8, 8)).flatten(1), labels)
        found = defend_surrogates(all_sent(parts, parse_run({})), "harm", 3.0, DIGITS)
        assert all(each.kept == 1 for each in found.effects.values())


@pytest.mark.parametrize(
    ("count", "seed", "family"),
    [(5, 1, "spherical"), (4, 2, "diag"), (4, 0, "spherical"), (10, 0, "diag")],
)
def test_a_site_that_alone_has_classes_costs_nothing_to_keep(
    count: int, seed: int, family: str
) -> None:
    """Each site has classes nearly of its own, which take records from the others at any weight."""
    parts, (features, labels) = uneven_digits(0.01, seed, count)
    accuracy = {}
    for defence in ("none", "harm"):
        run = parse_run({"fedpft.covariance": family, "defence": defence})
        found = learn(all_sent(parts, run), run, "cpu", DIGITS)
        assert not found.defended.suspects
        accuracy[defence] = found.model.accuracy(features, DIGITS, labels)[0] / len(labels)
    assert accuracy["harm"] >= accuracy["none"] - 0.01


@pytest.mark.parametrize("seed", range(3))
def test_under_noise_an_honest_site_of_another_style_chooses_the_solver(seed: int) -> None:
    """Without it the others do not differ; least squares, which it needs, harms none of them."""
    generator, common, photo, sketch = drawn(seed)
    run = under_noise(CLASSES, seed)
    labels = torch.arange(7).repeat_interleave(120)

    def sent(means: Tensor, name: str) -> SumsSurrogate:
        features = means[labels] + torch.randn(len(labels), D, generator=generator)
        found = surrogate_of((features, labels), CLASSES, "f" * 16, name, run)
        assert isinstance(found, SumsSurrogate)
        return found

    photos = [sent(style(photo, common), f"photos {i}") for i in range(3)]
    honest = [*photos, sent(style(sketch, common), "sketches")]
    assert _pooled(honest, "spherical", "harm")[1] == _pooled(honest, "spherical", "none")[1]
    assert _pooled(honest, "spherical", "harm")[1] > SITES_DIFFER


@pytest.mark.parametrize("seed", range(10, 13))
def test_under_noise_a_false_site_does_not_choose_the_solver(seed: int) -> None:
    sites, _ = uneven_digits(0.5, seed, 4)
    run = under_noise(DIGITS, seed)
    everyone = tuple(torch.cat(each) for each in zip(*sites, strict=True))
    sent = all_sent([*sites[:3], everyone], run)
    # Every class mean is moved away from the nearest other one.
    sums = sent[3].sums
    means = sums.sums / sums.counts.clamp_min(1)[:, None]
    near = torch.cdist(means, means).fill_diagonal_(torch.inf).argmin(1)
    moved = sums.sums + 1.8 * sums.counts.clamp_min(1)[:, None] * (means - means[near])
    sent[3] = replace(sent[3], sums=replace(sums, sums=moved))
    assert _pooled(sent, "spherical", "none")[1] > SITES_DIFFER
    assert _pooled(sent, "spherical", "harm")[1] == 0
