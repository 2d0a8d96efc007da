"""Total budgets hold against a coordinator who chooses the next release after seeing the last one.

The attack: after a first run the coordinator requests either one strong Gaussian release or a
sampled one: the one that is worse for the attacked record, given the first result. Each release
alone composes to epsilon 4.0; the choice does not.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.job import MethodOutput
from fedsurrogate.common.errors import BudgetError
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent, gaussian_epsilon
from fedsurrogate.common.run import Run, parse_run
from tests.attacks.privacy.adaptive import adaptive_delta, adaptive_epsilon

DELTA = 1e-5
# Given as a constant, because computing it takes long.
SHORT_NAME, BARE = "0123456789abcdef", parse_run({"classes": "0,1"})
NOISE = {"dpcvae.noise-multiplier": 30.0, "dpcvae.rounds": 3}


def gaussian(noise: float) -> Run:
    """A run of one Gaussian release."""
    return parse_run({"epsilon": gaussian_epsilon(noise, DELTA), "delta": DELTA, "classes": "0,1"})


def sampled(noise: float, rate: float, **more: Any) -> Run:
    """A run with one release on a Poisson sample of the records."""
    flat: dict[str, Any] = {
        "method": "fedlap",
        "epsilon": 4.0,
        "delta": DELTA,
        "classes": "0,1",
    } | more
    return parse_run(
        flat | {"fedlap.rounds": 1, "fedlap.noise-multiplier": noise, "fedlap.sample-rate": rate}
    )


def generative(epsilon: float) -> Run:
    """A run whose first round costs something else than its steps, which sample."""
    own = {"method": "dpcvae", "classes": "0,1", "dpcvae.sample-rate": 0.1}
    return parse_run(own | {"epsilon": epsilon, "delta": DELTA} | NOISE)


def event(run: Run, round: int = 2) -> GaussianEvent:
    """The privacy event that a site composes for one round of a run."""
    assert run.mechanism is not None
    if run.settings.method != "fedpft":
        return run.mechanism.event(round)
    return GaussianEvent(run.mechanism.noise_multiplier)


def gate(folder: Path) -> Gate:
    return Gate(Policy(epsilon_total=4.0, epsilon_per_run=4.0), Ledger(folder, "data"))


def let_out(
    site: Gate, run: Run, flower_run: str, round: int = 1, event_: GaussianEvent | None = None
) -> float:
    release = entry(run, flower_run, MethodOutput(b"release", run.mechanism), round)
    # As many rounds as a test asks for; tests/attacks/coordinator/test_more_than_planned.py counts
    # them.
    return site.let_out(replace(release, events=(event_ or event(run),), rounds=9))


COUNTEREXAMPLES = {
    "a Gaussian run, then a Gaussian or a sampled one": (
        gaussian(2.0),
        gaussian(1.2852),
        sampled(0.4682, 0.01),
        4.16,
    ),
    "a sampled run, then a Gaussian or a sampled one": (
        sampled(1.2, 0.3),
        gaussian(1.2148),
        sampled(0.3322, 0.001),
        4.27,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_a_second_run_chosen_by_what_the_first_one_showed_stays_within_the_total(
    name: str, tmp_path: Path
) -> None:
    first, *choices, true_epsilon = COUNTEREXAMPLES[name]
    # Each history chosen in advance composes to 4.0; the adversary who chooses adaptively gains
    # more.
    assert all(epsilon_spent([event(first), event(second)], DELTA) <= 4.0 for second in choices)
    seconds = [event(second) for second in choices]
    assert adaptive_epsilon(event(first), seconds, DELTA) > true_epsilon
    assert adaptive_delta(event(first), seconds, 4.0) > 1.55 * DELTA
    allowed = []
    for number, second in enumerate(choices):
        site = gate(tmp_path / str(number))
        let_out(site, first, "1")
        with contextlib.suppress(BudgetError):
            let_out(site, second, "2")
            allowed.append(event(second))
    # No choice remains: at most the Gaussian release, and only after a Gaussian one.
    assert allowed == ([seconds[0]] if event(first).sample_rate == 1 else [])


@pytest.mark.slow
def test_within_a_run_the_noise_cannot_be_chosen_by_what_an_earlier_round_showed(
    tmp_path: Path,
) -> None:
    """The same attack on epsilon-per-run: another digest with the number of an active run."""
    first, second = sampled(1.2, 0.3), sampled(0.3322, 0.001)
    site = gate(tmp_path)
    let_out(site, first, "1")
    with pytest.raises(BudgetError, match="the noise of a run is fixed when it begins"):
        let_out(site, second, "1")
    let_out(site, first, "1", 2)
    # Also refused for equal events: the first digest has fixed the plan.
    with pytest.raises(BudgetError, match="fixed when it begins"):
        let_out(site, sampled(1.2, 0.3, seed=1), "1", 3)


def test_two_settings_whose_digests_begin_alike_are_two_plans(tmp_path: Path) -> None:
    """2^32 hashes find two settings that share 16 digits. Rule 1 must not take them for one run."""
    first, second = (
        replace(
            entry(BARE, str(number), MethodOutput(b"release"), number),
            run=f"{SHORT_NAME}{f'{number:x}' * 48}",
            mechanism="dp-sgd",
            epsilon=4.0,
            delta=DELTA,
            events=(event_,),
            sample_rate=event_.sample_rate,
            rounds=1,
        )
        for number, event_ in enumerate((GaussianEvent(1.2, 0.3), GaussianEvent(0.3322, 0.001)), 1)
    )
    site = gate(tmp_path)
    site.let_out(first)
    with pytest.raises(BudgetError, match="epsilon-total"):
        site.let_out(second)
    with pytest.raises(BudgetError, match="the noise of a run is fixed when it begins"):
        site.let_out(replace(second, flower_run="1"))


def test_the_first_round_of_a_generative_run_is_released_only_once_and_only_first(
    tmp_path: Path,
) -> None:
    """The first round has a different cost. A coordinator that could repeat it could choose the
    noise adaptively.
    """
    run = generative(1.0)
    again = gate(tmp_path / "again")
    let_out(again, run, "1", 1, event(run, 1))
    with pytest.raises(BudgetError, match="only once"):
        let_out(again, run, "1", 1, event(run, 1))
    let_out(again, run, "1", 2, event(run, 2))
    late = gate(tmp_path / "late")
    let_out(late, run, "1", 2, event(run, 2))
    with pytest.raises(BudgetError, match="only once"):
        let_out(late, run, "1", 1, event(run, 1))


@pytest.mark.slow
def test_a_whole_run_of_the_total_still_fits_and_is_exact(tmp_path: Path) -> None:
    run = sampled(1.0, 0.3, epsilon=9.0)
    total = epsilon_spent([GaussianEvent(1.0, 0.3, 3)], DELTA)
    site = Gate(Policy(epsilon_total=total, epsilon_per_run=9.0), Ledger(tmp_path, "data"))
    for number in (1, 2, 3):
        spent = let_out(site, run, "1", number)
    assert spent == total
    with pytest.raises(BudgetError):
        let_out(site, run, "1", 4)
    with pytest.raises(BudgetError):
        let_out(site, gaussian(100.0), "2")


def test_a_generative_run_that_samples_does_not_borrow_the_gaussian_rule(tmp_path: Path) -> None:
    """After its Gaussian first round the adversary could choose between a Gaussian run and the
    run's own steps.
    """
    run = generative(2.0)
    first_round = event(run, 1)
    rest = (gaussian_precision(4.0) - first_round.noise_multiplier**-2) ** -0.5 * 1.0001
    site = gate(tmp_path)
    let_out(site, run, "1", 1, first_round)
    with pytest.raises(BudgetError, match="epsilon-total"):
        let_out(site, gaussian(rest), "2")


def gaussian_precision(epsilon: float) -> float:
    from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier

    return gaussian_noise_multiplier(epsilon, DELTA) ** -2
