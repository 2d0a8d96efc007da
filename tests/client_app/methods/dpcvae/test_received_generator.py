"""What a site does with a generator at the end of a run: whose it is, what is kept, how it is
judged; and the distances between real and synthetic embeddings.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.dpcvae import downstream as received_generator
from fedsurrogate.client_app.methods.dpcvae.downstream import (
    LabelledEmbeddings,
    fidelity,
    head_on,
    mix,
    site_records,
    use_generator,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import Generator, fresh_generator, tensors_of
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.model_proto import pack_parameters

DIMENSION = 4


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.permutations("abcd").flatmap(lambda p: st.integers(1, 4).map(lambda n: tuple(p[:n]))),
    st.sampled_from(["train", "test"]),
)
def test_records_of_the_runs_classes_have_its_labels_and_norm_one(
    labels: list[int], classes: tuple[str, ...], part: str
) -> None:
    x = torch.randn(len(labels), DIMENSION, generator=torch.Generator().manual_seed(0)) * 7
    chosen = LabelledFeatures(x, torch.tensor(labels))
    other = LabelledFeatures(x[:0], torch.zeros(0, dtype=torch.int64))
    parts = (chosen, other) if part == "train" else (other, chosen)
    site = SiteFeatures(*parts, tuple("abcd"), "f", 0.0, simulated=False)
    rows = [row for row, label in enumerate(labels) if "abcd"[label] in classes]
    if not rows:
        with pytest.raises(DataError, match=f"no {part} record of the classes {classes[0]}"):
            site_records(site, classes, part)
        return
    found = site_records(site, classes, part)
    assert found.labels.tolist() == [classes.index("abcd"[labels[row]]) for row in rows]
    own = x[rows].double().numpy()
    lengths = np.linalg.norm(own, axis=1, keepdims=True)
    np.testing.assert_allclose(found.features, own / lengths, rtol=1e-5)


def received(folder: Path, tested: int, entries: list[Any], room: bool = True) -> tuple[Job, Any]:
    """The request with a generator of two classes, and the gate."""
    run = parse_run({"method": "dpcvae", "dpcvae.latent": 2, "dpcvae.synthetic": 30,
                     "head.epochs": 1, "head.min-steps": 20})  # fmt: skip
    generator = fresh_generator(run.settings, False, 2, DIMENSION)
    header = Header("dpcvae", run.digest, "coordinator", "f", ("a", "b"))
    tensors = tensors_of(generator)
    tensors["means"] = torch.eye(2, DIMENSION) * 2
    draw = torch.Generator().manual_seed(1)

    def part(count: int) -> LabelledFeatures:
        labels = torch.arange(count) % 2
        x = torch.eye(2, DIMENSION)[labels] + 0.4 * torch.randn(count, DIMENSION, generator=draw)
        return LabelledFeatures(x, labels)

    site = SiteFeatures(part(40), part(tested), ("a", "b"), "f", 0.0, simulated=False)
    payload = pack_parameters(Parameters(header, 9, tensors))
    job = Job(
        run, NodeConfig(state_dir=str(folder)), "north", site, flower_run="77", payload=payload
    )
    policy = SimpleNamespace(kept_mib=100.0 if room else 0.0)
    return job, SimpleNamespace(ledger=SimpleNamespace(entries=lambda: entries), policy=policy)


@pytest.mark.parametrize("tested", [0, 1, 21])
def test_a_received_generator_is_kept_and_judged_on_the_sites_test_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tested: int
) -> None:
    def far(real: Tensor, synthetic: Tensor, seed: int) -> dict[str, float]:
        return {"far": float((real - 2 * synthetic).sum()), "seed": seed}

    monkeypatch.setattr(received_generator, "fidelity", far)
    job, gate = received(tmp_path, tested, [{}, {"flower_run": "77"}])
    found = use_generator(job, gate)
    model = job.received_model()
    generator = Generator(model.header, job.run, model.tensors).checked()
    (file,) = (tmp_path / "generators").iterdir()
    assert file.name == "77-north.safetensors"
    assert file.read_bytes() == pack_generator(generator)
    assert (found["tested"], tested == 0) == (tested, found == {"correct": 0, "tested": 0})
    if not tested:
        return
    own, test = (site_records(job.found, ("a", "b"), each) for each in ("train", "test"))
    labels = torch.arange(2).repeat_interleave(30)
    drawn = generator.draw(labels, stream(job.run.settings.seed, "site", "north"))
    head = job.run.settings.head
    shared = head_on(LabelledEmbeddings(drawn, labels), generator.header, head, 0)
    mixture = mix(own, shared, head, 0, job.run.settings.baseline.validation)
    metric_values = mixture.metric_values(test)
    if tested > 1:
        like = generator.draw(test.labels, stream(job.run.settings.seed, "fidelity", "north"))
        metric_values |= far(test.features, like, 0)
    mixed = mixture.share * mixture.local.scores(test.features).softmax(1)
    mixed += (1 - mixture.share) * mixture.shared.scores(test.features).softmax(1)
    right = int((mixed.argmax(1) == test.labels).sum())
    assert found["correct"] == right
    assert metric_values["accuracy-mixed"] == pytest.approx(right / tested)
    assert found == {"correct": right, "tested": tested} | {
        f"downstream.{name}": value for name, value in metric_values.items()
    }


def test_a_generator_of_a_run_without_this_site_is_refused_and_one_without_room_not_kept(
    tmp_path: Path,
) -> None:
    for entries in ([], [{}], [{"flower_run": "78"}]):
        job, gate = received(tmp_path, 0, entries)
        with pytest.raises(SurrogateError, match="run 77, in which this site has taken no part"):
            use_generator(job, gate)
    job, gate = received(tmp_path, 0, [{"flower_run": "78"}, {"flower_run": "77"}], room=False)
    assert use_generator(job, gate) == {"correct": 0, "tested": 0}
    assert not (tmp_path / "generators").exists()
    assert received_generator.generators(job.node) == tmp_path / "generators"


def test_distances_are_of_five_hundred_embeddings_along_two_hundred_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sliced distance by sorting along each direction; the other one's blur is a fortieth of the
    mean squared distance.
    """
    import ot

    draw = torch.Generator().manual_seed(2)
    real, synthetic = torch.randn(520, 3, generator=draw), torch.randn(510, 3, generator=draw) + 1
    given: list[Any] = []

    def divergence(*numbers: Any, **named: Any) -> float:
        given.append((*numbers, named))
        return -1e-9 if len(given) == 1 else 0.49

    monkeypatch.setattr(ot.bregman, "empirical_sinkhorn_divergence", divergence)
    order = torch.Generator().manual_seed(5)
    one = real[torch.randperm(520, generator=order)[:500]].double().numpy()
    other = synthetic[torch.randperm(510, generator=order)[:500]].double().numpy()
    directions = np.random.RandomState(5).normal(0.0, 1.0, [3, 200])
    directions /= np.sqrt((directions**2).sum(0, keepdims=True))
    apart = np.sort(one @ directions, 0) - np.sort(other @ directions, 0)
    found = fidelity(real, synthetic, 5)
    assert found["sliced"] == pytest.approx(np.sqrt((apart**2).mean()), rel=1e-9)
    assert found["sinkhorn"] == 0.0
    assert fidelity(real, synthetic, 5)["sinkhorn"] == pytest.approx(0.7)
    first, second, blur, named = given[0]
    np.testing.assert_array_equal(first, one)
    np.testing.assert_array_equal(second, other)
    squares = ((one[:, None] - other[None]) ** 2).sum(2)
    assert blur == pytest.approx(squares.mean() / 40, rel=1e-9)
    assert named["numIterMax"] == 200
