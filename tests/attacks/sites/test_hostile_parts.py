"""Hospitals whose own programs send parts of messages that Flower's would not, to a real coordinator:
the run goes on with the others, names them, and takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.parts import Parts, wide_tree, with_pieces, with_repeated_piece
from tests.attacks.sites.hostile_node import HostileNode
from tests.e2e.hospitals import CLASSES, Hospital
from tests.e2e.processes import events, federation, newest

pytestmark = pytest.mark.slow
MIB = 2**20


def of_another_message(parts: Parts) -> Parts:
    """A reply whose own text says that it replies to a message that nobody has sent."""
    (message,) = (each for each in parts.contents.values() if each.startswith(b"Message"))
    body = message.partition(b"\0")[2]
    wanted = parts.announced.metadata.reply_to_message_id.encode()
    assert wanted in body
    return parts.with_body("Message", body.replace(wanted, b"0" * len(wanted)))


def repeated(parts: Parts) -> Parts:
    """Five MiB that stand for 1.5 GiB: the reply's piece, made larger, and listed 300 times."""
    return with_repeated_piece(parts.with_body("ArrayChunk", bytes(5 * MIB)), 300)


HOSTILE: dict[str, Callable[[Parts], Parts]] = {
    "repeats": repeated,
    "no-json": lambda parts: parts.with_body("Array", b"\xff"),
    "elsewhere": of_another_message,
    "no-record": lambda parts: parts.with_body("RecordDict", b"{}"),
    "large": lambda parts: with_pieces(parts, 3, 15 * MIB),
    "wide": lambda parts: parts.with_tree(wide_tree(30_000)),
}


def test_the_run_goes_on_with_the_others_and_names_each(tmp_path: Path) -> None:
    honest = [Hospital(tmp_path, name, seed) for seed, name in enumerate(("north", "south"))]
    output = tmp_path / "out"
    with federation(tmp_path / "flower", [each.node_config for each in honest]) as running:
        nodes = [HostileNode(running.fleet, name, forge) for name, forge in HOSTILE.items()]
        status = running.run(
            f'classes="{CLASSES}" epsilon=1.0 delta=1e-5 fedpft.covariance="spherical" '
            f"head.min-steps=50 head.epochs=1 max-payload-mib=1 sites={len(honest) + len(nodes)} quorum=0.2 "
            f'deadline=60.0 output-dir="{output}"',
            tmp_path,
        )
        for each in nodes:
            each.ends.set()
    assert status == "finished:completed", (running.home / "superexec.log").read_text()[-3000:]
    metrics = newest(output)[1]
    assert (metrics["status"], metrics["sites"]["used"]) == ("ok", len(honest))
    named = {each["site"] for each in events(output, "rejected") + events(output, "dropped")}
    # Those whose identification could be read have a name.
    assert len(named) == len(nodes)
    assert all(named & {f"node {each.number}", each.name} for each in nodes)
    (wide,) = (each for each in nodes if each.name == "wide")
    assert "more than" in " ".join(wide.refused), "at the SuperLink, before it stores a part"
