"""A logistic head in rounds with noise at each site: what a site sends, its checks, and runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import (
    bounded_round,
    in_bins,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import message
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, RunError, SurrogateError
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import (
    LogisticRoundsOfSites,
    absorb_total,
    usual_length,
)
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites

BASE: dict[str, Any] = {
    "head.solver": "logistic",
    "classes": ",".join(map(str, range(10))),
    "epsilon": 8.0,
    "delta": 1e-5,
}
D, K = 64, 3


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), 3),))


def small(**more: Any) -> Run:
    """A run of three classes and features that nothing projects."""
    return parse_run(BASE | {"classes": "a,b,c", "features.projection": ""} | more)


def begun(run: Run) -> Training:
    return Training.begin(run, run.settings.classes, "f" * 16, D)


def reply(run: Run, site: str, round: int, tensors: Tensors) -> Parameters:
    header = Header("fedpft", run.digest, site, "f" * 16, run.settings.classes)
    return Parameters(header, round, tensors, 0, run.mechanism)


def drawn(run: Run, seed: int, records: int, first: bool) -> Tensors:
    """Noisy sums that so many records may have."""
    generator = torch.Generator().manual_seed(seed)
    assert run.mechanism is not None
    rows = torch.nn.functional.normalize(torch.randn(records, D + 1, generator=generator))
    sums = torch.stack([part.sum(0) for part in rows.chunk(3)])
    exact: Tensors = {"sums": sums, "gaps": rows[:, :6].sum(0)}
    if first:
        exact = {"records": torch.tensor([float(records)]), "totals": rows[:, :D].sum(0)}
        exact["code"] = torch.zeros(64).index_fill_(0, torch.tensor([30]), float(records))
    return {
        name: each + run.mechanism.noise[name][0] * torch.randn(each.shape, generator=generator)
        for name, each in exact.items()
    }


class Bounds:
    """The bound on gradients over all rounds, by loops: every site takes part in each."""

    def __init__(self) -> None:
        self.means: list[np.ndarray] = []
        self.used: list[np.ndarray] = []
        self.rounds = 0

    def step(
        self, sums: list[np.ndarray], counts: list[float], shares: list[float], noise: float
    ) -> np.ndarray:
        """The sum of what a step takes of each site."""
        new = [own / count for own, count in zip(sums, counts, strict=True)]
        if not self.rounds:
            self.means, self.used = [0 * each for each in new], [0 * each for each in new]
        self.rounds += 1
        self.means = [
            old + (each - old) / self.rounds for old, each in zip(self.means, new, strict=True)
        ]
        centre = np.median(np.stack(self.means), axis=0)
        away = [float(np.linalg.norm(mean - centre)) for mean in self.means]
        room = [
            noise / count / math.sqrt(self.rounds) * (math.sqrt(centre.size) + 6.0)
            for count in counts
        ]
        usual = sorted(
            math.sqrt(max(0.0, far**2 - own**2)) for far, own in zip(away, room, strict=True)
        )[(len(sums) - 1) // 2]
        total = np.zeros_like(centre)
        for k, mean in enumerate(self.means):
            limit = math.sqrt(room[k] ** 2 + usual**2)
            if len(sums) >= 3 and away[k] > limit:
                mean = centre + limit / away[k] * (mean - centre)
            total += shares[k] * counts[k] * (self.rounds * mean - self.used[k])
            self.used[k] = self.rounds * mean
        return total


@given(st.lists(st.integers(30, 300), min_size=1, max_size=6), st.floats(0, 5), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_rounds_are_those_of_one_sum_over_all_sites(
    sizes: list[int], most: float, seed: int
) -> None:
    run = small(**{"max-share": 0.0 if most < 1 else most})
    strategy = LogisticRoundsOfSites(run)
    training, summed = begun(run), begun(run)
    assert run.mechanism is not None
    shares, counts, bounds = [1.0] * len(sizes), list[float](), Bounds()
    for number in (1, 2, 3):
        sent = [
            reply(run, str(index), number, drawn(run, seed + 7 * index + number, size, number == 1))
            for index, size in enumerate(sizes)
        ]
        for each in sent:
            strategy.check(each, training)
        if number == 1:
            counts = [max(0.0, float(each.tensors["records"])) for each in sent]
            middle = sorted(counts)[(len(counts) - 1) // 2]
            times = most if most >= 1 and len(sizes) >= 3 else math.inf
            shares = [min(1.0, times * max(1.0, middle) / max(each, 1e-9)) for each in counts]
        defended = strategy.defend(training, sent)
        assert defended.kept == sent
        assert defended.capped == {
            str(index): pytest.approx(share) for index, share in enumerate(shares) if share < 1
        }
        strategy.absorb(training, sent)
        tensors = {
            name: sum(
                share * each.tensors[name].double()
                for share, each in zip(shares, sent, strict=True)
            )
            for name in sent[0].tensors
        }
        if number > 1:
            sums = [each.tensors["sums"].double().numpy() for each in sent]
            noise = run.mechanism.noise["sums"][0]
            tensors["sums"] = torch.from_numpy(
                bounds.step(sums, [max(1.0, each) for each in counts], shares, noise)
            )
        length = math.sqrt(sum(share**2 for share in shares))
        sigmas = {name: run.mechanism.noise[name][0] * length for name in tensors}
        total = Total(summed.header(), tensors, sigmas, run.mechanism)  # type: ignore[arg-type]
        absorb_total(total, summed, ["all"])
        for name, tensor in training.model.items():
            torch.testing.assert_close(tensor, summed.model[name], rtol=1e-3, atol=1e-5)
    assert training.round == 3


@pytest.mark.parametrize("name", ["totals", "code", "sums"])
def test_sums_beyond_a_sites_own_records_are_refused(name: str) -> None:
    run = small()
    strategy, training = LogisticRoundsOfSites(run), begun(run)
    first = reply(run, "a", 1, drawn(run, 1, 100, first=True))
    second = reply(run, "b", 1, drawn(run, 2, 1000, first=True))
    later = reply(run, "a", 2, drawn(run, 3, 100, first=False))
    if name != "sums":
        tensors = dict(first.tensors)
        tensors[name] = 300 * torch.nn.functional.normalize(tensors[name], dim=0)
        strategy.check(first, training)
        with pytest.raises(SurrogateError, match="beyond their number"):
            strategy.check(reply(run, "a", 1, tensors), training)
        return
    strategy.absorb(training, [first, second])
    strategy.check(later, training)
    along = later.tensors["sums"] / later.tensors["sums"].norm()
    for site, length, refused in (("a", 90, False), ("a", 300, True), ("b", 300, False)):
        own = reply(run, site, 2, {"sums": length * along})
        if refused:
            with pytest.raises(SurrogateError, match="beyond their number"):
                strategy.check(own, training)
        else:
            strategy.check(own, training)
    # A site that was lost in the first round counts as a usual one.
    strategy.check(reply(run, "c", 2, {"sums": 90 * along}), training)
    with pytest.raises(SurrogateError, match="beyond their number"):
        strategy.check(reply(run, "c", 2, {"sums": 300 * along}), training)
    header = Header("fedpft", run.digest, "a", "f" * 16, ("b", "a", "c"))
    with pytest.raises(SurrogateError, match="other rows"):
        strategy.check(Parameters(header, 2, later.tensors, 0, run.mechanism), training)


def test_sites_that_were_lost_in_the_first_round_are_no_false_numbers() -> None:
    """A step is of the records of its own round, and so is what their gradients may add up to."""
    run = small()
    strategy, training = LogisticRoundsOfSites(run), begun(run)
    first = reply(run, "a", 1, drawn(run, 1, 1000, first=True))
    strategy.absorb(training, [first])
    records = float(first.tensors["records"])
    gradient = torch.zeros(3, D + 1)
    gradient[0, 0], gradient[1, 0] = 600.0, -600.0
    tensors: Tensors = {"sums": gradient, "gaps": torch.zeros(6)}
    for number, names in ((2, "abcd"), (3, "b")):
        later = [reply(run, name, number, tensors) for name in names]
        for each in later:
            strategy.check(each, training)
        strategy.absorb(training, later)
        assert float(training.memory["counted"][0]) == pytest.approx(len(names) * records)
    # The same mean gradient in each of both rounds.
    alone = begun(run)
    strategy.absorb(alone, [first])
    for number in (2, 3):
        strategy.absorb(alone, [reply(run, "a", number, tensors)])
    torch.testing.assert_close(training.model["weight"], alone.model["weight"], rtol=0.2, atol=1e-4)


def asked(run: Run, training: Training, patients: bool = False) -> Job:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(40, D, generator=generator), torch.arange(40) % 3
    units = tuple(str(index // 4) for index in range(40)) if patients else None
    train, test = LabelledFeatures(x, y, units=units), LabelledFeatures(x[:3], y[:3])
    found = SiteFeatures(train, test, ("a", "b", "c"), "f" * 16, 0.0, simulated=False)
    info = {"round": training.round + 1}
    return Job(run, NodeConfig(site="a"), "a", found, payload=training.payload(), info=info)


@pytest.mark.parametrize("patients", [False, True])
def test_a_site_adds_the_noise_of_its_claim_in_each_round(patients: bool) -> None:
    run = small(epsilon=2.0)
    training = begun(run)
    for round, names in ((1, {"records", "totals", "code"}), (2, {"sums", "gaps"})):
        training.round = round - 1
        job = asked(run, training, patients)
        made = bounded_round(job)
        exact, claim = made.bounded, made.claim
        assert claim is not None
        assert {each.name for each in exact} == names
        assert all(each.bound == 1.0 for each in exact)
        errors: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for _ in range(40):
            output = message(job)
            sent = unpack_parameters(output.payload)
            assert sent.claim is not None
            assert output.claim == claim
            assert (sent.claim.name, sent.claim.epsilon, sent.claim.unit) == (
                "sums",
                2.0,
                claim.unit,
            )
            assert sent.claim.noise == claim.noise
            assert sent.records == 0
            for each in exact:
                errors[each.name].append(sent.tensors[each.name].double() - each.value)
        for name, apart in errors.items():
            found, sigma = torch.stack(apart), claim.noise[name][0]
            count = found.numel()
            assert float(found.square().mean().sqrt()) == pytest.approx(
                sigma, rel=5 / math.sqrt(2 * count)
            )
            assert abs(float(found.mean())) < 5 * sigma / math.sqrt(count)
            # Fresh in each.
            assert found.unique(dim=0).shape[0] == len(apart)


def test_the_rounds_cost_the_budget_of_the_run() -> None:
    for epsilon in (1.0, 8.0):
        run = small(epsilon=epsilon)
        assert run.mechanism is not None
        assert run.mechanism.name == "sums"
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for event in run.mechanism.events:
            accountant.compose(GaussianDpEvent(event.noise_multiplier), event.count)
        assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=2e-3)


@given(st.sampled_from([0, 1, 3, 10, 40, 1000]), st.sampled_from([200, 10_000, 10**6]))
def test_more_sites_leave_fewer_dimensions(count: int, records: int) -> None:
    run = parse_run(BASE | {"sites": count, "features.records": records})
    assert run.mechanism is not None
    each = run.mechanism.noise_multiplier
    # The noise of one release with the whole budget, at ten sites unless the number is known.
    whole = each * math.sqrt(0.96 / 3) * math.sqrt(count or 10)
    wanted = round(6.0 * math.sqrt(records / whole))
    assert run.settings.features.dimensions == min(max(1, wanted), 65_536)
    other = parse_run(BASE | {"sites": 2 * (count or 10), "features.records": records})
    assert other.digest != run.digest


def test_a_run_learns_and_a_lost_site_comes_back(tmp_path: Path) -> None:
    calls: list[int] = []

    def second_broken(payload: bytes) -> bytes:
        calls.append(len(payload))
        return b"\x0a\x03abc" if len(calls) == 2 else payload

    grid = InProcessGrid(sites(4), {3: Fault(kind="train", payload=second_broken)})
    folder = run_federation(tmp_path, grid, **BASE)
    made = metrics_of(folder)
    assert [entry["used"] for entry in made["rounds"]] == [4, 3, 4, 4]
    assert made["rounds"][-1]["epsilon"] == pytest.approx(8.0)
    assert made["accuracy"]["model"] > 0.5
    assert made["learning"]["solver"] == "logistic"
    assert "random" in made["learning"]["projection"]
    assert made["privacy"]["mechanism"] == "sums"
    assert "shortened gradients" in made["privacy"]["covers"]
    assert "second moment" not in made["privacy"]["covers"]
    # All sums of a later round, not only the gradients.
    assert "how sure the common head should be" in made["privacy"]["covers"]
    assert [e["site"] for e in events_of(folder) if e["event"] == "rejected"] == ["3"]


def test_a_run_continues_where_it_stopped_and_releases_no_round_twice(tmp_path: Path) -> None:
    whole = run_federation(tmp_path / "whole", sites(4), **BASE)
    calls: list[int] = []

    def dies(payload: bytes) -> bytes:
        calls.append(len(payload))
        return b"" if len(calls) > 8 else payload

    faults = {index: Fault(kind="train", payload=dies) for index in range(4)}
    with pytest.raises(RunError):
        run_federation(tmp_path / "cut", InProcessGrid(sites(4), faults), **BASE)
    (folder,) = (tmp_path / "cut" / "runs").iterdir()
    assert len(metrics_of(folder)["rounds"]) == 2
    # The third round is charged already.
    with pytest.raises(RunError, match="is charged"):
        run_federation(tmp_path / "more", sites(4), **BASE, resume=str(folder))
    assert len(metrics_of(whole)["rounds"]) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epsilon": 0.0, "delta": 0.0}, "is for runs with privacy"),
        ({"fedpft.covariance": "spherical"}, "sends gradients"),
        ({"fedpft.rank": 3}, "remove .*fedpft.rank"),
        ({"fedpft.bits": 8}, "remove .*fedpft.bits"),
        ({"fedpft.privacy": "sums"}, "remove .*fedpft.privacy"),
        ({"fedpft.components": 2}, "sends gradients"),
        ({"fedpft.topology": "chain"}, "sends gradients"),
        ({"features.ranges": "0 to 1"}, "features.ranges"),
        ({"defence": "screen"}, "bounded and not screened"),
        ({"classes": ""}, "needs classes"),
    ],
)
def test_what_it_cannot_do_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run(BASE | changed)


@given(st.floats(0.5, 24.0), st.sampled_from([-1.0, 1.0]))
def test_a_mean_that_no_site_accepts_in_a_model_ends_the_run_with_words(
    octaves: float, sign: float
) -> None:
    run = small()
    training = begun(run)
    length = torch.tensor([[2.0**octaves, 0.0]], dtype=torch.float64)
    sums = {
        "records": torch.tensor([500.0], dtype=torch.float64),
        "totals": 500.0 * sign * torch.eye(1, D, dtype=torch.float64)[0],
        "code": 500.0 * in_bins(length.norm(dim=1))[0].double(),
    }
    total = Total(training.header(), sums, dict.fromkeys(sums, 1e-6), run.mechanism)
    usual = usual_length(sums["code"], 1e-6)
    if usual < 1e4:
        absorb_total(total, training, ["1", "2"])
        largest = float(training.model["centre"].abs().max())
        assert largest == pytest.approx(usual, rel=1e-3)
    else:
        with pytest.raises(RunError, match=r"features.ranges"):
            absorb_total(total, training, ["1", "2"])
