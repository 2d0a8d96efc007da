"""Runs of many steps over gRPC: a site is killed in the middle, the SuperLink is restarted, and the
run goes on.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsurrogate.common.errors import PUBLIC_SENTENCES
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.server_app.deployment.submit import stop_process
from tests.e2e.processes import Federation, events, federation, newest, until

pytestmark = pytest.mark.faults
SETTINGS = "sites=3 quorum=0.3 deadline=90.0 alpha=1.0 head.min-steps=100 head.epochs=2"
NAMES = ("north", "south", "west")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Federation]:
    nodes = [
        f'site="{name}" data="digits" partition-id={i} num-partitions=3 '
        f'cache-dir="{tmp_path}/c" state-dir="{tmp_path}/{name}"'
        for i, name in enumerate(NAMES)
    ]
    with federation(tmp_path / "flower", nodes, isolated=False) as started:
        yield started


def test_a_chain_goes_round_a_killed_site(running: Federation, tmp_path: Path) -> None:
    output = tmp_path / "out"
    chain = (
        f'{SETTINGS} fedpft.topology="chain" fedpft.order="north,south,west" output-dir="{output}"'
    )
    run = running.submit(chain, tmp_path)
    # The second site dies before it receives the relay of the first.
    until(lambda: bool(events(output, "replied")))
    stop_process(running.nodes[1].pid)
    assert running.wait(run) == "finished:completed"
    folder, metrics = newest(output)
    assert [hop["site"] for hop in metrics["hops"]] == ["north", "west"]
    troubles = {
        e["site"]: e["reason"] for kind in ("dropped", "rejected") for e in events(output, kind)
    }
    assert troubles.keys() == {"south"}
    assert (folder / "model.safetensors").exists()
    assert set(metrics["accuracy"]["per_site"]) == {"north", "west"}


def test_the_superlink_never_stores_a_parameter_of_a_sealed_chain(
    running: Federation, tmp_path: Path
) -> None:
    chain = f'{SETTINGS} fedpft.topology="chain" fedpft.order="north,south,west"'

    def stored(*folders: Path) -> bytes:
        files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
        return b"".join(file.read_bytes() for file in (*files, *running.home.glob("state.db*")))

    assert (
        running.run(f'{chain} fedpft.seal=true output-dir="{tmp_path}/sealed"', tmp_path)
        == "finished:completed"
    )
    sealed = stored(tmp_path / "sealed")
    assert running.run(f'{chain} output-dir="{tmp_path}/open"', tmp_path) == "finished:completed"
    # Without sealing, the same sites send the same bytes, and the search finds them.
    (relay,) = (tmp_path / "open").glob("*/relay.bin")
    content = relay.read_bytes()
    pieces = [content[at : at + 24] for at in range(200, len(content) - 24, 24)]
    assert not any(piece in sealed for piece in pieces)
    assert all(piece in stored() for piece in pieces)
    assert [hop["site"] for hop in newest(tmp_path / "sealed")[1]["hops"]] == list(NAMES)


def test_fedlap_goes_on_after_a_site_and_the_superlink_were_restarted(
    running: Federation, tmp_path: Path
) -> None:
    output, west = tmp_path / "out", tmp_path / "west"
    settings = (
        'sites=3 quorum=0.3 deadline=180.0 method="fedlap" image-size=16 '
        'partition="classes" classes-per-site=5'
    )
    settings += (
        ' classes="0,1,2,3,4,5,6,7,8,9" epsilon=8.0 delta=1e-5 fedlap.width=8 '
        "fedlap.images-per-class=1"
    )
    settings += (
        f' fedlap.image-steps=20 fedlap.server-steps=20 fedlap.rounds=4 output-dir="{output}"'
    )
    running.submit(settings, tmp_path)
    until(lambda: len(events(output, "round")) == 1)
    stop_process(running.nodes[2].pid)
    ledgers = {file: file.read_bytes() for file in west.rglob("*.jsonl")}
    (images,) = west.rglob("synthetic-1.safetensors")
    before = images.read_bytes()
    assert ledgers
    running.restart_node(2)
    until(lambda: len(events(output, "round")) == 2)
    assert images.read_bytes() == before
    assert all(file.read_bytes().startswith(content) for file, content in ledgers.items())
    stop_process(running.superlink.pid)
    folder, _ = newest(output)
    done = len(events(output, "round"))
    running.start_superlink()
    run = running.submit(f'{settings} resume="{folder}"', tmp_path)
    assert running.wait(run) == "finished:completed"
    assert events(output, "resumed")[0]["round"] >= min(done, 2)
    _, metrics = newest(output)
    rounds = [entry["round"] for entry in metrics["rounds"]]
    # A round that ran when the SuperLink ended is charged; then the budget does not cover the last
    # round.
    assert rounds == ([1, 2, 3] if "stopped" in metrics else [1, 2, 3, 4])
    assert metrics["rounds"][-1]["used"] == 3, "the restarted site takes part again"
    assert "west" in metrics["rounds"][-1]["radii"]
    # An entry and a file of images for every round in which the site took part.
    entries = [
        json.loads(line) for file in west.rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    charged = sorted(entry["round"] for entry in entries if entry["kind"] == "release")
    assert charged[0] == 1
    assert charged[-1] == rounds[-1]
    assert {
        int(file.stem.partition("-")[2]) for file in west.rglob("synthetic-*.safetensors")
    } == set(charged)


def test_a_generator_is_trained_on_after_a_site_was_restarted_and_without_one_that_lost_its_state(
    running: Federation, tmp_path: Path
) -> None:
    output, south, west = (tmp_path / name for name in ("out", "south", "west"))
    settings = (
        'sites=3 quorum=0.3 deadline=180.0 method="dpcvae" classes="0,1,2,3,4,5,6,7,8,9" '
        "epsilon=8.0 delta=1e-5"
    )
    settings += (
        " dpcvae.rounds=6 dpcvae.synthetic=50 head.min-steps=50 head.epochs=1 "
        f'output-dir="{output}"'
    )
    run = running.submit(settings, tmp_path)
    until(lambda: len(events(output, "round")) == 2)
    stop_process(running.nodes[2].pid)
    kept = {
        file: file.read_bytes()
        for pattern in ("kept-*.safetensors", "*.jsonl")
        for file in west.rglob(pattern)
    }
    assert any(file.suffix == ".jsonl" for file in kept)
    assert any(file.suffix == ".safetensors" for file in kept)
    running.restart_node(2)
    # Its encoder and its spent budget are unchanged until it continues from them.
    assert all(
        file.read_bytes().startswith(content) for file, content in kept.items() if file.exists()
    )
    until(lambda: len(events(output, "round")) == 3)
    stop_process(running.nodes[1].pid)
    for file in south.rglob("kept-*.safetensors"):
        file.unlink()
    running.restart_node(1)
    assert running.wait(run) == "finished:completed"
    folder, metrics = newest(output)
    assert (folder / "generator.safetensors").exists()
    refused = [
        e["reason"] for e in events(output, "rejected") if (e["site"], e["round"]) == ("south", 6)
    ]
    assert refused == [PUBLIC_SENTENCES["state"]], (
        "the site without its state takes no part any more"
    )
    assert metrics["rounds"][-1]["used"] == 2
    assert [e["site"] for e in events(output, "replied") if e["round"] == 6].count("west") == 1
    entries = [
        json.loads(line) for file in west.rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    charged = [entry for entry in entries if entry["kind"] == "release" and entry["events"]]
    assert sorted(entry["round"] for entry in charged) == sorted(
        {entry["round"] for entry in charged}
    )
    spent = epsilon_spent(
        [GaussianEvent(**event) for entry in charged for event in entry["events"]], 1e-5
    )
    assert spent <= 8.0 * (1 + 1e-9)
    assert list((west / "generators").glob("*.safetensors")), "every site keeps what was learned"
