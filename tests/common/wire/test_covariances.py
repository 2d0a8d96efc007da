"""Whole covariances at 16 bits and loadings at 8 bits: what travels, and what is refused."""

import pytest
import torch

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.covariances import Gram, LowRank
from fedsurrogate.common.surrogates.mixtures import Mixtures, MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.common.wire.tensors import (
    Expectation,
    check_surrogate,
    pack_levels,
    unpack_levels,
)

HEADER = Header("fedpft", "run", "site", "backbone", ("a", "b"))


def made(family, n=200, d=30, scale=1.0, **settings):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator) @ torch.randn(d, d, generator=generator) * scale
    labels = torch.arange(n) % 2
    return Surrogate(HEADER, fit(x, labels, 2, MixtureSettings(family, **settings), generator))


def check(surrogate, family="gram", rank=16):
    check_surrogate(surrogate, Expectation("fedpft", "run", family, 1, rank))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e3])
@pytest.mark.parametrize("n", [3, 20, 200])
def test_a_whole_covariance_is_exact_to_half_precision_at_any_scale(n, scale):
    sent = made("gram", n, scale=scale)
    found = unpack_surrogate(pack_surrogate(sent))
    check(found)
    before, after = sent.mixtures.covariance.matrix, found.mixtures.covariance.matrix
    limit = 2**-10 * before.diagonal().sqrt()[:, None] * before.diagonal().sqrt()
    assert ((before - after).abs() <= limit).all()


def test_entries_of_very_different_dimensions_do_not_underflow():
    factors = torch.logspace(-10, 4, 30)
    sent = made("gram")
    matrix = sent.mixtures.covariance.matrix * factors * factors[:, None]
    wide = Surrogate(HEADER, Mixtures(*list(vars(sent.mixtures).values())[:4], Gram(matrix)))
    after = unpack_surrogate(pack_surrogate(wide)).mixtures.covariance.matrix
    variance = matrix.diagonal().mean()
    kept = matrix.diagonal() > 1e-9 * variance
    torch.testing.assert_close(after[kept][:, kept], matrix[kept][:, kept], rtol=3e-3, atol=0.0)


@pytest.mark.parametrize("shape", [(30, 4), (31, 3), (1, 1)])
def test_levels_are_within_half_a_step(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = unpack_levels(pack_levels(matrix), shape)
    reach = matrix.abs().amax(0)
    assert ((found - matrix).abs() <= 1.002 * reach / 127 / 2 + 1e-3 * reach).all()


@pytest.mark.parametrize("bits", [16, 8])
def test_fewer_bits_keep_the_variance_of_every_dimension_and_take_fewer_bytes(bits):
    sent = made("lowrank", d=200, rank=16)
    payload = pack_surrogate(sent, bits)
    found = unpack_surrogate(payload)
    check(found, "lowrank")
    before, after = (each.mixtures.covariance.variances_per_dimension() for each in (sent, found))
    assert ((after - before).abs() <= 0.02 * before).float().mean() > 0.95
    assert len(payload) < 200 * 16 * bits / 8 + 200 * 2 * 3 + 300


def gram_with(matrix, counts=(100, 100)):
    means = torch.zeros(2, len(matrix))
    return Surrogate(
        HEADER, Mixtures(torch.tensor(counts), torch.arange(2), torch.ones(2), means, Gram(matrix))
    )


@pytest.mark.parametrize(
    ("surrogate", "reason"),
    [
        (gram_with(torch.eye(4) + 3 * torch.eye(4).flip(0)), "a correlation of 3"),
        (
            gram_with(
                2 * torch.eye(3) - torch.ones(3, 3) * 0.9 + 0.9 * torch.eye(3) - torch.eye(3)
            ),
            "negative eigenvalue",
        ),
        (gram_with(torch.eye(50), (3, 2)), "more directions than 5 records of 2 classes"),
        (gram_with(torch.eye(50), (1, 1)), "more directions than 2 records"),
        (gram_with(torch.full((4, 4), float("nan"))), "not finite"),
    ],
)
def test_matrices_that_no_records_have_are_refused(surrogate, reason):
    with pytest.raises(SurrogateError, match=reason):
        check(surrogate)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 40, 1000])
def test_honest_matrices_pass_for_any_number_of_records(n):
    for seed in range(5):
        x = torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)).clamp_min(0) ** 2
        x[:, :9] = 0
        table = fit(x, torch.arange(n) % 2, 2, MixtureSettings("gram"), torch.Generator())
        check(unpack_surrogate(pack_surrogate(Surrogate(HEADER, table))))


def broken(change, bits=8):
    message = pb.Surrogate()
    message.ParseFromString(pack_surrogate(made("lowrank", rank=4), bits))
    change(message.mixtures)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.levels, "bits", 4), "loadings of 4 bits; 8 are allowed"),
        (lambda m: setattr(m.levels, "data", b"x"), "in 1 bytes"),
        (lambda m: m.levels.shape.append(1), "loadings of shape"),
        (
            lambda m: setattr(m.levels.scales, "logarithm", False),
            "scales of loadings must travel as logarithms",
        ),
        (lambda m: setattr(m, "covariance", "gram"), "covariance 'gram' with 1 tables"),
        (lambda m: m.spread.append(m.spread[0]), "with 2 tables, expected 1"),
        (lambda m: setattr(m, "covariance", "other"), "unknown covariance 'other'"),
        (lambda m: m.levels.shape.__setitem__(1, 2**30), "in 120 bytes"),
    ],
)
def test_broken_levels_are_refused_with_a_reason(change, reason):
    with pytest.raises(SurrogateError, match=reason):
        unpack_surrogate(broken(change))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fedpft.bits": 12}, r"fedpft\.bits = 12"),
        ({"fedpft.bits": 8, "fedpft.covariance": "diag"}, "loadings of covariance 'lowrank'"),
        ({"fedpft.bits": 8, "epsilon": 1.0, "delta": 1e-5}, "without privacy"),
        ({"fedpft.covariance": "gram", "fedpft.components": 2}, "one component a class"),
        (
            {"fedpft.covariance": "gram", "fedpft.topology": "chain"},
            "only with fedpft.topology = 'star'",
        ),
        (
            {"head.shrinkage": 1.5},
            r"head\.shrinkage = 1\.5: must be 'auto', or a number from 0 to 1",
        ),
        ({"head.shrinkage": "much"}, r"head\.shrinkage = 'much'"),
        ({"head.solver": "svm"}, r"head\.solver = 'svm'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_run(settings)


def test_families_are_lowrank_or_gram_as_requested():
    assert isinstance(made("lowrank").mixtures.covariance, LowRank)
    assert isinstance(made("gram").mixtures.covariance, Gram)
    with pytest.raises(SurrogateError, match="covariance 'lowrank', expected 'gram'"):
        check(made("lowrank"))
