"""Secure aggregation of five hospitals in real processes over gRPC: two are killed at different steps, one
is restarted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedsurrogate.common.methods.method import WITHHELD
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import numbers_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.wire.surrogate_proto import unpack_state
from tests.e2e.hospitals import CLASSES
from tests.e2e.processes import events, newest, until
from tests.faults.conftest import Scene, opened
from tests.totals import unpack_total

pytestmark = pytest.mark.faults
NAMES = ("early", "vector", "slow", "south", "west")
POLICY = "without-dp = true\nsmallest-class = 1\nrequire-secure-aggregation = false\nsmallest-colluding = 0.0\n"
SETTINGS = (
    f'secure-aggregation=true fedpft.covariance="gram" classes="{CLASSES}" colluding=0.0 dropouts=0.2 sites=5 quorum=0.1 '
    "deadline=150.0"
)


# What the SuperLink stores of any message, in either direction, is copied before it is deleted.
COPIES = """
CREATE TABLE copies (content BLOB);
CREATE TRIGGER copy AFTER UPDATE OF content ON objects BEGIN INSERT INTO copies VALUES (NEW.content); END;
"""


@dataclass
class Synthesis:
    """One run in which a site is lost after its keys, one after its masked vector, and one is
    restarted between two steps.

    Then one with all sites, and one that loses two of five sites after their keys. phase: the step
    of the restarted site.
    """

    result: dict[str, Any]
    folder: Path
    home: Path
    phase: str
    dropped: dict[str, str]
    again: dict[str, Any]
    few: dict[str, Any]


def submit(scene: Scene) -> str:
    return scene.running.submit(f'{SETTINGS} output-dir="{scene.output}"', scene.home)


def phase(scene: Scene, name: str) -> str:
    files = sorted(
        (scene.sites[name].state / "sums").glob("*.pb"), key=lambda file: file.stat().st_mtime
    )
    return unpack_state(files[-1].read_bytes()).phase if files else ""


def arrived(scene: Scene, kind: str, name: str) -> bool:
    """Whether the coordinator has this site's shares ("shared") or vector ("masked")."""
    return any(event["site"] == name for event in events(scene.output, kind))


def submit_and_lose(scene: Scene, *lost: str, held: str = "") -> str:
    """Submit a run. These sites are killed when all but "slow" have sent their keys; then "slow"
    continues.

    held: a site that waits before it shares its secrets, so that the coordinator waits too.
    """
    slow, before = scene.sites["slow"], len(events(scene.output, "identified"))
    slow.hold()
    run = submit(scene)
    slow.await_app()
    until(lambda: len(events(scene.output, "identified")) == before + len(NAMES) - 1)
    for name in lost:
        scene.kill(name)
    if held:
        scene.sites[held].hold()
    slow.let_go()
    return run


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synthesis]:
    home = tmp_path_factory.mktemp("sums")
    with patch("tests.e2e.hospitals.POLICY", POLICY), opened(home, *NAMES, keys=True) as scene:
        for name in NAMES:
            write_exact_features(home / name / "data")
        with closing(sqlite3.connect(home / "flower" / "state.db", timeout=30)) as database:
            database.executescript(COPIES)
        slow, west = scene.sites["slow"], scene.sites["west"]
        run = submit_and_lose(scene, "early", held="west")
        until(lambda: all(arrived(scene, "shared", name) for name in ("slow", "south", "vector")))
        slow.hold()
        connected = activations(home)
        scene.stop("south")
        stopped_at = phase(scene, "south")
        scene.restart("south")
        until(lambda: activations(home) > connected)
        west.await_app()
        west.let_go()
        until(lambda: arrived(scene, "masked", "vector"))
        scene.kill("vector")
        slow.await_app()
        slow.let_go()
        result = scene.result(run)
        folder, _ = newest(scene.output)
        dropped = scene.reported("rejected") | scene.reported("dropped")
        for name in ("early", "vector"):
            scene.restart(name)
        again = scene.result(submit(scene))
        few = scene.result(submit_and_lose(scene, "early", "vector"))
        yield Synthesis(result, folder, home, stopped_at, dropped, again, few)


def activations(home: Path) -> int:
    """How often a SuperNode has connected."""
    return (home / "flower" / "superlink.log").read_text().count("[Fleet.ActivateNode] Activated")


