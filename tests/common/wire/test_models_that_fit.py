"""Classifiers of several parts that fit together on every way; generators of files as they were learned; and
sums that a mechanism has no noise for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.models.classifiers import Ensemble, Head, Quadratic
from fedsurrogate.common.models.generators import Generator, fresh_generator, tensors_of
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, clip, with_noise
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import (
    pack_generator,
    read_generator,
    write_synthetic_set,
)
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier

HEADER = Header("fedpft", "r", "coordinator", "f", ("a", "b", "c"))


def head(dimension: int = 4, classes: tuple[str, ...] = HEADER.classes) -> Head:
    draw = torch.Generator().manual_seed(dimension)
    weight = torch.randn(len(classes), dimension, generator=draw)
    return Head(replace(HEADER, classes=classes), weight, torch.ones(len(classes)))


@pytest.mark.parametrize("other", [head(5), head(4, ("a", "b", "d")), head(4, ("a", "c", "b"))])
def test_heads_of_an_ensemble_have_the_same_classes_and_features(other: Head) -> None:
    fine = unpack_classifier(pack_classifier(Ensemble((head(), head()))))
    assert isinstance(fine, Ensemble)
    assert fine.dimension == 4
    with pytest.raises(SurrogateError, match="heads of different classes or dimensions"):
        unpack_classifier(pack_classifier(Ensemble((head(), other))))


@pytest.mark.parametrize("whole", [False, True])
def test_discriminants_have_their_means_their_whiteners_and_their_bias(whole: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    whiteners = torch.randn(3, *((3, 3) if whole else (3,)), generator=draw)
    made = Quadratic(HEADER, torch.randn(3, 3, generator=draw), whiteners, torch.arange(3.0))
    found = unpack_classifier(pack_classifier(made))
    assert isinstance(found, Quadratic)
    found.check_shapes()
    for name, tensor in made.arrays().items():
        torch.testing.assert_close(found.arrays()[name], tensor, rtol=2e-3, atol=2e-3)
    holes = replace(made, bias=torch.tensor([0.0, torch.nan, 1.0]))
    with pytest.raises(SurrogateError, match="a number that is not finite"):
        unpack_classifier(pack_classifier(holes))


def test_a_generator_of_a_file_has_the_budget_and_the_shape_of_its_run(tmp_path: Path) -> None:
    own = {"method": "dpcvae", "seed": 9, "epsilon": 6.0, "delta": 1e-4}
    run = parse_run(own | {"dpcvae.latent": 2, "dpcvae.hidden": 3})
    tensors = tensors_of(fresh_generator(run.settings, run.method.adversarial, 3, 5))
    header = Header("dpcvae", run.digest, "coordinator", "f", ("a", "b", "c"))
    file = tmp_path / "generator.safetensors"
    file.write_bytes(pack_generator(Generator(header, run, tensors)))
    found = read_generator(file)
    settings: Any = found.run.settings
    assert (settings.method, settings.seed) == ("dpcvae", 9)
    assert (settings.epsilon, settings.delta) == (6.0, 1e-4)
    assert settings.dpcvae == run.settings.dpcvae
    assert found.header == header
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor)

    drawn = write_synthetic_set(tmp_path / "set", found, torch.tensor([0, 2, 2]), 3, {"own": 1})
    torch.testing.assert_close(
        drawn, found.draw(torch.tensor([0, 2, 2]), torch.Generator().manual_seed(3))
    )
    with safe_open(tmp_path / "set", "pt") as content:
        facts = content.metadata()
        assert torch.equal(content.get_tensor("x"), drawn.half())
        assert content.get_tensor("y").tolist() == [0, 2, 2]
    assert (facts["classes"], facts["fingerprint"]) == ("a,b,c", "f")
    described = json.loads(facts["manifest"])
    assert (described["own"], described["seed"]) == (1, 3)
    assert described["records"] == {"a": 1, "b": 0, "c": 2}


@pytest.mark.parametrize(
    ("kind", "less"),
    [
        (torch.float16, 2 * 2.0**-10),
        (torch.bfloat16, 2 * 2.0**-7),
        (torch.float32, 1e-6),
        (torch.float64, 1e-6),
    ],
)
def test_a_clip_leaves_room_for_the_rounding_of_its_numbers(kind: torch.dtype, less: float) -> None:
    clipped, share = clip(torch.tensor([[3.0], [-0.25]], dtype=kind), 0.0)
    assert clipped.dtype == kind
    assert clipped.double().abs().flatten().tolist() == pytest.approx([1 - less] * 2, abs=1e-7)
    assert share == 1


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "c"), ()])
def test_noise_is_added_to_the_sums_that_a_mechanism_names(names: tuple[str, ...]) -> None:
    claim = Mechanism("x", 1.0, 1e-5, "record", 1.0, 0.0, {"b": (2.0, 1.0), "a": (3.0, 1.0)})

    def sums(chosen: tuple[str, ...]) -> list[BoundedSum]:
        return [BoundedSum(name, IntegerSum.of(torch.ones(2), bound=1.0), 1.0) for name in chosen]

    found = with_noise(sums(("a", "b")), claim)
    assert [(each.name, each.sigma) for each in found] == [("b", 2.0), ("a", 3.0)]
    with pytest.raises(ConfigError) as refusal:
        with_noise(sums(names), claim)
    assert str(refusal.value) == f"sums {', '.join(names)}; the mechanism has noise for b, a"
