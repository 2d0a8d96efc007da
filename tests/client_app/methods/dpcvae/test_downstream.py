"""A site's use of synthetic embeddings, tested against scikit-learn, scipy and handmade cases."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedsurrogate.client_app.cli.main import app
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.dpcvae.downstream import (
    LabelledEmbeddings,
    fidelity,
    grouped,
    mix,
    out_of_distribution,
    ranks_above,
    score,
)
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.generators import (
    COUNTS,
    MEANS,
    Generator,
    fresh_generator,
    tensors_of,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import pack_generator

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
    assert found.accuracy == pytest.approx(accuracy_score(labels, message))
    with pytest.warns(UserWarning, match="not in y_true"):
        assert found.balanced == pytest.approx(balanced_accuracy_score(labels, message))
    with pytest.raises(DataError, match="no test record"):
        score(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


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


def test_distances_are_zero_between_equals_and_grow_as_sets_part() -> None:
    here = clouds(400).features
    again = fidelity(here, clouds(400, 1).features, 0)
    assert fidelity(here, here, 0)["sinkhorn"] < 0.3 * again["sinkhorn"]
    moved = torch.nn.functional.normalize(here + 0.5 * torch.eye(6)[3], dim=1)
    apart = fidelity(here, moved, 0)
    assert apart["sliced"] > 2 * again["sliced"]
    assert apart["sinkhorn"] > again["sinkhorn"]
    # Two single points: both distances are known.
    one, other = torch.tensor([[1.0, 0, 0, 0]] * 3), torch.tensor([[0, 1.0, 0, 0]] * 3)
    found = fidelity(one, other, 0)
    assert found["sinkhorn"] == pytest.approx(2**0.5, rel=1e-3)
    assert found["sliced"] == pytest.approx((2 / 4) ** 0.5, rel=0.15)


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


def call(line: str) -> Any:
    return CliRunner().invoke(app, ["generator", *shlex.split(line)])


@pytest.mark.slow
def test_from_a_generator_to_a_classifier_one_command_each(
    tmp_path: Path, generator_file: Path
) -> None:
    out, heads, csv = (
        tmp_path / name for name in ("set.safetensors", "heads.safetensors", "s.csv")
    )
    on = f"{out} --node-config \"cache-dir='{tmp_path}/cache' partition-id=0 num-partitions=3\""
    made = call(f"synthesize {generator_file} --per-class 150 --out {out}")
    assert made.exit_code == 0, made.output
    assert "no differential privacy" in made.output
    assert load_file(out)["x"].shape == (1500, 64)
    reported = json.loads(call(f"classify {on} --out {heads} --json").stdout)
    assert reported["scores"]["synthetic"]["accuracy"] > 0.6
    assert reported["scores"]["mixed"]["accuracy"] > 0.8
    kinds = ("local", "synthetic")
    assert set(load_file(heads)) == {
        f"{kind}.{part}" for kind in kinds for part in ("weight", "bias")
    }
    groups = "low=0,1,2,3,4; high=5,6,7,8,9"
    coarse = json.loads(call(f"classify {on} --groups '{groups}' --json").stdout)
    assert coarse["classes"] == ["low", "high"]
    strange = json.loads(call(f"ood {on} --unknown 0 --out {csv} --json").stdout)
    assert strange["area"]["both"] > 0.6
    assert len(csv.read_text().splitlines()) == strange["tested"] + 1
    for shown in (call(f"classify {on}"), call(f"ood {on}")):
        assert shown.exit_code == 0
        assert "test records" in shown.output


def test_a_set_can_have_the_federations_own_mix_of_classes(
    tmp_path: Path, generator_file: Path
) -> None:
    reported = call(f"synthesize {tmp_path} --total 40 --out {tmp_path}/s --json")
    assert json.loads(reported.stdout)["records"] == 40
    assert torch.bincount(load_file(tmp_path / "s")["y"]).tolist() == [2] * 9 + [22]
    assert generator_file.exists()


def test_a_run_is_found_by_its_number_with_the_settings_of_a_container(
    tmp_path: Path, generator_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generators").mkdir()
    generator_file.rename(tmp_path / "generators" / "77-north.safetensors")
    monkeypatch.setenv(
        "FEDSURROGATE_NODE_CONFIG", f"site='north' data='digits' state-dir='{tmp_path}'"
    )
    for run in ("latest", "77"):
        made = call(f"synthesize {run} --per-class 2 --out {tmp_path}/{run}.safetensors")
        assert made.exit_code == 0, made.exception
        assert load_file(tmp_path / f"{run}.safetensors")["x"].shape == (20, 64)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("synthesize {g} --out x", "either --per-class"),
        ("synthesize {g} --per-class 1 --total 2 --out x", "either --per-class"),
        ("synthesize nowhere --per-class 1 --out x", "neither a run folder nor a file"),
        (
            "synthesize latest --per-class 1 --out x --node-config \"state-dir='{d}'\"",
            "it has: none",
        ),
        ("synthesize {d}/cache --per-class 1 --out x", "has no generator.safetensors"),
        ("classify {g} --node-config \"data='digits'\"", "not a synthetic embeddings"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    tmp_path: Path, generator_file: Path, line: str, message: str
) -> None:
    found = call(line.format(g=generator_file, d=tmp_path))
    assert found.exit_code == 1
    assert message in str(found.exception)


def test_embeddings_of_another_backbone_are_refused(tmp_path: Path, generator_file: Path) -> None:
    out = tmp_path / "set.safetensors"
    assert call(f"synthesize {generator_file} --per-class 5 --out {out}").exit_code == 0
    node = f"data='digits' cache-dir='{tmp_path}/cache'"
    found = call(f'classify {out} --node-config "{node}" -c image-size=16')
    assert "give the run's backbone" in str(found.exception)