def write_exact_features(data: Path) -> None:
    """Round features to 64ths, so that sums do not depend on the order, and a search for a site's
    numbers finds them.
    """
    for part in ("train", "test"):
        file = data / f"f-{part}.safetensors"
        table = load_file(file)
        rounded = {"x": (table["x"] * 64).round() / 64, "y": table["y"]}
        save_file(rounded, file, {"classes": CLASSES, "fingerprint": "f" * 16})


def vectors(home: Path) -> dict[str, np.ndarray]:
    """What each hospital adds to the sum: its features' sums as whole numbers."""
    config = parse_run(
        {"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "cat,dog"}
    )
    numbers, found = numbers_of(config.plan, config.settings, len(NAMES)), {}
    for name in NAMES:
        table = load_file(home / name / "data" / "f-train.safetensors")
        x, y = table["x"].double(), table["y"]
        values = {"counts": torch.bincount(y, minlength=2).double(), "squares": fold(x.T @ x)}
        # In a sum without noise: zero at each site that lets it be opened.
        values[WITHHELD.name] = torch.zeros(1)
        values["sums"] = torch.zeros(2, x.shape[1], dtype=torch.float64).index_add_(0, y, x)
        parts = [
            numbers[each.name].encode(values[each.name]) for each in config.plan.combination.sums
        ]
        found[name] = np.concatenate(parts)
    return found


def test_the_sum_is_exactly_that_of_the_sites_that_count(story: Synthesis) -> None:
    _, names, numbers, _ = unpack_total((story.folder / "sum.pb").read_bytes())
    assert names == ("slow", "south", "vector", "west")
    assert (numbers == words(sum(vectors(story.home)[name] for name in names))).all()
    assert story.result["status"] == "ok"
    assert story.result["sites"]["used"] == 4


def test_lost_sites_are_named_with_the_step(story: Synthesis) -> None:
    assert story.dropped.keys() == {"early", "vector"}
    assert story.dropped["early"].startswith("lost after its keys")
    assert story.dropped["vector"].startswith("lost after its masked vector, which is in the sum")


def test_a_site_that_restarts_between_two_steps_goes_on(story: Synthesis) -> None:
    assert story.phase == "shares"
    assert "south" not in story.dropped
    assert story.result["card"]["names"] == "registered"


def test_no_message_file_or_log_of_the_coordinator_holds_one_sites_part(story: Synthesis) -> None:
    with closing(sqlite3.connect(story.home / "flower" / "state.db")) as database:
        messages = [content for (content,) in database.execute("SELECT content FROM copies")]
    files = [
        f.read_bytes()
        for part in ("out", "flower")
        for f in (story.home / part).rglob("*")
        if f.is_file()
    ]
    kept = b"".join((*messages, *files))
    _, _, total, _ = unpack_total((story.folder / "sum.pb").read_bytes())
    assert all(name.encode() in b"".join(messages) for name in NAMES)
    assert all(piece in kept for piece in pieces(total)), "the search finds what is there"
    for name, vector in vectors(story.home).items():
        for numbers in (words(vector), total - words(vector)):
            assert not any(piece in kept for piece in pieces(numbers)), name


def pieces(numbers: np.ndarray) -> list[bytes]:
    """The bytes of a vector after its counts, four numbers at a time."""
    return [numbers[at : at + 4].astype("<u4").tobytes() for at in range(2, len(numbers) - 3, 4)]


def test_a_second_sum_that_would_show_one_site_is_refused(story: Synthesis) -> None:
    """The first sum is of four sites. That of all five, less the first, would be the fifth site's
    own vector.
    """
    assert story.again["status"] == "failed"
    assert "have sent their masked vectors" in story.again["failure"]
    assert "policy does not allow" in story.again["failure"]


def test_below_the_threshold_nothing_is_revealed_and_the_lost_sites_are_named(
    story: Synthesis,
) -> None:
    assert story.few["status"] == "failed"
    failure = story.few["failure"]
    assert "3 of 5 sites have shared their secrets, 4 are needed" in failure
    assert "nothing was revealed; early: lost after its keys" in failure
    assert "vector: lost after its keys" in failure
