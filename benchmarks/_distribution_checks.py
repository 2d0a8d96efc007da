"""The samplers and private releases whose distribution is tested, each with its tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from benchmarks._audit_site import Canaries, seen_of
from benchmarks._distribution_tests import (
    Numbers,
    Outcome,
    of_continuous,
    of_counts,
    of_noise,
    of_uniform_words,
)
from benchmarks.audit import MECHANISMS
from fedsurrogate.client_app.audit.release_audit import _half
from fedsurrogate.client_app.datasets.partition import _dirichlet_parts
from fedsurrogate.client_app.methods.dp.record_gradients import poisson_sample
from fedsurrogate.common.privacy.gaussian_mechanism import (
    BoundedSum,
    Noisy,
    discrete_gaussian,
    secret_bytes,
    seeded,
    system_normals,
    system_uniforms,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation import secrets as masks
from fedsurrogate.common.secure_aggregation import secrets as shamir
from fedsurrogate.common.secure_aggregation.protocol import noise_of_site, noise_of_sum, spare_of
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import unpack_surrogate

Check = Callable[[int], Iterator[Outcome]]
# Ten for each of 256 outcomes.
FEWEST_NUMBERS = 2600
PRIVATE: dict[str, Scalar] = {"epsilon": 8.0, "delta": 1e-5, "seed": 1}


@dataclass(frozen=True)
class Recorded:
    """The noise of every release of a run in units of its claimed standard deviation, by statistic,
    and the releases.
    """

    residuals: Mapping[str, list[Numbers]]
    released: Sequence[Noisy]


def samplers(count: int) -> Iterator[Outcome]:
    """All samplers of secret or public random numbers.

    Args:
        count: of numbers that each draws, about.
    """
    for variance in (2, 9, 300):
        for name, drawn in (
            ("operating system", discrete_gaussian(variance, count)),
            ("seeds", _seeded(variance, count)),
        ):
            most = math.ceil(14 * math.sqrt(variance)) + 1
            outcomes = np.arange(-most, most + 1)
            weights = np.exp(-(outcomes**2) / (2 * variance))
            found = np.bincount(drawn + most, minlength=len(outcomes))
            yield of_counts(
                f"discrete Gaussian, variance {variance}, {name}",
                "probabilities",
                found,
                count * weights / weights.sum(),
            )
    for power in (40, 88, 112):
        scaled = discrete_gaussian(2**power, count) / 2.0 ** (power / 2)
        yield from of_noise(f"discrete Gaussian, variance 2^{power}", scaled)
        low = discrete_gaussian(2**power, count) & 255
        yield of_counts(
            f"discrete Gaussian, variance 2^{power}",
            "lowest byte",
            np.bincount(low, minlength=256),
            np.full(256, count / 256),
        )
    yield from of_noise("secret normals", system_normals((count,)).numpy())
    yield of_continuous("secret uniforms", system_uniforms(count).numpy(), stats.uniform.cdf)
    words = np.frombuffer(bytes(secret_bytes(8 * count)), dtype="<u8")
    yield from of_uniform_words("secret bytes", words, 64)
    yield from _masks(count)
    yield from _shares(max(FEWEST_NUMBERS, count // 20))
    yield from _samples(max(100, count // 200))
    yield from _halves(max(100, count // 200))
    yield from _mixtures(count)
    yield from _partition(max(100, count // 20))


def _seeded(variance: int, count: int) -> np.ndarray:
    """One number of each seed would take long; a hundred of each."""
    seeds = bytes(secret_bytes(32 * (count // 100 + 1)))
    parts = [
        discrete_gaussian(variance, 100, seeded(seeds[32 * at : 32 * at + 32]))
        for at in range(count // 100 + 1)
    ]
    return np.concatenate(parts)[:count]


def _masks(count: int) -> Iterator[Outcome]:
    """A site's own mask is a stream; masks of many seeds begin alike nowhere."""
    stream = masks.own_mask(bytes(32), b"list", count)
    yield from of_uniform_words("own mask, one seed", stream.astype(np.uint64), 32)
    first = np.array(
        [
            masks.own_mask(secret_bytes(32), b"list", 1)[0]
            for _ in range(max(FEWEST_NUMBERS, count // 20))
        ]
    )
    yield from of_uniform_words("own mask, many seeds", first.astype(np.uint64), 32)


def _shares(count: int) -> Iterator[Outcome]:
    """Any share of a fixed secret, and what two shares below a threshold of three have in common."""
    dealt = [shamir.split(bytes(16), 3, 3) for _ in range(count)]
    values = np.array([[int.from_bytes(each[point]) for point in (1, 2, 3)] for each in dealt])
    for point in range(3):
        share = np.array([float(value / shamir.PRIME) for value in values[:, point]])
        yield of_continuous(f"Shamir share {point + 1}", share, stats.uniform.cdf)
        low = np.array([int(value) & 255 for value in values[:, point]])
        yield of_counts(
            f"Shamir share {point + 1}",
            "lowest byte",
            np.bincount(low, minlength=256),
            np.full(256, count / 256),
        )
    pairs = [(int(a) * 8 // shamir.PRIME) * 8 + int(b) * 8 // shamir.PRIME for a, b, _ in values]
    yield of_counts(
        "Shamir shares 1 and 2", "pairs", np.bincount(pairs, minlength=64), np.full(64, count / 64)
    )


def _samples(runs: int) -> Iterator[Outcome]:
    """Poisson samples: their sizes, how often each record comes, and pairs of records."""
    records = 40
    for rate in (0.01, 0.3, 0.9):
        taken = np.zeros((runs, records))
        for run in range(runs):
            taken[run, poisson_sample(records, rate).numpy()] = 1
        yield from _coins(f"Poisson sample, rate {rate:g}", taken, rate)


def _halves(runs: int) -> Iterator[Outcome]:
    """The halves of an audit, by units."""
    groups, drawn = np.arange(40), np.random.default_rng(secret_seed())
    taken = np.array([_half(groups, drawn) for _ in range(runs)], dtype=float)
    yield from _coins("halves of an audit", taken, 0.5)


def secret_seed() -> int:
    """A new seed from the operating system."""
    return int.from_bytes(secret_bytes(16))


def _coins(name: str, taken: Numbers, rate: float) -> Iterator[Outcome]:
    """Tests that tosses (runs, records) are independent, with this probability."""
    runs, records = taken.shape
    sizes = np.bincount(taken.sum(1).astype(int), minlength=records + 1)
    yield of_counts(
        name, "sizes", sizes, runs * stats.binom.pmf(np.arange(records + 1), records, rate)
    )
    spread = math.sqrt(rate * (1 - rate))
    each = (taken.sum(0) - runs * rate) / (spread * math.sqrt(runs))
    yield Outcome(name, "each record", runs, float(stats.chi2.sf(np.square(each).sum(), records)))
    scaled = (taken - rate) / spread
    for test, products in (
        ("pairs of records", scaled[:, :-1] * scaled[:, 1:]),
        ("pairs of samples", scaled[:-1] * scaled[1:]),
    ):
        score = float(products.sum()) / products.size**0.5
        yield Outcome(name, test, products.size, float(2 * stats.norm.sf(abs(score))))


def _mixtures(count: int) -> Iterator[Outcome]:
    """Samples of mixtures of every simple family: which component, and whitened coordinates."""
    weights, means = (
        torch.tensor([0.2, 0.5, 0.3]),
        400.0 * torch.arange(3.0)[:, None] * torch.ones(1, 2),
    )
    cholesky = torch.tensor([[[2.0, 0.0], [0.5, 0.7]]]).repeat(3, 1, 1)
    families = {
        "spherical": (Spherical(torch.tensor([1.0, 4.0, 0.25])), None),
        "diag": (Diagonal(torch.tensor([[1.0, 4.0]] * 3)), None),
        "full": (Full(cholesky), cholesky[0]),
    }
    for name, (covariance, factor) in families.items():
        table = Mixtures(
            torch.tensor([count]), torch.zeros(3, dtype=torch.int64), weights, means, covariance
        )
        stream = torch.Generator().manual_seed(secret_seed() % 2**62)
        features, _ = table.draw([count], [stream])
        component = (features[:, 0] / 400).round().long().clamp(0, 2)
        yield of_counts(
            f"mixture, {name}",
            "components",
            torch.bincount(component, minlength=3).numpy(),
            count * weights.numpy(),
        )
        centred = (features - means[component]).double()
        if factor is not None:
            white = torch.linalg.solve_triangular(factor.double(), centred.T, upper=False).T
        elif isinstance(covariance, Diagonal):
            white = centred / covariance.variances[0].double().sqrt()
        else:
            assert isinstance(covariance, Spherical)
            white = centred / covariance.variances[component].double().sqrt()[:, None]
        yield from of_noise(f"mixture, {name}", white.numpy())


def _partition(runs: int) -> Iterator[Outcome]:
    """The share of a class at a site follows a beta distribution."""
    drawn, members = np.random.default_rng(secret_seed()), [torch.arange(200_000)]
    for alpha in (0.1, 1.0):
        shares = np.array(
            [
                len(_dirichlet_parts(members, drawn.dirichlet, [alpha] * 4)[1]) / 200_000
                for _ in range(runs // 4)
            ]
        )
        # A share is rounded to a record; a small one may be rounded to none.
        jittered = (shares + drawn.random(len(shares)) / 200_000).clip(0, 1)
        law = stats.beta(alpha, 3 * alpha)
        lowest = float(law.cdf(1e-3))
        folded = np.where(jittered < 1e-3, lowest * drawn.random(len(shares)), law.cdf(jittered))
        yield of_continuous(f"Dirichlet partition, alpha {alpha:g}", folded, stats.uniform.cdf)


def releases(runs: int) -> Iterator[Outcome]:
    """The noise of every private release, through the site's own code.

    Args:
        runs: of each mechanism, on the same data.
    """
    for name, mechanism in MECHANISMS.items():
        if mechanism.sites > 1:
            continue
        canaries = mechanism.canaries(_canaries(name), torch.Generator().manual_seed(0))
        found = recorded(lambda c=canaries, m=mechanism: seen_of(c, m.settings | PRIVATE), runs)  # type: ignore[misc]
        for statistic, parts in found.residuals.items():
            yield from of_noise(f"{name}, {statistic}", np.stack(parts))
    yield from _counts(runs)
    yield from _payloads(runs)
    yield from _joint(runs)


def _canaries(name: str) -> int:
    """Records of a site. A generator needs more: with few, no class exceeds its noise."""
    return 400 if name.startswith("dpc") else 60


def recorded(work: Callable[[], object], runs: int) -> Recorded:
    """What `work` adds to its sums, recorded where noise is added."""
    residuals: dict[str, list[Numbers]] = {}
    released: list[Noisy] = []
    add = BoundedSum.noisy

    def spy(statistic: BoundedSum, sigma: float, rounding: float = 0.0) -> Noisy:
        made = add(statistic, sigma, rounding)
        residual = ((made.value - statistic.value) / sigma).flatten().numpy()
        # In DP-EM, the first step has other shapes than the later ones.
        residuals.setdefault(f"{statistic.name} of {len(residual)}", []).append(residual)
        released.append(made)
        return made

    with patch.object(BoundedSum, "noisy", spy):
        for _ in range(runs):
            work()
    return Recorded(residuals, released)


def _payloads(runs: int) -> Iterator[Outcome]:
    """What arrives: two releases of the same data differ by twice the claimed variance.

    Numbers travel in 16 bits, whose rounding is far below this noise.
    """
    for name in (
        "class sums, spherical",
        "class sums, diag",
        "class sums, gram",
        "dp-fedavg",
        "dpcvae",
    ):
        mechanism = MECHANISMS[name]
        canaries = mechanism.canaries(_canaries(name), torch.Generator().manual_seed(0))
        sent = [_sent(name, canaries, mechanism.settings) for _ in range(2 * runs)]
        for statistic, (_, sigma) in sent[0].items():
            values = np.stack([each[statistic][0].double().flatten().numpy() for each in sent])
            yield from of_noise(
                f"payload of {name}, {statistic}", values[::2] - values[1::2], math.sqrt(2) * sigma
            )


def _sent(
    name: str, canaries: Canaries, settings: dict[str, Scalar]
) -> dict[str, tuple[Tensor, float]]:
    """The numbers of a site's first payload, and their claimed standard deviation."""
    seen = seen_of(canaries, settings | PRIVATE)
    claim = seen.run.mechanism
    assert claim is not None
    payload = seen.rounds[0][1]
    if name.startswith("class sums"):
        sums = unpack_surrogate(payload).sums  # type: ignore[union-attr]
        tables = {"counts": sums.counts, "sums": sums.sums, "squares": sums.squares}
        return {
            each: (table, claim.noise[each][0])
            for each, table in tables.items()
            if table is not None
        }
    tensors = unpack_parameters(payload).tensors
    if name == "dpcvae":
        return {each: (table, claim.noise[each][0]) for each, table in tensors.items()}
    own = seen.run.settings.fedavg
    sigma = own.learning_rate * claim.noise["gradients"][0] / own.batch_size
    return {"update": (torch.cat([part.flatten() for part in tensors.values()]), sigma)}


def _counts(runs: int) -> Iterator[Outcome]:
    """Noisy counts of a survey, which arrive rounded to whole numbers."""
    canaries = MECHANISMS["class sums, spherical"].canaries(200, torch.Generator().manual_seed(0))
    settings: dict[str, Scalar] = {"counting.kind": "survey"}
    found = recorded(lambda: seen_of(canaries, settings | PRIVATE), runs)
    for statistic, parts in found.residuals.items():
        yield from of_noise(f"survey, {statistic}", np.stack(parts))


def _joint(runs: int) -> Iterator[Outcome]:
    """The distributed noise of secure aggregation, with and without the parts for lost sites."""
    sites = 4
    run = parse_run(
        PRIVATE
        | {
            "secure-aggregation": True,
            "fedpft.covariance": "gram",
            "classes": "a,b",
            "dropouts": 0.25,
            "colluding": 0.25,
        }
    )
    claim, rules = run.mechanism, rules_of(run.settings, sites)
    assert claim is not None
    numbers, shapes = numbers_of(run.plan, run.settings, sites), shapes_of(run.plan, 2, 24)
    for removed in (0, sites):
        totals: dict[str, list[Numbers]] = {name: [] for name in shapes}
        for _ in range(4 * runs):
            parts = []
            for _ in range(sites):
                seed = bytes(secret_bytes(32))
                drawn = noise_of_site(claim, numbers, shapes, rules, seed)
                spare = spare_of(claim, numbers, shapes, rules, seed) if removed else {}
                parts.append({name: drawn[name] - spare.get(name, 0) for name in shapes})
            for name in shapes:
                totals[name].append(sum(part[name] for part in parts) * numbers[name].step)
        sigmas = noise_of_sum(claim, numbers, shapes, rules, sites, removed)
        for name, each in totals.items():
            what = "without" if removed else "with"
            yield from of_noise(
                f"distributed noise {what} the parts for lost sites, {name}",
                np.stack(each),
                sigmas[name],
            )
