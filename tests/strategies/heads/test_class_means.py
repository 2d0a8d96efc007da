"""FedCOF: covariances and head from class means alone, against numpy; and replies that no records
have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.heads.class_means import class_means
from fedsurrogate.client_app.methods.task import SiteLimits, Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies.heads.class_means import ClassMeans, Groups, fedcof_weight
from tests.grid import InProcessGrid, run_federation, sites

CLASSES, D = ("a", "b", "c"), 5


def records(count: int, seed: int = 0, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Correlated features (n, D) of three classes, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    mix = torch.eye(D) + torch.ones(D, D).triu(1) / 2
    return 3 * torch.eye(3, D)[labels] + noise * torch.randn(
        count, D, generator=generator
    ) @ mix + 1, labels


def task(
    features: Tensor,
    labels: Tensor,
    site: str = "s",
    limits: SiteLimits | None = None,
    **settings: object,
) -> Task:
    data = LabelledFeatures(features, labels)
    run = parse_run(
        {"method": "fedcof", "sites": 1}
        | {f"fedcof.{key}": value for key, value in settings.items()}
    )
    return Task(
        run,
        NodeConfig(),
        site,
        SiteFeatures(data, data, CLASSES, "f", 0.0, simulated=False),
        limits or SiteLimits(),
    )


def received(features: Tensor, labels: Tensor, site: str = "s", **settings: object) -> Parameters:
    made = task(features, labels, site, **settings)
    return ClassMeans(made.run).unpack(class_means(made).payload)


def of_sites(count: int, features: Tensor, labels: Tensor, **settings: object) -> list[Parameters]:
    return [
        received(features[k::count], labels[k::count], f"s{k}", **settings) for k in range(count)
    ]


def expected(sent: list[Parameters]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Records, means, and covariance of each class by the paper's formula, from the same class
    means.
    """
    counts, means, covariances = [], [], []
    for c in range(3):
        n = np.concatenate([each.tensors["counts"][c].double().numpy() for each in sent])
        mu = np.concatenate([each.tensors["means"][c].double().numpy() for each in sent])[n > 0]
        n = n[n > 0]
        mean = (n[:, None] * mu).sum(0) / n.sum()
        covariances.append(
            sum(w * np.outer(m - mean, m - mean) for w, m in zip(n, mu, strict=True)) / (len(n) - 1)
        )
        counts.append(n.sum())
        means.append(mean)
    return np.array(counts), np.array(means), np.array(covariances)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_scatter_within_classes_is_the_papers(groups: int) -> None:
    sent = of_sites(7, *records(2000), groups=groups)
    found = Groups.of(sent, [1.0] * 7, CLASSES)
    counts, _, covariances = expected(sent)
    assert len(found.weights) == 7 * 3 * groups
    np.testing.assert_allclose(
        found.within(), ((counts - 1)[:, None, None] * covariances).sum(0), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("shrinkage", [0.1, 1.0, 10.0])
def test_the_head_solves_the_normal_equations_with_these_covariances(shrinkage: float) -> None:
    sent = of_sites(7, *records(900))
    counts, means, covariances = expected(sent)
    total = ((counts - 1)[:, None, None] * covariances).sum(0)
    gamma = shrinkage * np.trace(total) / D / (counts - 1).sum()
    mean = counts @ means / counts.sum()
    gram = total + (counts - 1).sum() * gamma * np.eye(D) + counts.sum() * np.outer(mean, mean)
    weight = np.linalg.solve(gram, (counts[:, None] * means).T).T
    weight /= np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(
        fedcof_weight(Groups.of(sent, [1.0] * 7, CLASSES), shrinkage), weight, rtol=1e-9, atol=1e-9
    )
    head = (
        ClassMeans({"method": "fedcof", "fedcof.shrinkage": shrinkage, "max-share": 0.0})
        .learn(sent, CLASSES)
        .model
    )
    assert isinstance(head, Head)
    np.testing.assert_allclose(head.weight, weight, rtol=1e-5, atol=1e-6)
    assert not head.bias.any()


def test_many_random_groups_come_near_the_covariance_of_the_records() -> None:
    features, labels = records(60_000)
    found = Groups.of(of_sites(10, features, labels, groups=100), [1.0] * 10, CLASSES).within()
    wide = features.double()
    centred = wide - torch.stack([wide[labels == c].mean(0) for c in range(3)])[labels]
    exact = centred.T @ centred
    assert float((found - exact).norm() / exact.norm()) < 0.1


def test_no_mean_is_of_fewer_records_than_the_settings_say() -> None:
    features, labels = records(300)
    counts = received(features, labels, groups=50, **{"samples-per-group": 10}).tensors["counts"]
    assert int((counts > 0).sum(1).min()) >= 5
    assert float(counts[counts > 0].min()) >= 10
    with pytest.raises(Exception, match=r"fedcof\.samples-per-group"):
        task(features, labels, **{"samples-per-group": 1})
    few = received(features[:12], labels[:12], groups=50).tensors["counts"]
    assert (few > 0).sum(1).tolist() == (
        torch.bincount(labels[:12], minlength=3) > 0
    ).long().tolist()


def test_a_sites_own_limit_on_components_is_one_on_groups() -> None:
    made = task(*records(900), limits=SiteLimits(components=2), groups=20)
    sent = ClassMeans(made.run).unpack(class_means(made).payload)
    assert (sent.tensors["counts"] > 0).sum(1).tolist() == [2, 2, 2]


def test_the_groups_are_the_same_in_every_run() -> None:
    features, labels = records(300)
    one, other = task(features, labels, groups=4), task(features, labels, groups=4)
    other = replace(
        other, run=replace(other.run, settings=other.run.settings.model_copy(update={"seed": 5}))
    )
    first, second = (
        ClassMeans(each.run).unpack(class_means(each).payload).tensors for each in (one, other)
    )
    assert torch.equal(first["means"], second["means"])


def test_one_site_has_no_spread_and_still_gives_a_head() -> None:
    features, labels = records(300, noise=0.3)
    head = ClassMeans({"method": "fedcof"}).learn([received(features, labels)], CLASSES).model
    assert isinstance(head, Head)
    assert float((head.predict(features) == labels).double().mean()) > 0.9


def test_a_model_for_fewer_classes_is_that_of_their_means() -> None:
    sent = of_sites(5, *records(900))
    strategy = ClassMeans({"method": "fedcof", "max-share": 0.0})
    fewer = [
        each for each in (strategy.restricted(one, ("a", "c")) for one in sent) if each is not None
    ]
    assert [each.records for each in fewer] == [
        round(float(each.tensors["counts"].sum())) for each in fewer
    ]
    head = strategy.learn(fewer, ("a", "c")).model
    assert isinstance(head, Head)
    assert head.weight.shape == (2, D)
    assert strategy.restricted(sent[0], ("z",)) is None


def spoiled(**change: object) -> bytes:
    sent = received(*records(300))
    records_ = change.pop("records", sent.records)
    return pack_parameters(replace(sent, tensors=dict(sent.tensors) | change, records=records_))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"counts": torch.tensor([[-1.0], [100], [201]])}, "counts: -0.99.* is outside 0"),
        ({"counts": torch.tensor([[0.0], [100], [200]])}, "group without records"),
        ({"counts": torch.ones(3, 1)}, "3 records together, but 300"),
        ({"counts": torch.full((3, 2), 50.0)}, "of shape"),
        ({"means": torch.zeros(3, 2, D)}, "of shape"),
        ({"means": torch.full((3, 1, D), 1e20)}, "beyond"),
        ({"means": torch.zeros(3, 1, 9000)}, "dimension 9000"),
        ({"squares": torch.zeros(15)}, "tensors counts, means, squares"),
    ],
)
def test_class_means_that_no_records_have_are_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(SurrogateError, match=why):
        ClassMeans(task(*records(3)).run).unpack(spoiled(**change))


