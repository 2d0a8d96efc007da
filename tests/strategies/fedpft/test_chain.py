"""Chains of sites: each adds to the relay; a failing site is skipped; sealed chain messages cannot be read
or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.wire.model_proto import (
    pack_parameters,
    pack_relay,
    unpack_parameters,
    unpack_relay,
)
from fedsurrogate.common.wire.records import unpack_surrogate
from tests.grid import Fault, InProcessGrid, Json, events_of, metrics_of, run_federation, sites
from tests.strategies.interrupted import interrupted, wire_of

CHAIN: dict[str, Any] = {
    "fedpft.topology": "chain",
    "fedpft.covariance": "diag",
    "head.min-steps": 100,
    "head.epochs": 2,
    "alpha": 0.5,
}
ORDER = {"fedpft.order": "0,1,2"}


def hops(folder: Path) -> list[Json]:
    return list(metrics_of(folder)["hops"])


def relay(folder: Path) -> Any:
    return [
        unpack_surrogate(payload) for payload in unpack_relay((folder / "relay.bin").read_bytes())
    ]


def test_heads_get_better_along_the_chain_and_counts_add_up(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(3), **CHAIN | ORDER)
    accuracies = [hop["accuracy"] for hop in hops(folder)]
    assert [hop["site"] for hop in hops(folder)] == ["0", "1", "2"]
    assert accuracies[2] > accuracies[0]
    assert metrics_of(folder)["accuracy"]["model"] == pytest.approx(accuracies[2], abs=0.01)
    (last,) = relay(folder)
    assert last.header.site == "2"
    # Number of training records of the digits: four fifths of 1,797.
    assert sum(last.counts) == pytest.approx(1438, abs=3)


def test_a_site_of_the_order_that_is_not_there_is_skipped_and_named(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(2), **CHAIN, **{"fedpft.order": "0,north,1"})
    assert [hop["site"] for hop in hops(folder)] == ["0", "1"]
    (dropped,) = [event for event in events_of(folder) if event["event"] == "dropped"]
    assert (dropped["site"], dropped["reason"]) == ("north", "skipped in the chain: not connected")


@pytest.mark.parametrize("seal", [False, True])
def test_a_dead_site_is_skipped_and_named(tmp_path: Path, seal: bool) -> None:
    grid = InProcessGrid(sites(3), {1: Fault(offline=True)})
    folder = run_federation(tmp_path, grid, **CHAIN | ORDER, deadline=1.0, **{"fedpft.seal": seal})
    assert [hop["site"] for hop in hops(folder)] == ["0", "2"]
    (dropped,) = [event for event in events_of(folder) if event["event"] == "dropped"]
    assert (dropped["site"], dropped["reason"]) == (
        "1",
        "skipped in the chain: no reply before the deadline",
    )
    assert hops(folder)[1]["accuracy"] > hops(folder)[0]["accuracy"]


def test_under_privacy_every_sites_promise_is_its_own(tmp_path: Path) -> None:
    folder = run_federation(
        tmp_path,
        sites(3),
        **CHAIN | ORDER | {"fedpft.covariance": "spherical"},
        epsilon=4.0,
        delta=1e-5,
    )
    passed = relay(folder)
    assert [surrogate.header.site for surrogate in passed] == ["0", "1", "2"]
    metrics = metrics_of(folder)
    assert {
        site: card["epsilon"] for site, card in metrics["privacy"]["per_site"].items()
    } == dict.fromkeys("012", 4.0)
    assert metrics["accuracy"]["model"] > 0.7


def test_kd_goes_along_the_same_chain(tmp_path: Path) -> None:
    folder = run_federation(
        tmp_path,
        sites(2),
        method="kd",
        **{"head.min-steps": 100},
        partition="classes",
        **{"classes-per-site": 5},
    )
    first, second = (hop["accuracy"] for hop in hops(folder))
    # The first site has half of the classes; the second learns classes that it does not have.
    assert first < 0.5 < second


@pytest.mark.slow
def test_a_chain_resumes_after_its_last_hop(tmp_path: Path) -> None:
    whole = run_federation(tmp_path / "whole", sites(3), **CHAIN | ORDER)
    half = interrupted(tmp_path / "half", CHAIN | ORDER, after=2, count=3)
    resumed = run_federation(tmp_path / "half", sites(3), **CHAIN | ORDER, resume=str(half))
    assert [hop["site"] for hop in hops(resumed)] == ["0", "1", "2"]
    assert (whole / "relay.bin").read_bytes() == (resumed / "relay.bin").read_bytes()


def parameters(folder: Path) -> list[bytes]:
    """Byte sequences from an unsealed chain's packed tensors, which the coordinator could find."""
    payload = (folder / "relay.bin").read_bytes()
    return [payload[at : at + 24] for at in range(200, len(payload) - 24, 24)]


