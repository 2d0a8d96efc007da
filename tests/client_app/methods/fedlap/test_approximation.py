"""A FedLAP site: synthesis, effective radius, private gradients, and its state between rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.dp.record_gradients import (
    PrivateGradient,
    add_clipped,
    clipped_sum,
    norms_of,
    poisson_sample,
    sums_like,
)
from fedsurrogate.client_app.methods.fedlap import approximation
from fedsurrogate.client_app.methods.fedlap.approximation import (
    Matching,
    Search,
    approximate,
    effective_radius,
    synthesise,
)
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.loss_landscape import (
    Descent,
    LandscapeRecords,
    distance,
    gradient,
    total_loss,
    walk,
)
from fedsurrogate.common.models.networks import convnet, parameters_of, split_input
from fedsurrogate.common.models.training_parts import draws
from fedsurrogate.common.privacy.accounting import GaussianEvent
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.common.surrogates.surrogates import Synthetic, check_synthetic
from fedsurrogate.common.wire.model_proto import unpack_synthetic
from fedsurrogate.strategies.base.training import Training

CLASSES = ("a", "b", "c", "d")
PRIVATE: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "classes": ",".join(CLASSES)}


def unchanged() -> Any:
    return draws((), torch.Generator())


def body_and_model() -> tuple[nn.Module, dict[str, Tensor]]:
    module = convnet(64, 4, 4, 0)
    return split_input(module, torch.zeros(1, 64))[0], parameters_of(module)


def real(count: int = 90) -> LandscapeRecords:
    """Records of two of four classes; one class has a bright upper half."""
    labels = torch.arange(count) % 2
    values = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    values[labels == 1, :, :4] += 2
    return LandscapeRecords.evenly(values, labels)


def run(**settings: Any) -> Run:
    small: dict[str, Any] = {
        "fedlap.model": "convnet",
        "fedlap.width": 4,
        "fedlap.images-per-class": 3,
    }
    small |= {"fedlap.image-steps": 12, "fedlap.rounds": 3}
    return parse_run({"method": "fedlap"} | small | settings)


def job(
    folder: Path, config: Run, *, round: int = 1, confirmed: int = 0, units: bool = False
) -> Job:
    values, labels = real().values.flatten(1) * 0.25 + 0.5, real().labels
    records = LabelledFeatures(values, labels, ("p",) * len(labels) if units else None)
    found = SiteFeatures(records, records, CLASSES, "f", 0.0, simulated=False)
    training = Training.begin(config, CLASSES, "f", 64)
    training.round = round - 1
    reported = {"round": round, "lineage": "abc", "confirmed": confirmed}
    return Job(
        config,
        NodeConfig(state_dir=str(folder)),
        "s",
        found,
        payload=training.payload(),
        info=reported,
    )


def sent(made: MethodOutput) -> Synthetic:
    return unpack_synthetic(made.payload)


class Looks:
    """Gradients without noise, as a function of the model's position only."""

    noise = 0.0

    def __init__(self, at: Any) -> None:
        self.at = at

    def __call__(self, parameters: Any, change: Any) -> dict[str, Tensor]:
        return self.at(parameters)


@pytest.mark.slow
def test_synthesis_brings_the_synthetic_gradient_to_the_real_one() -> None:
    """Means of four starts that differ by 1e-6: the steps amplify rounding, which differs between
    processors.
    """
    body, model = body_and_model()
    target = gradient(body, model, real())
    settings = FedLAPSettings(image_steps=300, image_learning_rate=5.0)

    def apart(records: LandscapeRecords) -> float:
        mine = torch.cat([part.flatten() for part in gradient(body, model, records).values()])
        return 1 - float(
            torch.cosine_similarity(
                mine, torch.cat([part.flatten() for part in target.values()]), dim=0
            )
        )

    mismatches, angles = [], []
    for start in range(4):
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(20, 1, 8, 8, generator=generator)
        noise += 1e-6 * start * torch.randn(20, 1, 8, 8, generator=generator)
        begin = LandscapeRecords.evenly(noise, torch.arange(20) % 2)
        matching = Matching(settings, 0.1, 0.1)
        made, story = synthesise(
            body, model, begin, Looks(lambda here: target), matching, unchanged()
        )
        mismatches.append(story.last / story.first)
        angles.append(apart(made) / apart(begin))
        assert torch.equal(made.labels, begin.labels)
    # Single starts, over 27 of them: 0.08 to 0.53, and 0.20 to 0.75.
    assert sum(mismatches) / 4 < 0.5
    assert sum(angles) / 4 < 0.7


