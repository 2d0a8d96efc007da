"""DP-CVAE and DP-CGAN in secure aggregation: the same generator as with updates in clear, and nothing of a
single site.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.client_app.methods.dpcvae.training import generator_sums
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.generators import COUNTS, MEANS
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.wire.generator_files import read_generator, read_manifest
from tests.client_app.methods.dpcvae.test_training import Site, run
from tests.client_app.model_use.hospitals import CLASSES, rows_of_classes, write_images
from tests.grid import InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.strategies.dpcvae.test_runs import SMALL, ledgers
from tests.strategies.interrupted import wire_of
from tests.totals import unpack_total

FEW: dict[str, Any] = {
    "dpcvae.rounds": 3,
    "dpcvae.local-epochs": 1,
    "dpcvae.synthetic": 30,
    "head.min-steps": 30,
}
PLAIN: dict[str, Any] = SMALL | FEW | {"max-share": 0, "classes": "0,1,2,3,4,5,6,7,8,9"}
SECURE = PLAIN | {
    "secure-aggregation": True,
    "colluding": 0.0,
    "dropouts": 0.2,
    "secure-aggregation-records": 2000,
}
PRIVATE: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dpcvae.first-round": "counts"},
        pytest.param({"method": "dpcgan", "dpcvae.rounds": 2}, marks=pytest.mark.slow),
    ],
    ids=["dpcvae", "counts", "dpcgan"],
)
def test_the_generator_is_that_of_the_same_run_without_secure_aggregation(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    plain, secure = (
        run_federation(tmp_path, sites(4), **each | settings) for each in (PLAIN, SECURE)
    )
    before, after = (
        read_generator(folder / "generator.safetensors").tensors for folder in (plain, secure)
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # Replies in clear have 16 bits.
        close = 0.02 * float(tensor.abs().max()) + 0.02
        assert float((after[name] - tensor).abs().max()) < close, name
    assert after[COUNTS].tolist() == before[COUNTS].round().tolist()
    assert [entry["used"] for entry in metrics_of(secure)["rounds"]] == [4] * len(
        metrics_of(plain)["rounds"]
    )
    assert metrics_of(secure)["parameters"] == metrics_of(plain)["parameters"]


def test_no_message_and_no_file_holds_class_sums_or_an_update_of_one_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    real = masked.protocol.mask

    def keep(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        seen.append(values)
        return real(state, delivered, rules, values)

    monkeypatch.setattr(masked.protocol, "mask", keep)
    grid = InProcessGrid(sites(4), run_id=4730)
    folder = run_federation(tmp_path, grid, report=True, alpha=1000.0, **SECURE)
    assert [len(each) for each in seen[:4] + seen[4:8]] == [10 * 65 + 1] * 4 + [
        1 + metrics_of(folder)["parameters"] + 1
    ] * 4
    total = unpack_total((folder / "sum.pb").read_bytes())[2]
    assert (total == words(sum(seen[-4:]))).all()
    wire = wire_of(grid)
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    for vector in seen:
        at = int(np.flatnonzero(vector)[-40])
        part = words(vector)[at : at + 8].astype("<u4").tobytes()
        assert part not in wire
        assert part not in files
    assert all("counts" not in event for event in events_of(folder))
    assert "secure aggregation" in (folder / "report.html").read_text()


def test_the_ledgers_hold_the_noise_of_every_site_as_without_secure_aggregation(
    tmp_path: Path,
) -> None:
    plain, secure = (
        run_federation(tmp_path / name, sites(4), **each | PRIVATE)
        for name, each in (("a", PLAIN), ("b", SECURE))
    )
    assert metrics_of(secure)["privacy"] == metrics_of(plain)["privacy"]
    events = [
        sorted(
            str([(entry["mechanism"], entry["events"]) for entry in each])
            for each in ledgers(tmp_path / name)
        )
        for name in "ab"
    ]
    assert events[0] == events[1]
    assert [entry["epsilon"] for entry in metrics_of(secure)["rounds"]] == [
        entry["epsilon"] for entry in metrics_of(plain)["rounds"]
    ]
    manifests = [
        read_manifest(folder / "generator.safetensors")["privacy"] for folder in (plain, secure)
    ]
    assert manifests[0] == manifests[1]
    # The noise is new in every run.
    assert metrics_of(secure)["accuracy"]["model"] > 0.3


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"round": 1, "confirmed": 0}, "class sums under the masks of the others' updates"),
        ({"round": 3, "confirmed": 2}, "another noise is charged than that which is added"),
        (
            {"confirmed": 0},
            "a site that has hardly any weight, so that the sum is the update of another",
        ),
    ],
)
def test_a_coordinator_that_tells_one_site_of_another_round_gets_nothing(
    tmp_path: Path, lie: dict[str, int], why: str
) -> None:
    honest = Site(tmp_path, run())
    honest.round()
    job = honest.job()
    assert generator_sums(job).values.keys() == {"records", "update"}
    with pytest.raises(SurrogateError, match="a request for round"):
        generator_sums(replace(job, info={**job.info, **lie}))


@pytest.mark.parametrize("federation", [PLAIN, SECURE], ids=["in clear", "secure aggregation"])
def test_every_hospital_keeps_the_generator(tmp_path: Path, federation: dict[str, Any]) -> None:
    """Each receives the receipts of its own ledger with it, and refuses those of another."""
    rows, nodes = rows_of_classes(), []
    for k in range(4):
        node = {
            "site": f"clinic-{k}",
            "data": "imagefolder",
            "data-dir": str(write_images(tmp_path / str(k), rows[k:160:4])),
        }
        nodes.append(
            node
            | {
                f"{name}-dir": str(tmp_path / f"{name}-{k}")
                for name in ("state", "cache", "check-log")
            }
        )
    settings = federation | {
        "classes": ",".join(CLASSES),
        "image-size": 8,
        "dpcvae.rounds": 2,
        "colluding": 1 / 3,
    }
    folder = run_federation(tmp_path, nodes, **settings)
    own = read_generator(folder / "generator.safetensors").tensors
    for k in range(4):
        (file,) = (tmp_path / f"state-{k}" / "generators").iterdir()
        kept = read_generator(file).tensors
        assert float((kept[MEANS] - own[MEANS]).abs().max()) < 0.02
    assert bool(metrics_of(folder)["accuracy"]["per_site"]) == (federation is PLAIN)
