"""Two hundred hostile replies and three honest ones: all hostile ones are refused, and the model is
bit-identical.

HOSTILE_HUNT=5000 draws that many of each kind, different ones each time.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from safetensors.torch import load_file

from fedsurrogate.common import surrogate_pb2 as pb
from tests.grid import (
    FAST,
    InProcessGrid,
    events_of,
    metrics_of,
    run_federation,
    sites,
    surrogates_of,
)
from tests.hostile import (
    MARK,
    NAMES,
    HostileGrid,
    Recipe,
    drawn,
    forged,
    mutated,
    payload_of,
    replay,
)

HUNT = int(os.environ.get("HOSTILE_HUNT", "0"))
TOGETHER = 200
DIGITS = ",".join(map(str, range(10)))
SHARED: dict[str, Any] = FAST | {
    "classes": DIGITS,
    "quorum": 0.001,
    "partition": "iid",
    "deadline": 60.0,
}
TWO_ROUNDS: dict[str, Any] = {"fedavg.rounds": 2, "fedavg.local-epochs": 1}


@dataclass(frozen=True)
class Method:
    """Settings of a method's run, the type that its sites send, and the number of hostile sites of
    each kind.
    """

    settings: dict[str, Any]
    kind: type[Any]
    forged: int = 0
    mutated: int = 10


METHODS = {
    "fedpft": Method({"fedpft.covariance": "diag", "fedpft.components": 2}, pb.Surrogate, 60, 20),
    "chain": Method({"fedpft.topology": "chain", "fedpft.covariance": "diag"}, pb.Relay, 20),
    "fedavg": Method({"method": "fedavg"} | TWO_ROUNDS, pb.Parameters, 30, 20),
    "fedrep": Method({"method": "fedrep", "fedavg.width": 8} | TWO_ROUNDS, pb.Parameters, 15, 10),
    "average": Method({"method": "average"}, pb.Parameters, 30),
    "fedlap": Method(
        {
            "method": "fedlap",
            "fedlap.model": "linear",
            "fedlap.rounds": 2,
            "fedlap.image-steps": 2,
            "fedlap.server-steps": 3,
        }
        | {"fedlap.images-per-class": 2},
        pb.Synthetic,
        30,
        20,
    ),
    "dpcvae": Method(
        {
            "method": "dpcvae",
            "dpcvae.rounds": 2,
            "dpcvae.local-epochs": 1,
            "dpcvae.latent": 4,
            "dpcvae.synthetic": 10,
        },
        pb.Parameters,
        30,
    ),
}
ONLY_HUNTED = {
    "lowrank": Method({"fedpft.rank": 4}, pb.Surrogate),
    "full": Method({"fedpft.covariance": "full"}, pb.Surrogate),
    "private": Method({"epsilon": 5.0, "delta": 1e-4, "fedpft.covariance": "diag"}, pb.Surrogate),
    "scaffold": Method({"method": "scaffold"} | TWO_ROUNDS, pb.Parameters),
    "fedyogi": Method({"method": "fedyogi"} | TWO_ROUNDS, pb.Parameters),
    "average": Method({"method": "average"}, pb.Parameters),
}
if HUNT:
    METHODS |= ONLY_HUNTED
# It has its own noise, so two runs of the same sites differ.
NOISY = {"private"}
UNCHANGED = Recipe("as an honest site's", lambda record, kind: None)
Honest = dict[str, tuple[InProcessGrid, Path]]


class Writes:
    """Files that this process opens for writing or renames to, while active. An audit hook cannot
    be removed.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.watching = False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event in ("open", "os.rename", "os.mkdir", "os.link", "os.symlink"):
            writes = event != "open" or bool(
                (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            target = (
                arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0]
            )
            if writes and not isinstance(target, int):
                self.paths.append(os.path.realpath(os.fsdecode(target)))


WRITES = Writes()
# matplotlib makes these folders on first use, and the report of a hostile run may be the first.
matplotlib.get_configdir(), matplotlib.get_cachedir()


@pytest.fixture(scope="module")
def honest() -> Honest:
    """A run of each method by the honest sites alone."""
    return {}


def alone(honest: Honest, name: str, tmp_path: Path) -> tuple[InProcessGrid, Path]:
    if name not in honest:
        grid = InProcessGrid(sites(3, cache_dir=str(tmp_path / "cache")))
        order = {"fedpft.order": "2,0,1"} if name == "chain" else {}
        folder = run_federation(
            tmp_path / "alone", grid, **SHARED, **METHODS[name].settings, **order
        )
        honest[name] = grid, folder
    return honest[name]


def fingerprint_of(folder: Path) -> str:
    return str(metrics_and_manifest(folder)["fingerprint"])


def metrics_and_manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def among(
    tmp_path: Path, name: str, recipes: list[Recipe], fingerprint: str, report: bool = False
) -> tuple[HostileGrid, Path]:
    """A run of three honest sites, and one hostile site per recipe."""
    method = METHODS[name]
    grid = HostileGrid(sites(3, cache_dir=str(tmp_path.parent / "cache")), recipes, method.kind)
    settings = SHARED | method.settings | {"fingerprint": fingerprint}
    if name == "chain":
        settings["fedpft.order"] = ",".join(
            ["2", *(f"hostile-{i}" for i in range(len(recipes))), "0", "1"]
        )
    return grid, run_federation(tmp_path / "among", grid, report=report, **settings)


def replays(grid: InProcessGrid) -> list[Recipe]:
    """Replies that were valid once: in another run of other settings, by another site, in another
    round.
    """
    sent = [payload_of(reply.content) for reply in grid.replies(0)]
    found = [
        Recipe(
            "the reply of another site", replay("", payload_of(grid.replies(1)[0].content)).change
        )
    ]
    return found + (
        [replay("the reply of the other round", *reversed(sent))] if len(sent) > 1 else []
    )


def batches(recipes: list[Recipe]) -> Iterator[list[Recipe]]:
    for start in range(0, len(recipes), TOGETHER):
        yield recipes[start : start + TOGETHER]


@pytest.mark.parametrize("name", METHODS)
def test_every_forged_reply_is_refused_and_changes_no_bit_of_the_model(
    tmp_path: Path, honest: Honest, name: str
) -> None:
    grid, folder = alone(honest, name, tmp_path)
    wanted, fingerprint = load_file(folder / "model.safetensors"), fingerprint_of(folder)
    recipes = drawn(
        forged(), HUNT or METHODS[name].forged, random.randrange(2**32) if HUNT else 0
    ) + replays(grid)
    for number, batch in enumerate(batches(recipes)):
        WRITES.paths, WRITES.watching = [], True
        try:
            _, found = among(
                tmp_path / str(number), name, batch, fingerprint, report=name == "fedpft"
            )
        finally:
            WRITES.watching = False
        metrics = metrics_of(found)
        fates = last_word(found)
        accepted = [batch[i].name for i in range(len(batch)) if fates.get(i, "used") != "rejected"]
        assert not accepted
        assert metrics["status"] == "ok"
        assert metrics["sites"] == {
            "invited": len(batch) + 3,
            "used": 3,
            "rejected": len(batch),
            "dropped": 0,
        }
        assert set(surrogates_of(found)) <= {"0.pb", "1.pb", "2.pb"}
        model = load_file(found / "model.safetensors")
        assert name in NOISY or all(model[key].equal(wanted[key]) for key in wanted)
        reasons = [
            str(event["reason"]) for event in events_of(found) if event["event"] == "rejected"
        ]
        assert all(0 < len(reason) < 1000 and reason.isprintable() for reason in reasons)
        assert_nothing_escapes(found, tmp_path / str(number) / "among")


def last_word(folder: Path) -> dict[int, str]:
    """The last event of every hostile site, by its number."""
    message = {}
    for event in events_of(folder):
        name = str(event.get("site", ""))
        if name.startswith("hostile-"):
            message[int(name.removeprefix("hostile-"))] = str(event["event"])
        elif name.startswith("node "):
            message[int(name.removeprefix("node ")) - 1004] = str(event["event"])
    return message


def assert_nothing_escapes(folder: Path, root: Path) -> None:
    """All written files are in the run folder or the honest sites' folders; the report shows no
    foreign markup.
    """
    own = [
        str(folder.resolve()),
        str(folder.parent.resolve() / "signing"),
        str(root.resolve() / "site-state"),
        str(root.resolve() / "lenient-policy.toml"),
        os.devnull,
        # Matplotlib lists the fonts of a machine when it is first used there.
        os.environ["MPLCONFIGDIR"],
    ]
    outside = {
        path for path in WRITES.paths if not path.startswith((*own, str(root.parents[1] / "cache")))
    }
    assert not {path for path in outside if not own[0].startswith(path)}
    assert not [path for path in folder.rglob("*") if MARK in path.name]
    if (folder / "report.html").exists():
        page = (folder / "report.html").read_text()
        assert f"&lt;script&gt;{MARK}" in page or len(events_of(folder)) < TOGETHER // 10, (
            "the hostile names are shown"
        )
        assert not [name for name in NAMES[:2] if name[:12] + MARK in page or name in page]
        assert len(page) < 2_000_000


@pytest.mark.parametrize("name", METHODS)
def test_no_mutated_reply_ends_the_run_and_an_unchanged_one_is_used(
    tmp_path: Path, honest: Honest, name: str
) -> None:
    """If the unchanged reply were refused, the test above would refuse the others for a wrong
    reason.
    """
    _, folder = alone(honest, name, tmp_path)
    recipes = drawn(
        mutated(), HUNT or METHODS[name].mutated, random.randrange(2**32) if HUNT else 1
    )
    for number, batch in enumerate(batches([UNCHANGED, *recipes])):
        _, found = among(tmp_path / str(number), name, batch, fingerprint_of(folder))
        metrics = metrics_of(found)
        assert metrics["status"] == "ok"
        assert metrics["sites"]["used"] + metrics["sites"]["rejected"] == len(batch) + 3
        assert {"0", "1", "2"} <= set(metrics["bytes"]["up_per_site"])
        assert number or last_word(found)[0] != "rejected"
