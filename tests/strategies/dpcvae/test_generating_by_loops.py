"""The first round of a generator by its formulas: class means under noise, what class sizes and sums may
be, weights of sites, and class sizes that sites of a private run accept.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import LARGEST_PRIVATE, RunError, SurrogateError
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import COUNTS, MEANS, SUMS, Generator
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import (
    SIZES,
    _weights,
    check_first_round,
    class_means,
    expected_shapes,
    head_of,
    moved_by,
    take_in,
    with_classes,
)

CLASSES, D = ("a", "b", "c"), 5
# Of the first round's budget: class sizes and sums.
SHARES = {COUNTS: 0.07, SUMS: 0.93}
few = settings(max_examples=30, deadline=None)


def run(**more: Any) -> Run:
    plain: dict[str, Any] = {"method": "dpcvae", "dpcvae.latent": 2, "dpcvae.hidden": 0}
    return parse_run(plain | more)


PLAIN, PRIVATE = run(), run(epsilon=6.0, delta=1e-5)


def noise_of(config: Run) -> float:
    assert isinstance(config.mechanism, Mechanism)
    return config.mechanism.event(1).noise_multiplier


def reply(site: str, counts: torch.Tensor, sums: torch.Tensor, config: Run) -> Parameters:
    header = Header("dpcvae", "run", site, "f", CLASSES)
    return Parameters(header, 1, {COUNTS: counts, SUMS: sums}, 0, config.mechanism)


@few
@given(st.integers(0, 9999), st.integers(1, 3), st.sampled_from([1, 4]), st.floats(0.3, 4))
def test_means_under_noise_are_shrunk_by_the_share_of_noise_in_their_distance(
    seed: int, sites: int, joint: int, apart: float
) -> None:
    draw = np.random.default_rng(seed)
    noise = noise_of(PRIVATE)
    of_count, of_sum = (noise * math.sqrt(joint / SHARES[name]) for name in (COUNTS, SUMS))
    counts = draw.choice([0.0, 3.0, 30.0, 90.0], (sites, 3)) * of_count
    true = apart * of_sum / of_count / 30 * draw.normal(size=(3, D))
    sums = counts[:, :, None] * true + of_sum * draw.normal(size=(sites, 3, D))
    counts32, sums32 = (torch.from_numpy(each).float() for each in (counts, sums))
    sent = [reply(f"s{k}", counts32[k], sums32[k], PRIVATE) for k in range(sites)]
    means, noises, records = {}, {}, {}
    for c in range(3):
        rows = [k for k in range(sites) if counts[k, c] > 2 * of_count]
        if not rows:
            continue
        weights = np.array([counts[k, c] ** 2 for k in rows])
        weights /= weights.sum()
        own = [sums[k, c] / counts[k, c] for k in rows]
        each = [
            (
                of_sum**2
                + max(0.0, float((m**2).mean()) - (of_sum / counts[k, c]) ** 2) * of_count**2
            )
            / counts[k, c] ** 2
            for k, m in zip(rows, own, strict=True)
        ]
        means[c] = weights @ np.stack(own)
        noises[c] = float(weights**2 @ np.array(each))
        records[c] = sum(counts[k, c] for k in rows)
    given_ = (sent, PRIVATE.mechanism, PRIVATE.settings.dpcvae, joint)
    if not means:
        with pytest.raises(RunError, match="no class stands out"):
            class_means(*given_)
        return
    found = class_means(*given_).double().numpy() / math.sqrt(D)
    middle = sum(records[c] * means[c] for c in means) / sum(records.values())
    for c in range(3):
        wanted = middle
        if c in means:
            distance = means[c] - middle
            kept = 1 - D * noises[c] / max(float(distance @ distance), 1e-12)
            wanted = middle + min(1.0, max(0.0, kept)) * distance
        np.testing.assert_allclose(found[c], wanted, rtol=1e-3, atol=1e-4)


def refusal(sent: Parameters, config: Run, sites: int) -> str:
    try:
        check_first_round(sent, config.mechanism, config.settings.dpcvae, sites)
    except SurrogateError as error:
        return str(error)
    return ""


@few
@given(
    st.sampled_from([PLAIN, PRIVATE]), st.sampled_from([1, 3]), st.integers(0, 2), st.floats(1, 80)
)
def test_sizes_and_sums_are_refused_just_beyond_thirty_deviations(
    config: Run, sites: int, at: int, size: float
) -> None:
    noise = 0.0 if config is PLAIN else noise_of(config)
    of_count, of_sum = (30 * noise * math.sqrt(sites / SHARES[name]) for name in (COUNTS, SUMS))
    near = 1e-3 + 1e-5 * of_count

    def sent(count: float, length: float) -> Parameters:
        counts, sums = torch.full((3,), 5.0), torch.zeros(3, D)
        counts[at], sums[at, 2] = count, length
        return reply("s", counts, sums, config)

    assert refusal(sent(near - of_count, 0.0), config, sites) == ""
    low = torch.tensor(-near - of_count)
    assert refusal(sent(float(low), 0.0), config, sites) == (
        f"class sizes of {float(low):g} to 5 records are out of range"
    )
    allowed = 1.01 * size + of_count + of_sum * math.sqrt(D) + 0.01
    assert refusal(sent(size, 0.99999 * allowed), config, sites) == ""
    length = torch.tensor(1.00001 * allowed)
    assert refusal(sent(size, float(length)), config, sites) == (
        f"class {CLASSES[at]!r}: the sum of {float(torch.tensor(size)):g} embeddings of norm one is "
        f"{float(length):g} long"
    )


@few
@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(-3, 50), max_size=4),
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True),
)
def test_a_site_weighs_its_size_at_least_one_or_the_median(
    known: dict[str, float], sites: list[str]
) -> None:
    memory = {SIZES + site: torch.tensor([size, 0.0]) for site, size in known.items()}
    memory["other"] = torch.tensor([99.0])
    sent = [
        replace(
            reply("s", torch.ones(3), torch.ones(3, D), PLAIN), header=Header("", "", s, "", ())
        )
        for s in sites
    ]
    sizes = sorted(max(1.0, size) for size in known.values())
    usual = sizes[(len(sizes) - 1) // 2] if sizes else 1.0
    wanted = [max(1.0, known[site]) if site in known else usual for site in sites]
    assert _weights(memory, sent) == pytest.approx(wanted)


@few
@given(st.sampled_from([PLAIN, PRIVATE]), st.sampled_from([1.0, 0.2, 7.0]), st.integers(0, 99))
def test_class_sizes_are_such_that_sites_accept_them(config: Run, times: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    counts = times * LARGEST_PRIVATE * torch.rand(2, 3, generator=draw)
    counts[0, 1] = -counts[1, 1] - 5
    sums = torch.randn(2, 3, D, generator=draw)
    training = Training.begin(config, CLASSES, "f", D)
    sent = [reply(f"s{k}", counts[k], sums[k], config) for k in range(2)]
    model = with_classes(training, sent)
    wanted = counts.double().sum(0).clamp_min(0)
    largest = float(wanted.max())
    if config is PRIVATE and largest > 0.9 * LARGEST_PRIVATE:
        wanted = wanted * 0.9 * LARGEST_PRIVATE / largest
    torch.testing.assert_close(model[COUNTS].double(), wanted, rtol=1e-5, atol=1e-3)
    assert model[COUNTS].dtype == torch.float32
    own = config.settings.dpcvae
    torch.testing.assert_close(model[MEANS], class_means(sent, config.mechanism, own))
    others = {name for name in training.model if name not in (COUNTS, MEANS)}
    assert all(model[name] is training.model[name] for name in others)
    moved = moved_by(model, {COUNTS: torch.ones(3).double()})
    torch.testing.assert_close(moved[COUNTS], model[COUNTS] + 1)
    assert all(moved[name] is model[name] for name in model if name != COUNTS)


@pytest.mark.parametrize("synthetic", [6, 30])
def test_a_head_is_trained_on_as_many_embeddings_of_each_class(synthetic: int) -> None:
    config = run(**{"dpcvae.synthetic": synthetic, "seed": 3, "head.min-steps": 4})
    training = Training.begin(config, CLASSES, "f", D)
    means = {MEANS: torch.eye(3, D), COUNTS: torch.tensor([9.0, 1.0, 1.0])}
    model = {**training.model, **means}
    generator = Generator(training.header(), config, model)
    head = head_of(generator, config.settings)
    labels = torch.tensor([c for c in range(3) for _ in range(synthetic)])
    drawn = generator.draw(labels, stream(3, "judge"))
    weight, bias = train_on_features(drawn, labels, 3, config.settings.head, 3)
    torch.testing.assert_close(head.weight, weight)
    torch.testing.assert_close(head.bias, bias)
    assert head.clip == 0.0
    assert head.header == training.header()


def test_without_noise_class_means_are_those_of_all_records_and_decoders_move_by_sizes() -> None:
    training = Training.begin(run(), CLASSES, "f", 4)
    one, other = torch.zeros(3, 4), torch.zeros(3, 4)
    one[0, 0], other[0, 1], other[1, 1] = 3.0, 1.0, 2.0
    sizes = {"one": torch.tensor([3.0, 0, 0]), "other": torch.tensor([1.0, 4, 0])}
    take_in(
        training,
        [reply("one", sizes["one"], one, PLAIN), reply("other", sizes["other"], other, PLAIN)],
    )
    assert training.model[COUNTS].tolist() == [4, 4, 0]
    # A class without records has the mean of all records.
    wanted = torch.tensor([[3 / 4, 1 / 4, 0, 0], [0, 1 / 2, 0, 0], [3 / 8, 3 / 8, 0, 0]])
    assert torch.allclose(training.model[MEANS] / 2, wanted)
    assert (training.round, training.confirmed) == (1, {"one": 1, "other": 1})
    before, shapes = training.model["linear.weight"], expected_shapes(training)
    moved = [
        Parameters(Header("dpcvae", "run", site, "f", CLASSES), 2, tensors, 0)
        for site, by in (("one", 1.0), ("other", 5.0))
        for tensors in [{name: torch.full(shape, by) for name, shape in shapes.items()}]
    ]
    take_in(training, moved)
    # Three records and five records.
    assert torch.allclose(training.model["linear.weight"] - before, torch.tensor(3.5))
    assert training.model["linear.weight"].dtype == torch.float32
