"""Closed-form heads: one site must not stop the others, exhaust the coordinator, or spoil the
numbers of all.
"""

import resource
from dataclasses import replace

import pytest
import torch

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.covariances import AnyCovariance, Diagonal, LowRank
from fedsurrogate.common.surrogates.mixtures import Mixtures, MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate
from fedsurrogate.strategies.closed_form.solvers import chosen_with_accuracy, lda
from fedsurrogate.strategies.closed_form.statistics import pooled, pooled_by_class
from fedsurrogate.strategies.fedpft.strategy import FedPFT, learn

QUADRATIC = {"fedpft.covariance": "diag", "head.solver": "qda", "defence": "none"}


def site(name: str, classes, covariance: AnyCovariance, count=20, scale=1.0) -> Surrogate:
    d = covariance.variances_per_dimension().shape[1]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    means = torch.randn(len(classes), d, generator=generator) * scale
    several = len(classes)
    counts, labels, weights = (
        torch.full((several,), count),
        torch.arange(several),
        torch.ones(several),
    )
    table = Mixtures(counts, labels, weights, means, covariance)
    return Surrogate(Header("fedpft", "run", name, "backbone", tuple(classes)), table)


def thin(d: int, variance=1.0) -> LowRank:
    return LowRank(torch.zeros(d, 1), torch.full((d,), variance))


def test_a_class_that_one_site_invents_does_not_stop_quadratic_discriminants():
    honest = [site(str(i), "ab", Diagonal(torch.ones(2, 5))) for i in range(3)]
    hostile = site("3", ["a", "invented"], Diagonal(torch.ones(2, 5)), count=1)
    head = learn([*honest, hostile], parse_run(QUADRATIC), "cpu").model
    assert head.header.classes == ("a", "b")
    assert all(tensor.isfinite().all() for tensor in head.arrays().values())


def test_a_class_of_the_run_that_no_site_has_is_refused_with_its_name():
    honest = [site(str(i), "ab", Diagonal(torch.ones(2, 5))) for i in range(3)]
    with pytest.raises(RunError, match="class 'c' has 0 records"):
        learn(honest, parse_run(QUADRATIC | {"classes": "a,b,c"}), "cpu", ("a", "b", "c"))


def test_diagonal_discriminants_of_many_classes_hold_one_matrix_at_a_time():
    classes = [str(i) for i in range(200)]
    many = site("0", classes, Diagonal(torch.ones(len(classes), 1000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in pooled_by_class([many], classes)) == len(classes)
    # A matrix (d, d) for each class would be 1.6 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


@pytest.mark.slow
def test_a_small_message_with_many_classes_costs_no_table_of_all_pairs_of_classes():
    classes = [str(i) for i in range(5000)]
    statistics = pooled([site("0", "12", thin(2)), site("1", classes, thin(2), count=1)], classes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 0 < chosen_with_accuracy(statistics)[0] <= 1
    # One table of pairs in double precision is 200 MB; there were four.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_the_huge_mean_of_a_class_that_one_site_invents_leaves_the_covariance_of_the_others():
    honest = [site(str(i), "ab", thin(5)) for i in range(3)]
    hostile = site("3", ["z"], thin(5), scale=9e14)
    exact = pooled(honest, ("a", "b", "z")).covariance * 120 + 20 * torch.eye(
        5, dtype=torch.float64
    )
    torch.testing.assert_close(pooled([*honest, hostile], ("a", "b", "z")).covariance, exact / 140)


def test_classes_without_any_variance_still_give_finite_weights_that_separate_them():
    alike = [site(str(i), "ab", thin(5, 1e-36), scale=0) for i in range(2)]
    means = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)) * 1e9
    for each in alike:
        each.mixtures.means.copy_(means)
    head = learn(alike, parse_run({}), "cpu").model
    assert all(tensor.isfinite().all() for tensor in head.arrays().values())
    assert head.predict(means).tolist() == [0, 1]


def test_least_squares_of_one_class_is_refused():
    with pytest.raises(RunError, match="two classes"):
        learn([site("0", "a", thin(5))], parse_run({"head.solver": "ridge"}), "cpu")


def test_a_covariance_that_is_not_finite_ends_in_an_error_and_not_in_a_search_without_end():
    statistics = pooled([site("0", "ab", thin(5))], ("a", "b"))
    statistics.covariance[0, 1] = statistics.covariance[1, 0] = torch.nan
    with pytest.raises(RunError, match="not finite"):
        lda(statistics, 0.1)


@pytest.mark.parametrize("records", [3, 7, 10, 49])
@pytest.mark.parametrize("family", ["gram", "full", "lowrank"])
def test_a_site_whose_records_are_all_alike_is_not_refused(records, family):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(1, 64, generator=generator).relu() + 1000).expand(records, 64).clone()
        one = torch.zeros(records, dtype=torch.int64)
        table = fit(x, one, 1, MixtureSettings(family), torch.Generator())
        sent = Surrogate(Header("fedpft", "run", "a", "backbone", ("x",)), table)
        check_surrogate(
            unpack_surrogate(pack_surrogate(sent)), Expectation("fedpft", "run", family, 1, 16)
        )


def whole(name: str) -> Surrogate:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    table = fit(x, torch.arange(40) % 2, 2, MixtureSettings("gram"), torch.Generator())
    run = parse_run({"fedpft.covariance": "gram"}).digest
    return Surrogate(Header("fedpft", run, name, "backbone", ("a", "b")), table)


@pytest.mark.parametrize("what", ["changed", "vanished"])
def test_a_stored_covariance_that_changed_or_vanished_after_its_check_is_refused_with_the_sites_name(
    what, tmp_path
):
    strategy, file = FedPFT({"fedpft.covariance": "gram"}), tmp_path / "a.pb"
    file.write_bytes(pack_surrogate(whole("a")))
    kept = strategy.kept(strategy.unpack(file.read_bytes()), file.read_bytes)
    assert strategy.learn([kept], ()).model.header.classes == ("a", "b")
    if what == "vanished":
        file.unlink()
    else:
        file.write_bytes(pack_surrogate(whole("b")))
    with pytest.raises(RunError, match="site 'a'"):
        strategy.learn([kept], ())


@pytest.mark.parametrize("solver", ["lda", "sampled"])
def test_figures_can_be_drawn_from_stored_covariances(solver):
    settings = {"fedpft.covariance": "gram", "head.min-steps": 1, "head.epochs": 1}
    strategy, kept = FedPFT(settings | {"head.solver": solver}), []
    for payload in (pack_surrogate(whole(name)) for name in "ab"):
        kept.append(strategy.kept(strategy.unpack(payload), lambda payload=payload: payload))
    source = strategy.learn(kept, ()).source
    assert source is not None
    features, labels = source(0, 20)
    assert features.isfinite().all()
    assert labels.unique().tolist() == [0, 1]


def test_a_fingerprint_with_another_power_than_the_runs_is_refused():
    named = whole("a")
    for fingerprint in ("backbone^0.5", "backbone^2"):
        sent = replace(named, header=replace(named.header, fingerprint=fingerprint))
        with pytest.raises(SurrogateError, match="this run's power is 1"):
            FedPFT({"fedpft.covariance": "gram"}).unpack(pack_surrogate(sent))
