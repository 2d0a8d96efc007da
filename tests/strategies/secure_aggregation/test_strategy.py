"""Secure aggregation over the grid: exact totals, nothing of a single site in any message or file, lost
sites, and refusals.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import noise_of_sum, spare_of
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.wire.model_proto import load_model, pack_classifier, unpack_classifier
from fedsurrogate.strategies.fedpft import strategy
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.strategies.interrupted import wire_of
from tests.totals import unpack_total

CLASSES = ",".join(map(str, range(10)))
GRAM: dict[str, Any] = {"fedpft.covariance": "gram", "classes": CLASSES, "head.max-samples": 20_000}
SECURE = GRAM | {"secure-aggregation": True, "colluding": 0.0, "dropouts": 0.2}
PRIVATE = SECURE | {"epsilon": 8.0, "delta": 1e-5}
Vectors = dict[str, np.ndarray]


def total_in(folder: Path) -> tuple[tuple[str, ...], np.ndarray]:
    _, names, numbers, _ = unpack_total((folder / "sum.pb").read_bytes())
    return names, numbers


def lost(names: tuple[str, ...], kind: str, **fault: Any) -> dict[int, Fault]:
    return {int(name): Fault(offline=not fault, kind=kind, **fault) for name in names}


@pytest.mark.parametrize("settings", [SECURE, PRIVATE], ids=["exact", "private"])
def test_the_total_is_exact_and_nothing_holds_one_sites_part(
    tmp_path: Path, vectors: Vectors, settings: dict[str, Any]
) -> None:
    grid = InProcessGrid(sites(5), run_id=4711)
    # A class that one site alone has is in the sum as that site has it; here all sites have all
    # classes.
    folder = run_federation(tmp_path, grid, alpha=1000.0, **settings)
    names, numbers = total_in(folder)
    assert names == ("0", "1", "2", "3", "4")
    assert (numbers == words(sum(vectors.values()))).all()
    assert metrics_of(folder)["accuracy"]["model"] > 0.9
    wire = wire_of(grid)
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    secret = [words(vector) for vector in vectors.values()]
    others = [numbers - each for each in secret]
    for numbers_of_one in (*secret, *others):
        # Eight entries in a row, where they are not zeros.
        at = int(np.flatnonzero(numbers_of_one)[20])
        some = numbers_of_one[at : at + 8].astype("<u4").tobytes()
        assert some not in wire
        assert some not in files


# Rounds of training have a test of their own, test_rounds.py, and generators another,
# tests/strategies/dpcvae/test_summed.py.
@pytest.mark.parametrize(
    "method",
    [
        name
        for name, spec in METHODS.items()
        if spec.summable and not spec.needs_budget and spec.usual.kind != "rounds"
    ],
)
def test_the_model_is_that_of_the_same_run_without_secure_aggregation(
    tmp_path: Path, method: str
) -> None:
    plain, secure = (
        metrics_of(run_federation(tmp_path, sites(4), method=method, **settings))["accuracy"][
            "model"
        ]
        # Secure aggregation has no defence, which may limit what a site weighs.
        for settings in (GRAM | {"defence": "none"}, SECURE)
    )
    assert abs(plain - secure) < 0.01


def test_one_distributed_noise_is_what_is_claimed_and_less_than_the_noise_of_every_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectors: Vectors
) -> None:
    """The noise in the total that the coordinator opens: its variance by statistic, and no bias."""
    budget, added = {"epsilon": 1.0, "delta": 1e-5}, []
    real = masked.protocol.noise_of_site

    def keep(*given: Any) -> Any:
        found = real(*given)
        added.append(np.concatenate([found[name] for name in ("counts", "sums", "squares")]))
        return found

    monkeypatch.setattr(masked.protocol, "noise_of_site", keep)
    folder = run_federation(tmp_path, sites(8), **SECURE, **budget)
    names, numbers = total_in(folder)
    assert len(names) == len(added) == 8
    exact = words(sum(vectors[name] for name in names) - sum(added))
    found = (numbers - exact).astype(np.int32).astype(float)
    run = parse_run(SECURE | budget)
    alone, claim = parse_run(GRAM | budget).mechanism, run.mechanism
    assert claim is not None
    assert alone is not None
    # Of 64 pixels, a joint sum leaves out the mean.
    shapes, steps = shapes_of(run.plan, 10, 63), numbers_of(run.plan, run.settings, 8)
    # The file holds what members sent, before the parts for lost sites are taken out.
    sigmas = noise_of_sum(claim, steps, shapes, rules_of(run.settings, 8), 8)
    at = 0
    for name in ("counts", "sums", "squares"):
        size = math.prod(shapes[name])
        part = found[at : at + size] * steps[name].step / sigmas[name]
        at += size
        assert 1e-6 < stats.chi2.cdf(float((part**2).sum()), size) < 1 - 1e-6, name
        assert abs(part.mean()) * math.sqrt(size) < 5, name
        assert sigmas[name] < 0.7 * math.sqrt(8) * alone.noise[name][0], name
    assert at == len(found)


@pytest.mark.parametrize(
    ("kind", "summed", "reason"),
    [
        ("query.sum_shares", "0123", "lost after its keys"),
        ("train", "0123", "lost after its shares"),
        ("query.sum_list", "01234", "in the sum"),
        ("query.sum_open", "01234", "in the sum"),
    ],
)
def test_a_lost_site_costs_at_most_its_own_part(
    tmp_path: Path, vectors: Vectors, kind: str, summed: str, reason: str
) -> None:
    grid = InProcessGrid(sites(5), lost(("4",), kind))
    folder = run_federation(tmp_path, grid, deadline=1.0, **SECURE)
    names, numbers = total_in(folder)
    assert "".join(names) == summed
    assert (numbers == words(sum(vectors[name] for name in names))).all()
    (event,) = (e for e in events_of(folder) if e["event"] == "dropped")
    assert event["site"] == "4"
    assert reason in event["reason"]
    assert metrics_of(folder)["sites"]["used"] == len(summed)


@pytest.mark.parametrize("lost_one", [False, True])
def test_noise_for_lost_sites_is_taken_out_when_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_one: bool
) -> None:
    """Without any other noise, the total is then exact."""
    totals: list[Total] = []
    monkeypatch.setattr(masked.protocol, "noise_of_site", spare_of)
    learn = strategy.fedpft_head_from_sum
    monkeypatch.setattr(
        strategy,
        "fedpft_head_from_sum",
        lambda total, config: (totals.append(total), learn(total, config))[1],
    )
    grid = InProcessGrid(sites(5), lost(("4",), "train") if lost_one else {})
    folder = run_federation(tmp_path, grid, deadline=1.0, report=False, **PRIVATE)
    (total,) = totals
    counts = total.tensors["counts"]
    assert (float((counts - counts.round()).abs().max()) < 1e-3) == (not lost_one)
    claim = total.claim
    assert claim is not None
    # Four sites' noise is enough when one is lost; five sites' lasting noise is as much.
    expected = claim.noise["counts"][0]
    assert total.sigmas["counts"] == pytest.approx(expected, rel=1e-3)
    assert metrics_of(folder)["learning"]["noise-counts"] == total.sigmas["counts"]


def test_sites_lost_at_different_steps(tmp_path: Path, vectors: Vectors) -> None:
    """One after its keys, another after its masked vector: the sum is of four, and three complete
    it.
    """
    grid = InProcessGrid(
        sites(5), lost(("1",), "query.sum_shares") | lost(("3",), "query.sum_list")
    )
    folder = run_federation(tmp_path, grid, deadline=1.0, **SECURE)
    names, numbers = total_in(folder)
    assert names == ("0", "2", "3", "4")
    assert (numbers == words(sum(vectors[name] for name in names))).all()


@pytest.mark.parametrize("kind", ["query.sum_shares", "train", "query.sum_list", "query.sum_open"])
def test_too_few_sites_end_the_run_and_are_named(tmp_path: Path, kind: str) -> None:
    grid = InProcessGrid(sites(5), lost(("1", "2", "3"), kind))
    with pytest.raises(RunError, match="nothing was revealed; 1: lost") as failure:
        run_federation(tmp_path, grid, deadline=0.5, **SECURE)
    assert "3: lost" in str(failure.value)
    assert not list(tmp_path.glob("runs/*/sum.pb"))


def test_a_quorum_that_is_missed_after_the_shares_ends_the_run_before_any_charge(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(sites(5), lost(("4",), "query.sum_shares"))
    with pytest.raises(RunError, match="quorum missed: 4 of 5 sites have shared their secrets"):
        run_federation(tmp_path, grid, deadline=0.5, quorum=1.0, **PRIVATE)
    assert not grid.asked("train")


def test_a_site_that_answers_nonsense_is_named(tmp_path: Path) -> None:
    for kind in ("query.sum_shares", "train", "query.sum_list", "query.sum_open"):
        grid = InProcessGrid(sites(5), lost(("2",), kind, payload=lambda payload: b"\x0a\x03abc"))
        folder = run_federation(tmp_path / kind, grid, **SECURE)
        (event,) = (e for e in events_of(folder) if e["event"] == "rejected")
        assert event["site"] == "2"


def test_a_forged_share_is_noticed_by_the_coordinator(tmp_path: Path, vectors: Vectors) -> None:
    from fedsurrogate.common.wire.surrogate_proto import pack_revealed, unpack_revealed

    def forge(payload: bytes) -> bytes:
        found = unpack_revealed(payload)
        found["blind"]["0"] = bytes(16)
        return pack_revealed(found)

    grid = InProcessGrid(sites(5), lost(("2",), "query.sum_open", payload=forge))
    folder = run_federation(tmp_path, grid, **SECURE)
    (event,) = (e for e in events_of(folder) if e["event"] == "rejected")
    assert "forged share of site '0'" in event["reason"]
    assert (total_in(folder)[1] == words(sum(vectors.values()))).all()


def test_a_flipped_bit_is_noise_in_one_number(tmp_path: Path, vectors: Vectors) -> None:
    flipped = 30

    def flip(payload: bytes) -> bytes:
        message = pb.MaskedSum.FromString(payload)
        numbers = bytearray(message.numbers)
        numbers[4 * flipped + 1] ^= 1
        message.numbers = bytes(numbers)
        return message.SerializeToString(deterministic=True)

    folder = run_federation(
        tmp_path, InProcessGrid(sites(5), lost(("2",), "train", payload=flip)), **SECURE
    )
    off = (total_in(folder)[1] - words(sum(vectors.values()))).astype(np.int32)
    assert abs(off[flipped]) == 2**8
    assert np.flatnonzero(off).tolist() == [flipped]


def test_the_run_says_who_could_see_what(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(5), report=True, **PRIVATE)
    metrics = metrics_of(folder)
    assert metrics["privacy"]["mechanism"] == "secure-aggregation"
    assert metrics["learning"]["keys"] == "sent by the coordinator"
    assert metrics["learning"]["local-epsilon"] > 8.0
    page = (folder / "report.html").read_text()
    assert "secure aggregation" in page
    assert "The keys were sent by the coordinator" in page


def test_a_modulus_too_small_for_the_sites_ends_the_run_before_any_share(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(5))
    with pytest.raises(RunError, match="secure-aggregation-records = 1000000000"):
        run_federation(tmp_path, grid, **SECURE, **{"secure-aggregation-records": 10**9})
    assert not grid.asked("query.sum_shares")


def projected(folder: Path, name: str, matrix: torch.Tensor) -> dict[str, Any]:
    file = folder / f"{name}.safetensors"
    save_file({name: matrix.contiguous()}, file)
    return {"features.projection": str(file)}


def test_a_projection_is_part_of_the_model_and_of_every_file_of_it(tmp_path: Path) -> None:
    """With as many dimensions as there are, an orthogonal projection changes nothing."""
    rotation = torch.linalg.qr(torch.randn(64, 64))[0]
    plain = run_federation(tmp_path, sites(4), **SECURE)
    turned = run_federation(
        tmp_path, sites(4), **SECURE, **projected(tmp_path, "projection", rotation)
    )
    before, after = (metrics_of(folder)["accuracy"] for folder in (plain, turned))
    assert abs(before["model"] - after["model"]) < 0.01
    model = load_model(turned / "model.safetensors")
    assert isinstance(model, Head)
    assert (model.dimension, tuple(model.weight.shape)) == (64, (10, 64))
    again = unpack_classifier(pack_classifier(model))
    features = torch.rand(50, 64)
    assert (again.predict(features) == model.predict(features)).all()
    assert (
        load_model(plain / "model.safetensors").predict(features) == model.predict(features)
    ).float().mean() > 0.95


def test_public_images_centre_and_whiten_and_the_model_does_the_same(tmp_path: Path) -> None:
    save_file({"x": torch.rand(100, 64)}, tmp_path / "public.safetensors")
    settings = (
        PRIVATE
        | projected(tmp_path, "fc.weight", torch.randn(30, 64))
        | {"features.dimensions": 20}
    )
    settings |= {"fedpft.public": str(tmp_path / "public.safetensors")}
    folder = run_federation(tmp_path, sites(4), report=False, **settings)
    model = load_model(folder / "model.safetensors")
    assert isinstance(model, Head)
    assert model.centre is not None
    assert len(model.centre) == 64
    assert metrics_of(folder)["accuracy"]["model"] > 0.6
    received = unpack_classifier(pack_classifier(model))
    assert isinstance(received, Head)
    # At 16 bits.
    own = model.scores(torch.eye(64))
    assert torch.allclose(received.scores(torch.eye(64)), own, atol=2e-3 * float(own.abs().max()))


@pytest.mark.parametrize(
    "matrix", [torch.ones(3, 60), torch.ones(64), torch.full((2, 64), torch.nan)]
)
def test_a_projection_that_does_not_fit_is_refused_before_any_site_is_charged(
    tmp_path: Path, matrix: torch.Tensor
) -> None:
    grid = InProcessGrid(sites(4))
    settings = projected(tmp_path, "projection", matrix)
    with pytest.raises((ConfigError, RunError), match="projection"):
        run_federation(tmp_path, grid, **SECURE, **settings)
    assert not grid.asked("train")
