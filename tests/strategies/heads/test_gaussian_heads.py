"""GH-OFL: NB-diag against scikit-learn, the Fisher subspace against scipy, and FisherMix near the
discriminant.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import eigh
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.sums import released_sums
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Head, Quadratic
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies.closed_form.strategy import pooled_sums
from fedsurrogate.strategies.heads.gaussian_heads import GaussianHeads, fisher_mix, fisher_subspace

CLASSES, D = ("a", "b", "c"), 5


def records(count: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features (n, D) of three classes with different spreads, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    mix = torch.eye(D) + torch.ones(D, D).triu(1) / 2
    noise = torch.randn(count, D, generator=generator) @ mix * (1 + labels[:, None] / 2)
    return 3 * torch.eye(3, D)[labels] + noise + 1, labels


def received(
    features: Tensor, labels: Tensor, site: str = "s", head: str = "fishermix"
) -> Parameters:
    run = parse_run({"method": "gh-ofl", "sites": 1, "ghofl.head": head})
    data = LabelledFeatures(features, labels)
    made = Task(
        run, NodeConfig(), site, SiteFeatures(data, data, CLASSES, "f", 0.0, simulated=False)
    )
    return GaussianHeads(run).unpack(released_sums(made).payload)


def of_sites(features: Tensor, labels: Tensor) -> list[Parameters]:
    """Four sites; the first two have no record of class c."""
    parts = torch.where(
        labels == 2, 2 + torch.arange(len(labels)) % 2, torch.arange(len(labels)) % 4
    )
    return [received(features[parts == k], labels[parts == k], f"s{k}") for k in range(4)]


def test_nb_diag_is_naive_bayes_with_variances_of_each_class() -> None:
    features, labels = records()
    strategy = GaussianHeads({"method": "gh-ofl", "ghofl.head": "nb-diag", "max-share": 0.0})
    model = strategy.learn(of_sites(features, labels), CLASSES).model
    assert isinstance(model, Quadratic)
    known = GaussianNB(var_smoothing=0).fit(features.numpy(), labels.numpy())
    unseen, _ = records(400, seed=1)
    assert float(np.mean(model.predict(unseen).numpy() == known.predict(unseen.numpy()))) >= 0.995
    np.testing.assert_allclose(model.whiteners.square().reciprocal(), known.var_, rtol=5e-3)
    np.testing.assert_allclose(model.means, known.theta_, rtol=5e-3, atol=5e-3)


def test_the_fisher_subspace_solves_the_generalised_eigenvalue_problem() -> None:
    features, labels = records()
    found = pooled_sums(of_sites(features, labels), {}, CLASSES)
    within = found.matrix * (len(labels) / (len(labels) - 3))
    directions, added = fisher_subspace(found, within)
    basis = directions.numpy()
    assert not added
    between = found.between().numpy()
    shrunk = 0.95 * within.numpy() + (0.05 * np.trace(within.numpy()) / D + 1e-6) * np.eye(D)
    values, vectors = eigh(between.T @ between, shrunk)
    assert basis.shape == (D, 2)
    np.testing.assert_allclose(basis.T @ shrunk @ basis, np.eye(2), atol=1e-8)
    np.testing.assert_allclose(np.abs(basis), np.abs(vectors[:, [-1, -2]]), rtol=1e-5, atol=1e-8)
    assert values[-3] < 1e-9


def test_fishermix_is_about_as_accurate_as_the_discriminant_on_all_records() -> None:
    features, labels = records()
    strategy = GaussianHeads({"method": "gh-ofl", "max-share": 0.0})
    head = strategy.learn(of_sites(features, labels), CLASSES).model
    assert isinstance(head, Head)
    unseen, truth = records(2000, seed=1)
    known = LinearDiscriminantAnalysis(priors=[1 / 3] * 3).fit(features.numpy(), labels.numpy())
    accuracy = float((head.predict(unseen) == truth).double().mean())
    assert accuracy > known.score(unseen.numpy(), truth.numpy()) - 0.01


def test_fishermix_is_the_same_for_any_partition_but_rounding() -> None:
    features, labels = records()

    def head(sent: list[Parameters]) -> Classifier:
        return fisher_mix(pooled_sums(sent, {}, CLASSES), sent[0].header, seed=0, max_samples=3000)[
            0
        ]

    one, four = head([received(features, labels)]), head(of_sites(features, labels))
    unseen, _ = records(2000, seed=1)
    assert float((one.predict(unseen) == four.predict(unseen)).double().mean()) > 0.99


def test_a_class_that_no_site_has_is_never_predicted() -> None:
    features, labels = records()
    two = labels < 2
    for head in ("fishermix", "nb-diag"):
        strategy = GaussianHeads({"method": "gh-ofl", "ghofl.head": head})
        model = strategy.learn([received(features[two], labels[two])], CLASSES).model
        assert int(model.predict(features).max()) < 2, head


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"variances": torch.full((3, D), -1.0)}, "variances: -1 is outside 0"),
        ({"variances": torch.full((3, D), 100.0)}, "do not sum to the second moments"),
        ({"variances": torch.zeros(3, D)}, "do not sum to the second moments"),
        ({"variances": torch.zeros(3, D + 1)}, "of shape"),
        ({"counts": torch.ones(3)}, "3 records together"),
    ],
)
def test_statistics_that_no_records_have_are_refused(change: dict[str, Tensor], why: str) -> None:
    sent = received(*records())
    payload = pack_parameters(replace(sent, tensors=dict(sent.tensors) | change))
    with pytest.raises(SurrogateError, match=why):
        GaussianHeads({"method": "gh-ofl", "sites": 1}).unpack(payload)
