"""Generators: the loss is the textbook's, the shapes are the paper's, and samples have the
requested classes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import one_hot

from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.models.generators import (
    COUNTS,
    MEANS,
    Decoder,
    Encoder,
    Generator,
    critic,
    elbo,
    fresh_companion,
    fresh_generator,
    labels_like,
    scaled,
    tensors_of,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire import generator_files
from fedsurrogate.common.wire.generator_files import (
    pack_generator,
    read_generator,
    read_manifest,
    read_synthetic_set,
)
from tests.registry import sent_numbers

HEADER = Header("dpcvae", "run", "coordinator", "print", ("a", "b", "c"))


def run_of(**settings: Any) -> Any:
    return parse_run(
        {"method": "dpcvae"} | {f"dpcvae.{key}".replace("_", "-"): v for key, v in settings.items()}
    )


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("variance", [False, True])
@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("hidden", [0, 16])
def test_the_loss_is_the_likelihood_and_the_divergence_of_the_textbook(
    variance: bool, prior: bool, hidden: int
) -> None:
    encoder, decoder = (
        Encoder(4, hidden, 3, 10).double(),
        Decoder(4, hidden, 3, 10, variance, prior).double(),
    )
    for parameter in [*encoder.parameters(), *decoder.parameters()]:
        torch.nn.init.normal_(parameter, 0, 0.3)
    decoder.means.normal_()
    x, noise = torch.randn(7, 10).double(), torch.randn(7, 4).double()
    kinds = one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0]), 3).double()
    missed, apart = elbo(encoder, decoder, x, kinds, noise)
    mean, log_variance = encoder(x - kinds @ decoder.means, kinds)
    posterior = Normal(mean, (log_variance / 2).exp())
    at, log_width = decoder.prior_of(kinds)
    assert torch.allclose(apart, kl_divergence(posterior, Normal(at, (log_width / 2).exp())).sum(1))
    spread = decoder.log_variance(kinds)
    deviation = torch.ones_like(x) if spread is None else (spread / 2).exp()
    likelihood = (
        Normal(decoder(mean + posterior.stddev * noise, kinds), deviation).log_prob(x).sum(1)
    )
    constant = 5 * torch.log(torch.tensor(2 * torch.pi))
    assert torch.allclose(missed, -likelihood - constant)


@pytest.mark.parametrize(
    ("latent", "hidden", "classes", "dimension"),
    [(8, 0, 10, 64), (32, 256, 11, 768), (100, 256, 2, 384)],
)
def test_what_is_shared_has_as_many_parameters_as_the_formula_says(
    latent: int, hidden: int, classes: int, dimension: int
) -> None:
    run = run_of(latent=latent, hidden=hidden)
    assert count(
        fresh_generator(run.settings, run.method.adversarial, classes, dimension)
    ) == sent_numbers(run, dimension, classes, 0)


def test_the_gan_has_the_papers_size() -> None:
    run = parse_run({"method": "dpcgan", "dpcvae.latent": 100})
    assert (
        count(fresh_generator(run.settings, run.method.adversarial, 11, 768))
        == sent_numbers(run, 768, 11, 0)
        == 1_369_856
    )
    assert count(critic(11, 768)) == 1_324_033
    assert isinstance(
        fresh_companion(run.settings, run.method.adversarial, 11, 768), torch.nn.Sequential
    )


def test_both_sides_begin_with_the_same_generator_and_each_seed_with_another() -> None:
    own = run_of(hidden=16).settings
    one, other = (tensors_of(fresh_generator(own, False, 3, 10)) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = tensors_of(fresh_generator(own.model_copy(update={"seed": 1}), False, 3, 10))
    assert not torch.equal(one["linear.weight"], third["linear.weight"])


def generator(**settings: Any) -> Generator:
    run = run_of(**settings)
    tensors = tensors_of(fresh_generator(run.settings, run.method.adversarial, 3, 10))
    tensors[MEANS] = 5.0 * torch.eye(3, 10)
    tensors[COUNTS] = torch.tensor([10.0, 30.0, -2.0])
    return Generator(HEADER, run, tensors)


def test_draws_have_the_means_and_the_variance_that_are_learned() -> None:
    drawn_from = generator(hidden=0)
    tensors = drawn_from.tensors | {"variance.weight": torch.full((10, 1), -2.0)}
    weight = tensors["linear.weight"][:, :8]
    drawn_from = replace(drawn_from, tensors=tensors)
    x = (
        drawn_from.draw(torch.zeros(40_000, dtype=torch.int64), torch.Generator().manual_seed(0))
        * 10**0.5
    )
    assert torch.allclose(x.mean(0), tensors[MEANS][0], atol=0.02)
    latents = tensors["linear.weight"][:, :32]
    expected = latents @ latents.T + torch.eye(10) * float(torch.tensor(-2.0).exp())
    assert torch.allclose(torch.cov(x.T), expected, atol=0.02)
    assert weight.shape == (10, 8)


def test_embeddings_of_any_length_become_of_mean_square_one() -> None:
    x = torch.randn(5, 12) * torch.tensor([1e-3, 1.0, 1e3, 7.0, 2.0])[:, None]
    assert torch.allclose(scaled(x).square().mean(1), torch.ones(5), atol=1e-4)


def test_labels_in_shares_sum_up_to_what_was_asked_for() -> None:
    labels = labels_like([3.0, 0.0, 1.0, -5.0], 7)
    assert len(labels) == 7
    assert torch.bincount(labels, minlength=4).tolist() == [5, 0, 2, 0]


def test_a_generator_that_does_not_fit_is_refused() -> None:
    whole = generator(hidden=16)
    for tensors in (
        {name: tensor for name, tensor in whole.tensors.items() if name != "variance.weight"},
        whole.tensors | {"linear.weight": torch.zeros(10, 4)},
        whole.tensors | {"more": torch.zeros(1)},
    ):
        with pytest.raises(SurrogateError, match="do not fit 3 classes"):
            replace(whole, tensors=tensors).checked()


def test_a_file_says_what_its_rounds_promise(tmp_path: Any) -> None:
    run = parse_run({"method": "dpcvae", "epsilon": 3.0, "delta": 1e-5, "dpcvae.rounds": 4})
    whole = Generator(
        HEADER, run, tensors_of(fresh_generator(run.settings, run.method.adversarial, 3, 10))
    )
    assert run.mechanism is not None
    for rounds, content in ((3, pack_generator(whole, 3)), (4, pack_generator(whole))):
        (tmp_path / "r").write_bytes(content)
        stated = read_manifest(tmp_path / "r")["privacy"]
        assert stated["epsilon"] == pytest.approx(run.mechanism.epsilon_after(rounds))


def test_files_of_something_else_are_refused(tmp_path: Any) -> None:
    (tmp_path / "g").write_bytes(pack_generator(generator(hidden=0)))
    with pytest.raises(DataError, match="not a synthetic embeddings"):
        read_synthetic_set(tmp_path / "g")
    (tmp_path / "n").write_bytes(b"nonsense")
    for read in (read_generator, read_synthetic_set):
        with pytest.raises(DataError, match="is no file of"):
            read(tmp_path / "n")
        with pytest.raises(DataError, match="is no file of"):
            read(tmp_path / "missing")


# A tensor without entries whose shape torch cannot have.
SHAPE = b'{"x":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'
NO_SIDE = len(SHAPE).to_bytes(8, "little") + SHAPE


@settings(max_examples=30)
@given(st.binary(max_size=60), st.integers(0, 400))
def test_bytes_that_are_no_file_of_tensors_are_one_kind_of_error(noise: bytes, kept: int) -> None:
    """Also where the file is replaced after its manifest was read."""
    whole = save({"x": torch.zeros(3)}, {"manifest": "{}"})
    with TemporaryDirectory() as folder:
        file = Path(folder) / "generator.safetensors"
        for content in (noise, whole[:kept], whole[: kept % 40] + noise, NO_SIDE):
            file.write_bytes(content)
            if content == whole:
                continue
            for read in (read_generator, read_synthetic_set, generator_files._tensors):
                with pytest.raises(DataError):
                    read(file)
