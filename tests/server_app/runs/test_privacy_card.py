import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.accounting import gaussian_epsilon, gaussian_noise_multiplier
from fedsurrogate.common.privacy.mechanism import NOT_COVERED
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.server_app.report.quality_view import privacy_line
from fedsurrogate.server_app.runs.metrics import Json, mean_noise, privacy_card
from fedsurrogate.strategies.fedpft.strategy import learn
from tests.grid import FAST, metrics_of, run_federation, sites

CLASSES = ("a", "b", "c")
BUDGET = {"epsilon": 4.0, "delta": 1e-5, "classes": ",".join(CLASSES)}
KINDS: dict[str, dict[str, Any]] = {
    "sums": {"fedpft.covariance": "diag"},
    "dp-em": {"fedpft.components": 2, "fedpft.covariance": "spherical"},
    "theorem-4.1": {"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"},
}


def config(mechanism: str = "sums", **settings: Any) -> Run:
    return parse_run(BUDGET | KINDS[mechanism] | settings)


def released(
    config: Run, site: str = "s", present: int = 3, records: int = 3000, units: bool = False
) -> AnySurrogate:
    """The received surrogate of a site with this many records of the first `present` classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(records) % present
    features = torch.randn(records, 8, generator=generator) + 4 * torch.eye(8)[labels]
    patients = [str(index // 2) for index in range(records)] if units else None
    made = make_surrogate(
        SiteData(features, labels, CLASSES, "f" * 64, site, units=patients), config
    )
    return unpack_surrogate(pack_surrogate(made.surrogate))


def card_of(
    config: Run,
    surrogates: Sequence[AnySurrogate],
    head: Head | None = None,
    simulated: bool = False,
) -> Json | None:
    own = config.settings
    return privacy_card(config.plan, own, surrogates, head, simulated)


def card(
    config: Run, *surrogates: AnySurrogate, head: Head | None = None, simulated: bool = False
) -> dict[str, Any]:
    found = card_of(config, surrogates, head, simulated)
    assert found is not None
    assert found == json.loads(json.dumps(found, allow_nan=False))
    return found


def test_without_a_claim_there_is_nothing_to_say() -> None:
    assert card_of(parse_run({}), []) is None
    assert card_of(config(), []) is None
    assert card_of(parse_run({}), [released(parse_run({}))]) is None
    assert privacy_line({"privacy": None}) == privacy_line({}) == "none"


@pytest.mark.parametrize("mechanism", KINDS)
def test_a_card_says_what_each_site_claims(mechanism: str) -> None:
    settings = config(mechanism)
    found = card(settings, released(settings, "x"), released(settings, "y"))
    claim = settings.mechanism
    assert claim is not None
    assert (found["mechanism"], found["epsilon"], found["delta"]) == (mechanism, 4.0, 1e-5)
    assert list(found["per_site"]) == ["x", "y"]
    site = found["per_site"]["x"]
    assert (site["unit"], site["mechanism"], site["epsilon"], site["delta"]) == (
        "record",
        mechanism,
        4.0,
        1e-5,
    )
    assert site["noise_multiplier"] == pytest.approx(claim.noise_multiplier)
    assert set(site["signal_to_noise"]) <= set(site["noise"])
    assert site["signal_to_noise"]["sums"] > 1
    assert set(NOT_COVERED) <= set(found["not_covered"])
    assert (
        privacy_line({"privacy": found}) == f"{mechanism}, epsilon 4, delta 1e-05, for one record"
    )


def test_the_signal_is_estimated_from_noisy_values_as_if_it_were_known() -> None:
    settings = config()
    for records in (300, 30_000):
        site = card(settings, released(settings, records=records))["per_site"]["s"]
        # There are three counts of records / 3.
        wanted = records / 3 / site["noise"]["counts"]
        assert site["signal_to_noise"]["counts"] == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize("mechanism", ["sums", "dp-em"])
def test_noise_is_that_of_the_claim(mechanism: str) -> None:
    settings = config(mechanism)
    claim = settings.mechanism
    assert claim is not None
    noise = card(settings, released(settings))["per_site"]["s"]["noise"]
    assert noise == pytest.approx({name: sigma for name, (sigma, _) in claim.noise.items()})


def test_a_theorem_that_leaves_sizes_in_clear_says_so_and_what_its_noise_is_worth() -> None:
    settings = config("theorem-4.1")
    found = card(settings, released(settings))
    site = found["per_site"]["s"]
    assert found["relation"] == "exchange one record for another of the same class"
    assert any("sent without noise" in item for item in found["not_covered"])
    assert any("class sizes are public" in item for item in found["not_covered"])
    assert site["epsilon_tight"] == pytest.approx(gaussian_epsilon(site["noise_multiplier"], 1e-5))
    assert site["epsilon_tight"] < site["epsilon"]
    # Theorem 4.1: (4 / (n epsilon)) sqrt(5 ln(4 / delta)) on a mean of n records.
    assert site["noise"]["sums"] == pytest.approx(4 / 4.0 * math.sqrt(5 * math.log(4 / 1e-5)))
    assert "epsilon_tight" not in card(config(), released(config()))["per_site"]["s"]


def test_the_relation_names_who_is_protected() -> None:
    settings = config()
    record, patient = released(settings, "r"), released(settings, "p", units=True)
    assert card(settings, record)["relation"] == "add or remove one record"
    assert card(settings, patient)["relation"] == "add or remove one patient"
    both = card(settings, record, patient)
    assert "one record, or one patient" in both["relation"]
    assert privacy_line({"privacy": both}).endswith("for one patient or record")
    # A guarantee for a record is weaker for a patient with several records; this matters only if
    # records are protected.
    several = [
        any("several records" in item for item in card(settings, s)["not_covered"])
        for s in (record, patient)
    ]
    assert several == [True, False]


@pytest.mark.parametrize("mechanism", ["sums", "dp-em"])
def test_classes_the_noise_has_swallowed_are_named(mechanism: str) -> None:
    settings = config(mechanism, epsilon=8.0)
    lost: list[str] = []
    # At times an absent class stands out by chance.
    while not lost:
        surrogates = [released(settings, present=2, records=20_000)]
        head = learn(surrogates, settings, "cpu", settings.settings.classes).model
        lost = card(settings, *surrogates, head=head)["dropped_classes"]
    assert lost == ["c"]
    assert card(settings, *surrogates)["dropped_classes"] == []


def test_a_simulation_says_that_its_own_numbers_are_exact() -> None:
    settings = config()
    assert any(
        "simulation" in item
        for item in card(settings, released(settings), simulated=True)["not_covered"]
    )
    assert not any(
        "simulation" in item for item in card(settings, released(settings))["not_covered"]
    )


def test_noise_on_a_mean_is_its_length_beside_features_of_norm_one() -> None:
    claim = config(**{"fedpft.covariance": "spherical"}).mechanism
    assert claim is not None
    sigma = gaussian_noise_multiplier(4.0, 1e-5) / math.sqrt(0.93)
    assert mean_noise(claim, 64, 100) == pytest.approx(sigma * 8 / 100)


@pytest.mark.parametrize("mechanism", KINDS)
def test_a_private_run_leaves_its_card_and_shows_it(tmp_path: Path, mechanism: str) -> None:
    digits = ",".join(map(str, range(10)))
    settings = BUDGET | KINDS[mechanism] | FAST | {"classes": digits}
    folder = run_federation(tmp_path, sites(3), report=True, **settings)
    found = metrics_of(folder)["privacy"]
    assert found["per_site"].keys() == {"0", "1", "2"}
    assert any("simulation" in item for item in found["not_covered"])
    page = (folder / "report.html").read_text()
    for text in (
        *found["not_covered"],
        found["relation"],
        "1 in 100,000",
        "54.6",
        "98.2%",
        "Signal/noise",
    ):
        assert text.replace("'", "&#39;") in page
    assert "Nothing protects" not in page
    assert ("(noisy)" in page) == (mechanism != "theorem-4.1")