@pytest.mark.parametrize("claimed", [1, 1000])
def test_one_site_of_ten_with_huge_means_costs_at_most_three_points(claimed: int) -> None:
    features, labels = records(1800)
    sent = of_sites(9, features, labels)
    strategy = ClassMeans({"method": "fedcof"})

    def accuracy(replies: list[Parameters]) -> float:
        model = strategy.learn(replies, CLASSES).model
        assert isinstance(model, Head)
        return float((model.predict(features) == labels).double().mean())

    far = torch.zeros(3, 1, D)
    far[0, 0, 1], far[1, 0, 0], far[2, 0, 0] = 1e6, 1e6, -1e6
    header, counts = replace(sent[0].header, site="hostile"), torch.full((3, 1), float(claimed))
    hostile = replace(
        sent[0], header=header, tensors={"counts": counts, "means": far}, records=3 * claimed
    )
    assert accuracy([*sent, strategy.unpack(pack_parameters(hostile))]) > accuracy(sent) - 0.03


@pytest.mark.parametrize("groups", [1, 2, 5, 8])
def test_the_plan_has_the_bytes_of_the_groups_that_have_records(
    tmp_path: Path, groups: int
) -> None:
    settings = {"method": "fedcof", "fedcof.groups": groups, "sites": 3}
    grid = InProcessGrid(sites(3))
    run_federation(tmp_path, grid, partition="iid", **settings)
    planned = costs(parse_run(settings), 64, 10, 479, 20)[0]
    sent, _ = grid.counted(1, ("train", "evaluate", "query.hello"))
    # Pixels that are always dark are zero in every mean, and zeros are left out.
    assert 0.8 * planned.up < sent < 1.1 * planned.up


def test_another_number_of_groups_than_the_runs_is_refused() -> None:
    sent = Parameters(
        Header(
            "fedcof", parse_run({"method": "fedcof", "fedcof.groups": 3}).digest, "s", "f", ("a",)
        ),
        1,
        {"counts": torch.tensor([[2.0, 0.0]]), "means": torch.zeros(1, 2, 3)},
        2,
    )
    with pytest.raises(SurrogateError, match="2 groups of a class; this run has 3"):
        ClassMeans({"method": "fedcof", "fedcof.groups": 3}).unpack(pack_parameters(sent))
