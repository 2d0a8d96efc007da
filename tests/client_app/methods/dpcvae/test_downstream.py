"""A site's use of synthetic embeddings, tested against scikit-learn, scipy and handmade cases."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from fedsurrogate.client_app.cli.main import app
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.dpcvae import downstream as received_generator
from fedsurrogate.client_app.methods.dpcvae.downstream import (
    LabelledEmbeddings,
    fidelity,
    grouped,
    head_on,
    mix,
    out_of_distribution,
    ranks_above,
    score,
    site_records,
    use_generator,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, DataError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import (
    COUNTS,
    MEANS,
    Generator,
    fresh_generator,
    tensors_of,
)
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.model_proto import pack_parameters

HEADER = Header("dpcvae", "run", "s", "f", ("a", "b", "c"))
QUICK = HeadSettings(min_steps=200, epochs=1, learning_rate=0.05)


def clouds(
    count: int, seed: int = 0, spread: float = 0.3, dimension: int = 6
) -> LabelledEmbeddings:
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    x = torch.eye(3, dimension)[labels] + spread * torch.randn(count, dimension, generator=random)
    return LabelledEmbeddings(torch.nn.functional.normalize(x, dim=1), labels)


def fixed(scores: torch.Tensor) -> Head:
    """A head with the same output for every record."""
    return Head(HEADER, torch.zeros(3, 6), scores, clip=0.0)


def test_balanced_accuracy_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import accuracy_score, balanced_accuracy_score

    random = torch.Generator().manual_seed(0)
    probabilities = torch.rand(200, 4, generator=random).softmax(1)
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1, 0.0]), 200, True, generator=random)
    found, message = score(probabilities, labels), probabilities.argmax(1)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, message))
    with pytest.warns(UserWarning, match="not in y_true"):
        assert found["balanced"] == pytest.approx(balanced_accuracy_score(labels, message))
    with pytest.raises(DataError, match="no test record"):
        score(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


def test_a_tie_gives_half_and_a_useless_partner_gets_nothing() -> None:
    own = clouds(150, spread=0.05)
    same = head_on(own, HEADER, QUICK, 0)
    assert mix(own, same, QUICK, 0, 0.2).share == pytest.approx(0.5)
    wrong = Head(HEADER, -same.weight * 50, -same.bias, clip=0.0)
    assert mix(own, wrong, QUICK, 0, 0.2).share > 0.5
    few = own.take(torch.cat([torch.arange(0, 150, 3)[:6], torch.tensor([1])]))
    helped = mix(few, same, QUICK, 1, 0.5)
    assert (
        helped.scores(clouds(90, 5))["mixed"]["accuracy"]
        >= helped.scores(clouds(90, 5))["local"]["accuracy"]
    )


def test_the_own_head_never_sees_the_validation_records() -> None:
    own = clouds(60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(7))
    flipped = own.labels.clone()
    flipped[order[:12]] = (flipped[order[:12]] + 1) % 3
    shared = fixed(torch.tensor([1.0, 0.0, 0.0]))
    one, other = (
        mix(LabelledEmbeddings(own.features, labels), shared, QUICK, 7, 0.2)
        for labels in (own.labels, flipped)
    )
    assert torch.equal(one.local.weight, other.local.weight)


def test_too_few_records_to_split_are_refused() -> None:
    with pytest.raises(DataError, match="cannot be split"):
        mix(clouds(2), fixed(torch.zeros(3)), QUICK, 0, 0.2)


def test_the_out_of_distribution_score_is_the_distance_of_mahalanobis_to_the_nearest_class() -> (
    None
):
    from scipy.spatial.distance import mahalanobis
    from sklearn.covariance import LedoitWolf

    known, asked = clouds(300), clouds(9, 4).features
    means = [known.features[known.labels == k].mean(0).double().numpy() for k in range(3)]
    around = np.stack(
        [
            x - means[k]
            for x, k in zip(known.features.double().numpy(), known.labels.tolist(), strict=True)
        ]
    )
    precision = LedoitWolf(assume_centered=True).fit(around).precision_
    expected = [
        min(mahalanobis(x, m, precision) ** 2 for m in means) for x in asked.double().numpy()
    ]
    assert torch.allclose(out_of_distribution(known, asked), torch.tensor(expected), rtol=1e-4)
    far = torch.zeros(5, 6)
    far[:, 5] = -1
    assert ranks_above(out_of_distribution(known, asked), out_of_distribution(known, far)) == 1.0


@pytest.fixture
def generator_file(tmp_path: Path) -> Path:
    """A generator with the class means of the digits."""
    from fedsurrogate.client_app.datasets.partition import share
    from fedsurrogate.client_app.features.site_features import dataset_features
    from fedsurrogate.common.models.generators import scaled

    run, node = (
        parse_run({"method": "dpcvae", "dpcvae.hidden": 0}),
        NodeConfig(cache_dir=str(tmp_path / "cache")),
    )
    dataset = share(run, node).dataset
    found = dataset_features(dataset, run.settings, node, policy_of(node).cache_mib)
    x, labels = scaled(torch.as_tensor(found.x).float()), dataset.labels
    tensors = tensors_of(fresh_generator(run.settings, run.method.adversarial, 10, 64))
    tensors[MEANS] = torch.stack([x[labels == k].mean(0) for k in range(10)])
    tensors[COUNTS] = torch.tensor([1.0] * 9 + [11.0])
    header = Header("dpcvae", "run", "coordinator", found.fingerprint, tuple(map(str, range(10))))
    (tmp_path / "generator.safetensors").write_bytes(
        pack_generator(Generator(header, run, tensors))
    )
    return tmp_path / "generator.safetensors"


def call(command: str, line: str) -> Any:
    return CliRunner().invoke(app, ["generator", command, *shlex.split(line)])


@pytest.mark.slow
def test_from_a_generator_to_a_classifier_one_command_each(
    tmp_path: Path, generator_file: Path
) -> None:
    out, heads, csv = (
        tmp_path / name for name in ("set.safetensors", "heads.safetensors", "s.csv")
    )
    on = f"{out} --node-config \"cache-dir='{tmp_path}/cache' partition-id=0 num-partitions=3\""
    made = call("synthesize", f"{generator_file} --per-class 150 --out {out}")
    assert made.exit_code == 0, made.output
    assert "no differential privacy" in made.output
    assert load_file(out)["x"].shape == (1500, 64)
    reported = json.loads(call("classify", f"{on} --out {heads} --json").stdout)
    assert reported["scores"]["synthetic"]["accuracy"] > 0.6
    assert reported["scores"]["mixed"]["accuracy"] > 0.8
    kinds = ("local", "synthetic")
    assert set(load_file(heads)) == {
        f"{kind}.{part}" for kind in kinds for part in ("weight", "bias")
    }
    groups = "low=0,1,2,3,4; high=5,6,7,8,9"
    coarse = json.loads(call("classify", f"{on} --groups '{groups}' --json").stdout)
    assert coarse["classes"] == ["low", "high"]
    strange = json.loads(call("ood", f"{on} --unknown 0 --out {csv} --json").stdout)
    assert strange["area"]["both"] > 0.6
    assert len(csv.read_text().splitlines()) == strange["tested"] + 1
    for shown in (call("classify", f"{on}"), call("ood", f"{on}")):
        assert shown.exit_code == 0
        assert "test records" in shown.output


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("synthesize", "{g} --out x", "either --per-class"),
        ("synthesize", "{g} --per-class 1 --total 2 --out x", "either --per-class"),
        ("synthesize", "nowhere --per-class 1 --out x", "neither a run folder nor a file"),
        ("synthesize", "latest --per-class 1 --out x --node-config \"state-dir='{d}'\"", "it has: none"),
        ("synthesize", "{d}/cache --per-class 1 --out x", "has no generator.safetensors"),
        ("classify", "{g} --node-config \"data='digits'\"", "not a synthetic embeddings"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_in_one_line(
    tmp_path: Path, generator_file: Path, command: str, line: str, message: str
) -> None:
    found = call(command, line.format(g=generator_file, d=tmp_path))
    assert found.exit_code == 1
    assert message in str(found.exception)


def test_embeddings_of_another_backbone_are_refused(tmp_path: Path, generator_file: Path) -> None:
    out = tmp_path / "set.safetensors"
    assert call("synthesize", f"{generator_file} --per-class 5 --out {out}").exit_code == 0
    node = f"data='digits' cache-dir='{tmp_path}/cache'"
    found = call("classify", f'{out} --node-config "{node}" -c image-size=16')
    assert "give the run's backbone" in str(found.exception)


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
    charged = [entry.get("flower_run") for entry in entries]
    return job, SimpleNamespace(has_charged=charged.__contains__, policy=policy)


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


def test_coarser_labels_take_every_class_once() -> None:
    names, group = grouped("animal=cat, dog; vehicle=car", ("car", "cat", "dog"))
    assert names == ("animal", "vehicle")
    assert group.tolist() == [1, 0, 0]
    for wrong, message in (
        ("animal=cat", "in no group"),
        ("animal=cat,dog; vehicle=car,cat", "'cat' is unknown or in two groups"),
        ("animal=cat,dog; vehicle=bus", "'bus' is unknown"),
        ("animal", "name=class,class"),
        ("animal=cat,dog; animal=car", "name=class,class"),
    ):
        with pytest.raises(ConfigError, match=message):
            grouped(wrong, ("car", "cat", "dog"))


def test_a_set_can_have_the_federations_own_mix_of_classes(
    tmp_path: Path, generator_file: Path
) -> None:
    reported = call("synthesize", f"{tmp_path} --total 40 --out {tmp_path}/s --json")
    assert json.loads(reported.stdout)["records"] == 40
    assert torch.bincount(load_file(tmp_path / "s")["y"]).tolist() == [2] * 9 + [22]
    assert generator_file.exists()