def turning_point(
    seed: int,
) -> tuple[nn.Module, dict[str, Tensor], LandscapeRecords, LandscapeRecords]:
    """Random images, nearly all labelled as the first class: a model first learns the class shares,
    then overfits.
    """
    body, model = body_and_model()
    synthetic = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return body, model, LandscapeRecords.evenly(synthetic, torch.tensor([0, 0, 0, 0, 0, 1])), real()


@pytest.mark.parametrize("seed", range(5))
def test_the_radius_equals_a_brute_force_search(seed: int) -> None:
    body, model, synthetic, true = turning_point(seed)
    path = [here for here, _ in walk(body, model, synthetic, Descent(0.1, 40, 50.0), unchanged())]
    losses = [total_loss(body, here, true) for here in path]
    best = losses.index(min(losses))
    # The real loss has its minimum within the walk, and no four rises before it; the synthetic loss
    # keeps falling.
    assert 0 < best < len(path) - 5
    assert all(min(losses[step + 1 : step + 4]) < min(losses[: step + 1]) for step in range(best))
    own = [total_loss(body, here, synthetic) for here in path]
    assert own.index(min(own)) > best + 4
    for every in (1, 3):
        search = Search(40, every)
        server = (body, model, Descent(0.1, 40, 50.0), unchanged())
        found = effective_radius(server, synthetic, true, search, torch.Generator())
        seen = range(every - 1, 40, every)
        nearest = min(seen, key=lambda step: losses[step])
        assert found == pytest.approx(distance(path[nearest], model), rel=1e-5)
    server = (body, model, Descent(0.1, 40, 1e-3), unchanged())
    close = effective_radius(server, synthetic, true, Search(40, 1), torch.Generator())
    assert close <= 1e-3


