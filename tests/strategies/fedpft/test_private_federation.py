"""Federations with differential privacy in one process: accepted replies, refusals, and
repeatability.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate
from fedsurrogate.server_app.refit import refit
from tests.grid import (
    FAST,
    Fault,
    InProcessGrid,
    events_of,
    metrics_of,
    outcome,
    run_federation,
    sites,
    surrogates_of,
)

PRIVATE = FAST | {"epsilon": 4.0, "delta": 1e-5, "fedpft.covariance": "spherical"}


def test_payloads_tell_nothing_by_their_size(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(3), alpha=0.1, **PRIVATE)
    assert len({len(payload) for payload in surrogates_of(folder).values()}) == 1


def test_the_same_seed_twice_gives_the_same_but_for_the_noise(tmp_path: Path) -> None:
    labels = torch.arange(900) % 2
    features = torch.randn(900, 4, generator=torch.Generator().manual_seed(0))
    for settings in ({}, {"fedpft.components": 2}, {"fedpft.privacy": "theorem-4.1"}):
        run = parse_run({"epsilon": 4.0, "delta": 1e-5, "fedpft.covariance": "diag", **settings})  # type: ignore[dict-item]
        first, second = (
            make_surrogate(SiteData(features, labels, ("a", "b"), "f", "s"), run).surrogate
            for _ in range(2)
        )
        assert (first.header, first.claim) == (second.header, second.claim)
        if isinstance(first, SumsSurrogate) and isinstance(second, SumsSurrogate):
            for name in ("counts", "sums", "squares"):
                assert not (getattr(first.sums, name) == getattr(second.sums, name)).any()
        else:
            assert not (first.mixtures.means == second.mixtures.means).any()  # type: ignore[union-attr]


def edited(edit: Callable[[pb.Surrogate], None]) -> Callable[[bytes], bytes]:
    def change(payload: bytes) -> bytes:
        message = pb.Surrogate.FromString(payload)
        edit(message)
        return message.SerializeToString()

    return change


def _less_noise(message: pb.Surrogate) -> None:
    message.claim.noise[0].sigma /= 2


def _other_epsilon(message: pb.Surrogate) -> None:
    message.claim.epsilon = 40.0


def _other_mechanism(message: pb.Surrogate) -> None:
    message.claim.mechanism = "theorem-4.1"


def _no_claim(message: pb.Surrogate) -> None:
    message.ClearField("claim")


def _nobody(message: pb.Surrogate) -> None:
    message.claim.unit = "hospital"


def _classes_swapped(message: pb.Surrogate) -> None:
    names = list(message.header.classes)
    message.header.classes[:] = [names[1], names[0], *names[2:]]


def _long_sums(message: pb.Surrogate) -> None:
    message.sums.sums.scale *= 1000


def _not_finite(message: pb.Surrogate) -> None:
    message.sums.counts.data = b"\x00\x7e" * 10


def _squares(message: pb.Surrogate) -> None:
    message.sums.squares.CopyFrom(message.sums.counts)


BROKEN: dict[Callable[[pb.Surrogate], None], str] = {
    _less_noise: "a privacy claim with noise",
    _other_epsilon: "epsilon = 40.0",
    _other_mechanism: "mechanism = theorem-4.1",
    _no_claim: "without a privacy claim",
    _nobody: "unit 'hospital'",
    _classes_swapped: "other classes",
    _long_sums: "a class sum beyond its count",
    _not_finite: "not finite",
    _squares: "noise is claimed for",
}


def test_a_release_that_is_not_what_was_promised_is_refused_by_name(tmp_path: Path) -> None:
    """Each site has records, and so a budget, of its own."""
    faults = {3 + at: Fault(payload=edited(edit)) for at, edit in enumerate(BROKEN)}
    grid = InProcessGrid(sites(3 + len(BROKEN)), faults)
    folder = run_federation(tmp_path, grid, quorum=0.1, **PRIVATE)
    found = {
        event["site"]: event["reason"]
        for event in events_of(folder)
        if event["event"] == "rejected"
    }
    assert len(found) == len(BROKEN)
    for number, reason in enumerate(BROKEN.values()):
        assert reason in found[str(3 + number)]
    assert metrics_of(folder)["sites"]["used"] == 3


def test_a_surrogate_without_privacy_is_refused_in_a_private_run(tmp_path: Path) -> None:
    plain = run_federation(tmp_path, sites(3), **FAST, **{"fedpft.covariance": "lowrank"})
    stolen = surrogates_of(plain)["1.pb"]

    def replay(payload: bytes) -> bytes:
        message = pb.Surrogate.FromString(stolen)
        message.header.CopyFrom(pb.Surrogate.FromString(payload).header)
        message.header.classes[:] = pb.Surrogate.FromString(stolen).header.classes
        return message.SerializeToString()

    settings = PRIVATE | {"fedpft.covariance": "lowrank"}
    folder = run_federation(
        tmp_path, InProcessGrid(sites(3), {1: Fault(payload=replay)}), **settings
    )
    assert (
        "tensors counts, factor, means, variances, weights; expected counts, sums, squares"
        in outcome(folder, "1", "rejected")
    )


def test_a_public_mean_reaches_sites_head_and_refit(tmp_path: Path) -> None:
    file = tmp_path / "public.safetensors"
    save_file({"x": torch.rand(50, 64)}, file)
    settings = PRIVATE | {"fedpft.public": str(file), "epsilon": 8.0}
    folder = run_federation(tmp_path, sites(3), **settings)
    assert metrics_of(folder)["accuracy"]["model"] > 0.85
    file.unlink()
    again, head = refit(folder)
    assert head.centre is not None
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(load_file(again / "model.safetensors")["weight"], stored["weight"])
    assert torch.equal(stored["centre"], head.centre)


def test_a_site_can_be_taken_out_of_noisy_sums_exactly(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(3), **PRIVATE)
    _, without = refit(folder, without=["1"])
    (folder / "surrogates" / "1.pb").unlink()
    _, rest = refit(folder)
    assert torch.equal(without.weight, rest.weight)