@pytest.mark.slow
def test_a_sealed_chain_gives_the_same_heads_and_shows_the_coordinator_nothing(
    tmp_path: Path,
) -> None:
    opened = run_federation(tmp_path / "open", sites(3), **CHAIN | ORDER)
    grid = InProcessGrid(sites(3))
    sealed = run_federation(tmp_path / "sealed", grid, **CHAIN | ORDER, **{"fedpft.seal": True})
    assert [hop["accuracy"] for hop in hops(sealed)] == [hop["accuracy"] for hop in hops(opened)]
    assert not (sealed / "model.safetensors").exists()
    assert "0" not in [path.stem for path in (sealed / "surrogates").iterdir()]
    stored = b"".join(path.read_bytes() for path in sealed.rglob("*") if path.is_file())
    carried = wire_of(grid)
    assert (sealed / "relay.bin").read_bytes() in carried
    for piece in parameters(opened):
        assert piece not in stored
        assert piece not in carried
    # The check can fail: without sealing, the same pieces are found.
    assert all(piece in (opened / "relay.bin").read_bytes() for piece in parameters(opened))


@pytest.mark.parametrize("place", [30, 1000, -40])
def test_a_relay_that_changes_one_byte_is_noticed_and_named(tmp_path: Path, place: int) -> None:
    def flip(payload: bytes) -> bytes:
        changed = bytearray(payload)
        changed[place] ^= 1
        return bytes(changed)

    # Between the first and the second site.
    grid = InProcessGrid(sites(3), {0: Fault(payload=flip)})
    folder = run_federation(tmp_path, grid, **CHAIN | ORDER, quorum=0.3, **{"fedpft.seal": True})
    rejected = {
        event["site"]: event["reason"]
        for event in events_of(folder)
        if event["event"] == "rejected"
    }
    # Both later sites notice; then the first site's part is left out, and they continue.
    assert rejected.keys() == {"1", "0"}
    assert all(
        "the chain message to the site was changed on its way" in reason
        for reason in rejected.values()
    )
    assert sorted(hop["site"] for hop in hops(folder)) == ["1", "2"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_site_that_passes_on_nonsense_in_a_sealed_chain_stops_nobody_else(
    tmp_path: Path, bad: int
) -> None:
    grid = InProcessGrid(sites(4), {bad: Fault(payload=lambda payload: b"nonsense" * 100)})
    folder = run_federation(
        tmp_path, grid, **CHAIN, **{"fedpft.order": "0,1,2,3", "fedpft.seal": True}
    )
    assert sorted(hop["site"] for hop in hops(folder)) == [
        str(site) for site in range(4) if site != bad
    ]
    first, second = (event for event in events_of(folder) if event["event"] == "rejected")
    # The next site first fails. It gets a new request without the bad part, and is used.
    assert (first["site"], second["site"]) == (str(bad + 1), str(bad))
    assert "other sites cannot use its chain message" in second["reason"]
    assert metrics_of(folder)["sites"] == {"invited": 4, "used": 3, "rejected": 1, "dropped": 0}


def test_pinned_keys_are_believed_rather_than_the_coordinators(tmp_path: Path) -> None:
    peers = tmp_path / "peers.toml"
    peers.write_text(f'0 = "{"ab" * 64}"\n2 = "{"cd" * 64}"\n')
    nodes = sites(3)
    nodes[1]["peers"] = str(peers)
    folder = run_federation(tmp_path, nodes, **CHAIN | ORDER, **{"fedpft.seal": True})
    # It does not open relays of an unknown site.
    assert "1" in [event["site"] for event in events_of(folder) if event["event"] == "rejected"]
    assert "is not the one in peers" in (tmp_path / "site-state" / "site.log").read_text()


def test_what_was_learned_from_sealed_relays_is_not_given_out_later(tmp_path: Path) -> None:
    run_federation(tmp_path, sites(2), **CHAIN, **{"fedpft.seal": True})
    kept = [path.name for path in (tmp_path / "site-state" / "runs").rglob("*.pb")]
    assert kept == ["confidential-head.pb"] * 2


def without_dimension(payload: bytes) -> bytes:
    """The head with a centre of shape ()."""
    message = pb.Classifier.FromString(payload)
    message.head.centre.mean.CopyFrom(pb.Halves(scale=1.0, data=bytes(2)))
    return message.SerializeToString()


def huge_network(payload: bytes) -> bytes:
    """A network that states 10,000 classes and 2^24 inputs, 671 GB of weights, in few bytes."""
    message = pb.Classifier.FromString(payload)
    header = message.head.header
    header.classes[:] = [str(number) for number in range(10_000)]
    network = pb.Network(header=header, kind="linear", inputs=2**24 - 1)
    return pb.Classifier(network=network).SerializeToString()


@pytest.mark.parametrize("forge", [without_dimension, huge_network])
def test_no_head_of_the_last_site_ends_the_run(
    tmp_path: Path, forge: Callable[[bytes], bytes]
) -> None:
    grid = InProcessGrid(sites(2), {1: Fault(payload=forge, kind="query.head")})
    folder = run_federation(tmp_path, grid, **CHAIN, **{"fedpft.order": "0,1"})
    assert metrics_of(folder)["status"] == "ok"
    assert [each["site"] for each in events_of(folder) if each["event"] == "no-head"] == ["1"]


def test_the_surrogates_of_others_cannot_be_changed_in_a_private_chain(tmp_path: Path) -> None:
    def forge(payload: bytes) -> bytes:
        parts = unpack_relay(payload)
        return pack_relay([*parts[:-2], parts[-1]])

    private = {"epsilon": 4.0, "delta": 1e-5, "fedpft.covariance": "spherical"}
    folder = run_federation(
        tmp_path, InProcessGrid(sites(3), {1: Fault(payload=forge)}), **CHAIN | ORDER | private
    )
    (rejected,) = [event for event in events_of(folder) if event["event"] == "rejected"]
    assert rejected["site"] == "1"
    assert "are not as they were" in rejected["reason"]
    assert [surrogate.header.site for surrogate in relay(folder)] == ["0", "2"]


def test_a_head_of_the_wrong_shape_goes_no_further(tmp_path: Path) -> None:
    def flat(payload: bytes) -> bytes:
        head = unpack_parameters(payload)
        return pack_parameters(
            replace(head, tensors={"weight": torch.ones(1, 1, 5), "bias": torch.ones(7)})
        )

    grid = InProcessGrid(sites(2), {1: Fault(payload=flat)})
    folder = run_federation(
        tmp_path, grid, method="kd", **{"head.min-steps": 20}, **{"fedpft.order": "0,1"}
    )
    (rejected,) = [event for event in events_of(folder) if event["event"] == "rejected"]
    assert "tensors that are not this run's" in rejected["reason"]


@pytest.mark.parametrize("method", ["fedavg", "average", "fedpft"])
def test_a_name_cannot_be_taken_from_a_site_that_is_there(tmp_path: Path, method: str) -> None:
    nodes = sites(3)
    nodes[2]["site"] = "0"
    settings: dict[str, Any] = (
        CHAIN
        if method == "fedpft"
        else {"method": method, "head.min-steps": 20, "fedavg.rounds": 1}
    )
    folder = run_federation(tmp_path, nodes, **settings)
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert metrics["sites"]["used"] == 2
    (rejected,) = {event["reason"] for event in events_of(folder) if event["event"] == "rejected"}
    assert (
        "which is another site's" if method == "fedavg" else "names another site as its sender"
    ) in rejected


def test_names_of_small_classes_stay_at_home(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    labels = torch.tensor([0] * 50 + [1] * 50 + [2])
    features = (
        torch.randn(101, 4, generator=torch.Generator().manual_seed(0))
        + 3 * torch.eye(3, 4)[labels]
    )
    for part in ("train", "test"):
        content = {"x": features, "y": labels}
        save_file(
            content,
            tmp_path / f"f-{part}.safetensors",
            {"classes": "cat,dog,rare-disease", "fingerprint": "f" * 16},
        )
    (tmp_path / "policy.toml").write_text(
        "without-dp = true\nsmallest-class = 10\nexact-sums-at-models = true\n"
    )
    node: dict[str, Any] = {
        "site": "north",
        "data": "safetensors",
        "data-dir": str(tmp_path),
        "dataset": "f",
    }
    node |= {"policy": str(tmp_path / "policy.toml"), "state-dir": str(tmp_path / "state")}
    for settings in ({"method": "average"}, CHAIN, {"method": "fedavg", "fedavg.rounds": 1}):
        folder = run_federation(tmp_path / str(settings)[:20], [dict(node)], **settings)
        assert metrics_of(folder)["status"] == "ok"
        assert not [
            path
            for path in folder.rglob("*")
            if path.is_file() and b"rare-disease" in path.read_bytes()
        ]
