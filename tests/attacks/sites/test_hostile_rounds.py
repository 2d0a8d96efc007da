"""One hostile site of several in methods with rounds and with heads: the model stays, the run ends in
order, and a screen names the site.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate, Synthetic
from fedsurrogate.common.wire.model_proto import (
    pack_parameters,
    pack_relay,
    pack_synthetic,
    unpack_parameters,
    unpack_relay,
    unpack_synthetic,
)
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites

ALIKE: dict[str, Any] = {"alpha": 100.0, "head.min-steps": 100, "head.epochs": 2}
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "classes": "0,1,2,3,4,5,6,7,8,9"}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"fedavg.rounds": 3},
    "fedprox": {"fedavg.rounds": 3},
    "fedyogi": {"fedavg.rounds": 3},
    "scaffold": {"fedavg.rounds": 3},
    "average": {},
    "dpcvae": {"dpcvae.rounds": 3, "dpcvae.local-epochs": 2},
}


def times(factor: float, of: Callable[[str], bool] = lambda name: True) -> Fault:
    """A site that multiplies its update."""

    def change(update: Parameters) -> Parameters:
        tensors = {
            name: factor * tensor if of(name) else tensor for name, tensor in update.tensors.items()
        }
        # Class sums of the first round must stay plausible.
        first = "counts" in update.tensors
        return update if first else replace(update, tensors=tensors)

    return Fault(payload=lambda payload: pack_parameters(change(unpack_parameters(payload))))


def negative(payload: bytes) -> bytes:
    """The images of a site with the opposite sign."""
    sent: Synthetic = unpack_synthetic(payload)
    return pack_synthetic(replace(sent, values=-sent.values))


def accuracy_and_suspects(folder: Path) -> tuple[float, set[str]]:
    named = {event["site"] for event in events_of(folder) if event["event"] == "suspect"}
    return float(metrics_of(folder)["accuracy"]["model"]), named


@pytest.mark.parametrize("method", METHODS)
def test_a_scaled_update_does_not_destroy_the_model_and_its_site_is_named(
    method: str, tmp_path: Path
) -> None:
    settings = {"method": method, "defence": "screen"} | ALIKE | METHODS[method]
    usual, nobody = accuracy_and_suspects(run_federation(tmp_path / "usual", sites(5), **settings))
    assert nobody == set()
    grid = InProcessGrid(sites(5), {2: times(-10)})
    accuracy, named = accuracy_and_suspects(run_federation(tmp_path / "lie", grid, **settings))
    assert named == {"2"}
    assert accuracy > usual - 0.05


@pytest.mark.parametrize("method", ["fedavg", "fedyogi", "scaffold", "average"])
def test_with_three_sites_nobody_is_named_but_the_model_stays(method: str, tmp_path: Path) -> None:
    settings = {"method": method} | ALIKE | METHODS[method]
    usual, _ = accuracy_and_suspects(run_federation(tmp_path / "usual", sites(3), **settings))
    grid = InProcessGrid(sites(3), {1: times(-10)})
    folder = run_federation(tmp_path / "lie", grid, **settings)
    accuracy, named = accuracy_and_suspects(folder)
    assert named == set()
    assert accuracy > usual - 0.15
    # What was cut is on record.
    bounded = [event["kept"] for event in events_of(folder) if event["event"] == "bounded"]
    assert bounded
    assert all(kept["1"] < 0.2 for kept in bounded)


@pytest.mark.parametrize(
    ("method", "lie", "count"),
    [
        ("scaffold", times(1e14, lambda name: name.startswith("control.")), 2),
        ("scaffold", times(1e14, lambda name: name.startswith("control.")), 4),
        ("fedavg", times(1e14), 2),
        ("fedavg", times(1e14), 3),
        pytest.param("dp-fedavg", times(-1e4), 3, marks=pytest.mark.slow),
    ],
)
def test_no_site_can_end_a_run_by_breaking_the_model(
    method: str, lie: Fault, count: int, tmp_path: Path
) -> None:
    settings = {"method": method, "fedavg.rounds": 4} | ALIKE
    settings |= (
        PRIVATE | {"fedavg.local-epochs": 1, "fedavg.sample-rate": 1.0}
        if method == "dp-fedavg"
        else {}
    )
    folder = run_federation(tmp_path, InProcessGrid(sites(count), {1: lie}), **settings)
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert len(metrics["rounds"]) == 4


def test_images_of_the_opposite_sign_are_found(tmp_path: Path) -> None:
    settings = ALIKE | {"method": "fedlap", "fedlap.rounds": 3, "fedlap.model": "linear"}
    settings |= {"fedlap.image-steps": 20, "fedlap.images-per-class": 2, "defence": "screen"}
    usual, nobody = accuracy_and_suspects(run_federation(tmp_path / "usual", sites(5), **settings))
    assert nobody == set()
    grid = InProcessGrid(sites(5), {2: Fault(payload=negative)})
    accuracy, named = accuracy_and_suspects(run_federation(tmp_path / "lie", grid, **settings))
    assert named == {"2"}
    assert accuracy > usual - 0.05


def rolled(payload: bytes) -> bytes:
    """A relay whose last site has the sums of each class under the next one's name."""
    *before, last = unpack_relay(payload)
    sent = unpack_surrogate(last)
    assert isinstance(sent, SumsSurrogate)
    sums = replace(sent.sums, counts=sent.sums.counts.roll(1), sums=sent.sums.sums.roll(1, 0))
    return pack_relay([*before, pack_surrogate(replace(sent, sums=sums), 16)])


