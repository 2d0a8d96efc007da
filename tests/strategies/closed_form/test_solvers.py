"""Closed-form heads from pooled statistics, against scikit-learn on the same records."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.model_proto import (
    load_model,
    pack_classifier,
    save_model,
    unpack_classifier,
)
from fedsurrogate.strategies.closed_form.solvers import SHRINKAGES, lda, ridge
from fedsurrogate.strategies.closed_form.statistics import Factored, of_mixtures, pooled, sum_of
from fedsurrogate.strategies.fedpft.strategy import learn

CLASSES = tuple("abcd")


def records(n=600, d=20, seed=0):
    """Correlated features (n, d) of four classes, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=generator)
    mix = torch.randn(d, d, generator=generator) / d**0.5 + torch.eye(d)
    means = torch.randn(4, d, generator=generator)
    return means[labels] + torch.randn(n, d, generator=generator) @ mix, labels


def surrogate(x, y, site, family="gram", **settings):
    """The surrogate of one site, with the classes that it has."""
    present = y.unique()
    table = fit(
        x.clone(),
        torch.searchsorted(present, y),
        len(present),
        MixtureSettings(family, **settings),
        torch.Generator(),
    )
    header = Header("fedpft", "run", site, "backbone", tuple(CLASSES[i] for i in present.tolist()))
    return Surrogate(header, table)


def sites(x, y, parts):
    return [surrogate(x[parts == k], y[parts == k], str(k)) for k in range(int(parts.max()) + 1)]


def skewed(y, seed=1):
    """Six sites with unequal classes and sizes; the first has one class only."""
    generator = torch.Generator().manual_seed(seed)
    parts = (torch.rand(len(y), generator=generator) ** 2 * 5).long() + 1
    return torch.where((y == 0) & (torch.rand(len(y), generator=generator) < 0.5), 0, parts)


@pytest.mark.parametrize("family", ["spherical", "diag", "full", "lowrank", "gram"])
@pytest.mark.parametrize("components", [1, 3])
def test_every_family_keeps_the_class_means_and_the_total_variance(family, components):
    if family == "gram" and components > 1:
        pytest.skip("one component a class")
    x, y = records(2000)
    table = pooled([surrogate(x, y, "all", family, components=components, rank=19)], CLASSES)
    exact = pooled([surrogate(x, y, "all")], CLASSES)
    torch.testing.assert_close(table.means, exact.means, rtol=1e-3, atol=1e-3)
    assert float(table.covariance.trace()) == pytest.approx(
        float(exact.covariance.trace()), rel=1e-3 if components == 1 else 0.05
    )


@pytest.mark.parametrize("shrinkage", [0.0, 0.01, 0.3, 1.0])
def test_lda_is_scikit_learns(shrinkage):
    x, y = records()
    ours = lda(pooled(sites(x, y, skewed(y)), CLASSES), shrinkage)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(
        x.double().numpy(), y.numpy()
    )
    np.testing.assert_allclose(
        ours.weight, theirs.coef_, rtol=1e-3, atol=1e-3 * np.abs(theirs.coef_).max()
    )
    np.testing.assert_allclose(
        ours.bias, theirs.intercept_, rtol=1e-3, atol=1e-3 * np.abs(theirs.intercept_).max()
    )
    fresh, _ = records(4000, seed=0)
    same = (fresh.double() @ ours.weight.T + ours.bias).argmax(1).numpy() == theirs.predict(
        fresh.double().numpy()
    )
    assert same.mean() >= 0.999


@pytest.mark.parametrize("shrinkage", [1e-6, 0.1, 1.0])
def test_ridge_is_scikit_learns(shrinkage):
    x, y = records()
    wide = x.double().numpy()
    ours = ridge(pooled(sites(x, y, skewed(y)), CLASSES), shrinkage)
    alpha = shrinkage * np.var(wide, axis=0).mean() * len(wide)
    theirs = Ridge(alpha).fit(wide, np.eye(4)[y.numpy()])
    np.testing.assert_allclose(
        ours.weight, theirs.coef_, rtol=1e-3, atol=1e-3 * np.abs(theirs.coef_).max()
    )
    np.testing.assert_allclose(ours.bias, theirs.intercept_, rtol=1e-3, atol=1e-3)
    fresh = records(4000, seed=0)[0].double()
    same = (fresh @ ours.weight.T + ours.bias).argmax(1).numpy() == theirs.predict(
        fresh.numpy()
    ).argmax(1)
    assert same.mean() >= 0.999