def test_a_sites_radius_is_that_of_its_real_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole round: the walk follows the synthetic records, and the loss of the real ones stops
    it.
    """
    seen: list[tuple[LandscapeRecords, LandscapeRecords]] = []
    whole = effective_radius

    def spy(*arguments: Any) -> float:
        seen.append(arguments[1:3])
        return whole(*arguments)

    monkeypatch.setattr(approximation, "effective_radius", spy)
    made = sent(approximate(job(tmp_path, run())))
    ((walked, judged),) = seen
    assert torch.allclose(
        walked.values.flatten(1), made.values, atol=2e-3 * float(made.values.abs().max())
    )
    assert torch.allclose(judged.values, real().values, atol=1e-5)
    assert torch.equal(judged.labels, real().labels)


def test_a_loss_that_still_falls_at_the_end_gives_the_trust_radius_or_the_distance() -> None:
    body, model = body_and_model()
    for plain in (False, True):
        descent = Descent(0.01, 10, 7.0, plain)
        *_, (end, _) = walk(body, model, real(), descent, unchanged())
        server = (body, model, descent, unchanged())
        found = effective_radius(server, real(), real(), Search(10, 3), torch.Generator())
        assert found == (pytest.approx(distance(end, model)) if plain else 7.0)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_site_is_shown_how_far_its_gradients_stand_out_and_how_many_were_too_long(
    calls: int,
) -> None:
    body, model = body_and_model()
    change = next(draws((), torch.Generator()))
    looks = PrivateGradient(body, real(4), 2.0, 3.0, 1.0, 50)
    for _ in range(calls):
        looks(model, change)
    total, cut = clipped_sum(body, model, real(4), 2.0, change)
    flat = torch.cat([part.value.flatten() for part in total.values()])
    facts = looks.facts()
    assert facts["signal-to-noise-gradients"] == pytest.approx(
        float(flat.norm()) / (6.0 * len(flat) ** 0.5)
    )
    assert facts["clip-fraction"] == cut / len(real(4).labels)
    # Norms 5, which is the clip, and 10.
    sums = sums_like([torch.zeros(2)], 5.0)
    each = [torch.tensor([[3.0, 4.0], [6.0, 8.0]])]
    assert add_clipped(sums, each, norms_of(each), 5.0) == 1


def test_without_privacy_a_round_repeats_to_the_last_bit_and_spends_nothing(tmp_path: Path) -> None:
    config = run()
    one, other = (approximate(job(tmp_path, config)) for _ in range(2))
    assert one.payload == other.payload
    assert (one.claim, entry(config, "1", one).events) == (None, ())
    answer = sent(one)
    check_synthetic(answer, config.settings.fedlap, CLASSES, 64, 1, private=False)
    assert answer.header.classes == ("a", "b"), "images of the classes the site has"
    assert answer.records == 90
    assert {
        "real-gradients-seconds",
        "image-steps-seconds",
        "radius-search-seconds",
    } == one.answer.keys()


@pytest.mark.slow
def test_a_private_round_names_all_classes_tells_no_numbers_and_has_one_event(
    tmp_path: Path,
) -> None:
    config = run(**PRIVATE, **{"fedlap.loops": 2, "fedlap.batches": 3, "fedlap.sample-rate": 0.3})
    made = approximate(job(tmp_path, config))
    answer, claim = sent(made), config.mechanism
    check_synthetic(answer, config.settings.fedlap, CLASSES, 64, 1, private=True)
    assert claim is not None
    assert answer.header.classes == CLASSES
    assert (answer.records, answer.radius, made.answer) == (
        0,
        config.settings.fedlap.trust_radius,
        {},
    )
    assert entry(config, "1", made).events == (GaussianEvent(claim.noise_multiplier, 0.3, 6),)
    assert claim.epsilon_after(3) <= 4.0 < claim.epsilon_after(4)
    assert claim.epsilon_after(3) > 3.95


def test_images_of_a_round_begin_where_those_of_the_confirmed_round_ended(tmp_path: Path) -> None:
    config = run(**{"fedlap.image-learning-rate": 1e-6})
    first = approximate(job(tmp_path, config))
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is kept before it may leave"
    ((file, content),) = first.keep.items()
    replace_file(file, content)
    for confirmed, same in ((1, True), (0, False)):
        second = sent(
            approximate(
                job(
                    tmp_path,
                    run(**{"fedlap.image-learning-rate": 1e-6, "seed": 1}),
                    confirmed=confirmed,
                )
            )
        )
        assert torch.allclose(second.values, sent(first).values, atol=0.01) is same
    replace_file(file, b"half a fi")
    again = sent(approximate(job(tmp_path, config, confirmed=1)))
    assert torch.allclose(again.values, sent(first).values, atol=0.01), (
        "noise again, of the same seed"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PRIVATE | {"fedlap.mse-weight": 0.1}, "batch-size"),
        ({"fedlap.noise-multiplier": 1.0}, "needs epsilon"),
        ({"fedlap.augment": "flip", "fedlap.model": "mlp"}, "images"),
        ({"fedlap.augment": "blur"}, "no augmentation 'blur'"),
        ({"fedlap.trust-radius": 0.0}, "greater than 0"),
        ({"fedlap.trust-radius": math.nan}, "trust-radius"),
        ({"fedlap.image-learning-rate": math.inf}, "image-learning-rate"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**settings)


@pytest.mark.slow
def test_a_tiny_sample_rate_takes_nobody_more_often_than_accounted_for() -> None:
    drawn = sum(len(poisson_sample(10_000_000, 1e-9)) for _ in range(20))
    assert drawn <= 3, "0.2 are expected; single precision would draw a dozen"
    with pytest.raises(ConfigError, match="sample-rate"):
        run(**PRIVATE, **{"fedlap.sample-rate": 1e-9})


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_a_walk_that_stands_still_gives_the_trust_radius(rate: float) -> None:
    """It has covered no distance at which the loss could turn."""
    body, model = body_and_model()
    server = (body, model, Descent(rate, 30, 2.5), unchanged())
    found = effective_radius(server, real(12), real(), Search(20), torch.Generator())
    assert found == 2.5


@settings(max_examples=60)
@given(
    work=st.floats(0, 1e7),
    synthetic=st.integers(1, 500),
    seen=st.integers(1, 500),
    most=st.integers(1, 400),
)
def test_half_of_seven_hundredths_of_the_work_walks_and_half_evaluates(
    work: float, synthetic: int, seen: int, most: int
) -> None:
    half = 0.07 * work / 2
    steps = max(4, min(most, math.floor(half / (3 * synthetic))))
    evaluations = max(4, math.floor(half / min(seen, 128)))
    found = Search.within(work, synthetic, seen, most)
    assert found == Search(steps, max(1, math.ceil(steps / evaluations)))


def test_a_site_without_records_of_a_class_answers_like_one_that_has_some(tmp_path: Path) -> None:
    config = run(**PRIVATE)
    asked = job(tmp_path, config)
    empty = LabelledFeatures(asked.found.train.features, torch.zeros(90, dtype=torch.int64))
    without = replace(asked, found=replace(asked.found, train=empty, classes=("e", "f", "g", "h")))
    assert sent(approximate(without)).header.classes == CLASSES
    # Requests for one class at a time are refused too.
    single = Training.begin(config, ("c",), "f", 64)
    with pytest.raises(SurrogateError, match="not this run's"):
        approximate(replace(asked, payload=single.payload()))