def test_in_a_private_chain_a_site_with_other_labels_does_not_decide(tmp_path: Path) -> None:
    settings = ALIKE | PRIVATE | {"fedpft.topology": "chain", "fedpft.covariance": "spherical"}
    settings |= {"fedpft.order": "0,1,2,3,4", "seed": 1}
    grid = InProcessGrid(sites(5), {2: Fault(payload=rolled)})
    folder = run_federation(tmp_path, grid, **settings)
    assert accuracy_and_suspects(folder)[0] > 0.7
    effects = metrics_of(folder)["card"]["effects"]
    assert max(effects, key=lambda site: effects[site]["harm"]) == "2"


@pytest.mark.parametrize(
    ("flat", "count", "warned"),
    [
        ({"method": "fedavg"}, 3, ("3 sites", "updates and heads")),
        ({"method": "fedlap"}, 2, ("2 sites", "synthetic images")),
        ({"method": "fedlap"}, 4, ("synthetic images",)),
        ({"method": "fedpft"}, 3, ("3 sites",)),
        ({"method": "fedpft"}, 4, ()),
        ({"method": "fedavg"}, 4, ("updates and heads",)),
        ({"method": "scaffold"}, 4, ("updates and heads",)),
        ({"method": "average"}, 4, ("updates and heads",)),
        ({"method": "fedavg", "defence": "none"}, 3, ("3 sites", "updates and heads")),
        ({"method": "kd"}, 10, ("in a chain",)),
        ({"fedpft.topology": "chain"}, 10, ("in a chain",)),
        (
            {"method": "fedavg", "secure-aggregation": True, "classes": "a,b"},
            10,
            ("secure aggregation",),
        ),
    ],
)
def test_a_run_names_what_it_cannot_find_before_it_starts(
    flat: dict[str, Any], count: int, warned: tuple[str, ...]
) -> None:
    found = parse_run(flat).gaps(count)
    assert found == parse_run(flat | {"sites": count}).gaps()
    assert len(found) == len(warned)
    assert all(text.startswith(own) for text, own in zip(found, warned, strict=True))


def test_the_warning_is_the_first_that_a_run_records(tmp_path: Path) -> None:
    settings = {"method": "average"} | ALIKE
    events = events_of(run_federation(tmp_path, sites(3), **settings))
    kinds = [event["event"] for event in events]
    assert kinds.index("note") < kinds.index("replied")
