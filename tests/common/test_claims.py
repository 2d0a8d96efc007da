"""A claim follows from the settings alone, and is what the noise really keeps."""

from dataclasses import replace

import pytest

from common.accounting import GaussianEvent, epsilon_spent
from common.claims import EM_STEPS, check_claim, make_claim
from common.config import RunConfig, parse_run_config
from common.errors import ConfigError, SurrogateError
from common.frames import pack_claim, unpack_claim


def run(**settings: object) -> RunConfig:
    return parse_run_config({"epsilon": 2.0, "delta": 1e-6} | {k.replace("_", "."): v for k, v in settings.items()})  # type: ignore[dict-item]


@pytest.mark.parametrize("family", ["spherical", "diag", "full", "lowrank"])
@pytest.mark.parametrize("components", [1, 3])
def test_the_noise_of_all_statistics_together_keeps_the_budget(family: str, components: int) -> None:
    config = run(fedpft_covariance=family, fedpft_components=components)
    claim = make_claim(config, "record")
    assert claim is not None
    steps = EM_STEPS if components > 1 else 1
    events = [GaussianEvent(sigma / sensitivity, count=steps) for sigma, sensitivity in claim.noise.values()]
    assert epsilon_spent(events, 1e-6) == pytest.approx(2.0)
    assert epsilon_spent([GaussianEvent(claim.noise_multiplier)], 1e-6) == pytest.approx(2.0)


def test_claims_survive_the_wire_and_are_checked_there() -> None:
    config = run()
    claim = make_claim(config, "patient", "0123456789abcdef")
    assert claim is not None
    assert unpack_claim(pack_claim(claim)) == claim  # type: ignore[arg-type]
    check_claim(claim, config, "0123456789abcdef")
    with pytest.raises(SurrogateError, match="centre"):
        check_claim(claim, config)
    with pytest.raises(SurrogateError, match="noise_multiplier"):
        check_claim(replace(claim, noise_multiplier=claim.noise_multiplier * 1.01), config, "0123456789abcdef")
    with pytest.raises(SurrogateError, match="no privacy, this run asks for mechanism 'sums'"):
        check_claim(None, config)
    with pytest.raises(SurrogateError, match="this run asks for mechanism 'none'"):
        check_claim(claim, RunConfig())
    check_claim(None, RunConfig())


def test_theorem_4_1_adds_more_noise_than_it_needs_until_it_adds_too_little() -> None:
    theorem = {"fedpft_privacy": "theorem-4.1", "fedpft_covariance": "diag"}
    claim = make_claim(run(**theorem), "record")
    assert claim is not None
    assert epsilon_spent([GaussianEvent(claim.noise_multiplier)], 1e-6) < 1.2
    with pytest.raises(ConfigError, match=r"keeps only epsilon 69\.\d+ at delta 1e-05"):
        make_claim(run(**theorem, epsilon=60.0, delta=1e-5), "record")