def test_a_head_from_factors_is_that_from_the_whole_matrix():
    x, y = records()
    parts = [surrogate(x[k::2], y[k::2], str(k), "lowrank", rank=4) for k in range(2)]
    few = sum_of(of_mixtures(each, CLASSES) for each in parts)
    assert isinstance(few.covariance, Factored)
    for shrinkage in (None, 0.0, 0.2):
        ours, exact = lda(few, shrinkage), lda(few.whole(), shrinkage)
        assert ours.shrinkage == pytest.approx(exact.shrinkage)
        torch.testing.assert_close(ours.weight, exact.weight, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(ours.bias, exact.bias, rtol=1e-8, atol=1e-8)


def test_the_chosen_ridge_has_the_smallest_cross_validation_error():
    from sklearn.linear_model import RidgeCV

    x, y = records(80)
    wide = x.double().numpy()
    alphas = np.array(SHRINKAGES) * np.var(wide, axis=0).mean() * len(wide)
    ours = ridge(pooled([surrogate(x, y, "all")], CLASSES)).shrinkage
    theirs = RidgeCV(alphas).fit(wide, np.eye(4)[y.numpy()]).alpha_
    # Leave-one-out and generalised cross-validation may differ by one step of the grid.
    assert abs(SHRINKAGES.index(ours) - int(np.abs(alphas - theirs).argmin())) <= 1


def test_solvers_are_those_of_the_settings_and_auto_knows_the_families():
    x, y = records()

    def solver(family, **keys):
        components = keys.pop("components", 1)
        settings = {
            "fedpft.covariance": family,
            "fedpft.components": components,
            "head.min-steps": 1,
            "defence": "none",
        }
        parts = [
            surrogate(x[k::3], y[k::3], str(k), family, components=components) for k in range(3)
        ]
        return learn(parts, parse_run(settings | keys), "cpu").facts["solver"]

    assert [solver(family) for family in ("gram", "lowrank", "diag", "spherical")] == [
        "lda",
        "lda",
        "sampled",
        "sampled",
    ]
    assert solver("lowrank", components=3) == "sampled"
    assert solver("diag", **{"head.solver": "ridge"}) == "ridge"
    assert solver("gram", **{"head.solver": "sampled"}) == "sampled"
    assert solver("gram", **{"head.solver": "naive-bayes"}) == "naive-bayes"


def test_no_variance_and_one_class_still_give_a_head():
    x = torch.ones(20, 3)
    table = surrogate(x, torch.zeros(20, dtype=torch.int64), "flat")
    head = learn([table], parse_run({"fedpft.covariance": "gram"}), "cpu").model
    assert head.predict(x).tolist() == [0] * 20


@pytest.mark.parametrize("family", ["full", "diag"])
def test_qda_is_scikit_learns(family):
    from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
    from sklearn.naive_bayes import GaussianNB

    x, y = records(1200, 6)
    parts = [surrogate(x[k::3], y[k::3], str(k), family) for k in range(3)]
    settings = {
        "fedpft.covariance": family,
        "head.solver": "qda",
        "head.shrinkage": 0.0,
        "defence": "none",
    }
    model = learn(parts, parse_run(settings), "cpu", CLASSES).model
    theirs = (QuadraticDiscriminantAnalysis() if family == "full" else GaussianNB()).fit(
        x.double().numpy(), y.numpy()
    )
    fresh, _ = records(4000, 6, seed=0)
    assert (model.predict(fresh).numpy() == theirs.predict(fresh.double().numpy())).mean() >= 0.998
    again = unpack_classifier(pack_classifier(model))
    assert (again.predict(fresh) == model.predict(fresh)).float().mean() >= 0.998


def test_qda_from_files_is_the_same_and_damaged_ones_are_refused(tmp_path):
    x, y = records(400, 5)
    config = parse_run({"fedpft.covariance": "diag", "head.solver": "qda"})
    model = learn([surrogate(x, y, "0", "diag")], config, "cpu", CLASSES).model
    save_model(model, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").scores(x), model.scores(x))
    save_model(replace(model, whiteners=model.whiteners[:2]), tmp_path / "less.safetensors")
    with pytest.raises(SurrogateError, match="no model of a run"):
        load_model(tmp_path / "less.safetensors")
    with pytest.raises(SurrogateError, match="means of shape"):
        unpack_classifier(pack_classifier(replace(model, means=model.means[:, :2])))


def test_qda_with_too_few_records_names_the_class_and_the_way_out():
    x, y = records(40, 20)
    config = parse_run({"fedpft.covariance": "full", "head.solver": "qda"})
    with pytest.raises(
        RunError, match=r"class 'a' has \d+ records at all sites.* needs 21; use head.solver"
    ):
        learn([surrogate(x, y, "0", "full")], config, "cpu", CLASSES)
