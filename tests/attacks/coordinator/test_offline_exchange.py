"""Attacks on the offline exchange, by an attacker with access to a request, a bundle or the folder
of replies.

All attacks use the commands that users type.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fedsurrogate.client_app.cli.main
import fedsurrogate.server_app.cli.main
import fedsurrogate.server_app.serverapp
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import (
    FIRST_LINE,
    LARGEST_REQUEST,
    Request,
    read_request,
)
from fedsurrogate.common.security.sealing import new_key, sign
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.common.surrogates.covariances import Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from tests.grid import FAST, events_of, metrics_of, run_federation, sites

SETTINGS: dict[str, Any] = {"fedpft.covariance": "spherical", "head.max-samples": 2000, **FAST}
PRIVATE: dict[str, Any] = SETTINGS | {
    "epsilon": 1.0,
    "delta": 1e-5,
    "classes": ",".join(map(str, range(10))),
}
Captured = pytest.CaptureFixture[str]

IMAGES: dict[str, Any] = {
    **{"epsilon": 0.5, "delta": 1e-5, "classes": "a,b", "backbone": "pixels", "image-size": 8},
    "fedpft.covariance": "spherical",
}


class World:
    """A folder in which a coordinator and hospitals type their commands; `wrong` is the last
    command's stderr.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
        self.folder, self._patch, self._capsys, self.wrong = folder, monkeypatch, capsys, ""
        self.pinned = self.coordinator("sites", "key", "certificates").strip()

    def _run(self, main: Callable[[], None], arguments: tuple[object, ...], code: int) -> str:
        self._patch.chdir(self.folder)
        self._patch.setattr(sys, "argv", ["x", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, self.wrong = self._capsys.readouterr()
        assert int(end.value.code or 0) == code, self.wrong
        return out

    def coordinator(self, *arguments: object, code: int = 0) -> str:
        return self._run(fedsurrogate.server_app.cli.main.main, arguments, code)

    def site(self, *arguments: object, code: int = 0) -> str:
        return self._run(fedsurrogate.client_app.cli.main.main, arguments, code)

    def node(self, index: int, pinned: str | None = None) -> str:
        own = (
            f'site="h{index}" data="digits" partition-id={index} num-partitions=3 '
            f'state-dir="s{index}" cache-dir="cache"'
        )
        pinned = self.pinned if pinned is None else pinned
        return f'{own} coordinator-key="{pinned}"' if pinned else own

    def request(
        self, name: str = "r.json", settings: dict[str, Any] = SETTINGS, *more: object
    ) -> Path:
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        self.coordinator("offline", "request", "certificates", "--out", name, "-c", given, *more)
        return self.folder / name

    def release(
        self,
        index: int,
        request: str = "r.json",
        out: str = "",
        code: int = 0,
        pinned: str | None = None,
    ) -> Path:
        out = out or f"h{index}.bundle"
        own = self.node(index, pinned)
        self.site("offline", "release", request, "--out", out, "--node-config", own, code=code)
        return self.folder / out

    def refused(self, why: str, request: str = "r.json", pinned: str | None = None) -> None:
        """The first site answers a request with this error, and does no work."""
        assert not self.release(0, request, code=1, pinned=pinned).exists()
        assert re.search(why, self.wrong)
        assert self.untouched(0)

    @property
    def key(self) -> bytes:
        """The coordinator's."""
        return (self.folder / "certificates" / "coordinator.key").read_bytes()

    def keys(self, *indices: int) -> None:
        lines = (
            self.site("offline", "key", "--node-config", self.node(index)) for index in indices
        )
        (self.folder / "keys.toml").write_text("".join(lines))

    def learn(self, *arguments: object, code: int = 0) -> Path:
        before = set((self.folder / "runs").glob("*"))
        self.coordinator("offline", "learn", "r.json", *arguments, "-c", "quorum=0.1", code=code)
        (run,) = set((self.folder / "runs").glob("*")) - before
        return run

    def untouched(self, index: int) -> bool:
        """Whether a site has done no work: no ledger, no features."""
        return (
            not list((self.folder / f"s{index}").rglob("*.jsonl"))
            and not (self.folder / "cache").exists()
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> World:
    # Drawing a report takes longer than all other work.
    monkeypatch.setattr(
        sys.modules["fedsurrogate.server_app.serverapp"], "write_report", lambda folder: None
    )
    return World(tmp_path, monkeypatch, capsys)


def refusals(run: Path) -> dict[str, str]:
    return {
        Path(event["site"]).name: event["reason"]
        for event in events_of(run)
        if event["event"] == "rejected"
    }


def used(run: Path) -> dict[str, int]:
    """Sites whose surrogates were used, with the number of records of each."""
    return {
        event["site"]: sum(event["counts"].values())
        for event in events_of(run)
        if event["event"] == "replied"
    }


def forged(file: Path, site: str, like: bytes, settings: dict[str, Any] = SETTINGS) -> Path:
    """A forged surrogate in a hospital's name; it claims more records than all hospitals have."""
    honest = unpack_surrogate(like)
    header = Header("fedpft", parse_run(settings).digest, site, honest.header.fingerprint, ("3",))
    one, means = torch.ones(1), torch.zeros(1, honest.dimension)
    mixtures = Mixtures(torch.tensor([90_000]), torch.tensor([0]), one, means, Spherical(one))
    file.write_bytes(pack_surrogate(Surrogate(header, mixtures)))
    return file


# Point 7: only files signed by a listed key count, unless a person vouches for them.


def test_an_unsigned_surrogate_in_a_hospitals_name_does_not_count(
    world: World, tmp_path: Path
) -> None:
    world.request()
    world.release(0)
    world.keys(0, 1)
    network = run_federation(tmp_path / "network", sites(1), **SETTINGS)
    forged(tmp_path / "h1.pb", "h1", next((network / "surrogates").glob("*.pb")).read_bytes())
    # With another file extension it is an invalid bundle.
    (tmp_path / "h1.bundle").write_bytes((tmp_path / "h1.pb").read_bytes())
    run = world.learn("h0.bundle", "h1.pb", "h1.bundle", "--keys", "keys.toml")
    assert set(used(run)) == {"h0"}
    assert "without a site's signature" in refusals(run)["h1.pb"]
    assert "no bundle" in refusals(run)["h1.bundle"]
    # The surrogate itself is sound: it counts as soon as a person vouches for it.
    assert (
        used(world.learn("h0.bundle", "--unsigned", "h1.pb", "--keys", "keys.toml"))["h1"] == 90_000
    )
    # Without keys, only files that a person vouches for count.
    assert set(used(world.learn("h0.bundle", "--unsigned", "h1.pb"))) == {"h1"}


def test_a_run_folder_counts_only_where_it_is_named_as_trusted(
    world: World, tmp_path: Path
) -> None:
    world.request()
    world.release(0)
    world.keys(0)
    network = run_federation(tmp_path / "network", sites(2), **SETTINGS)
    run = world.learn("h0.bundle", network, "--keys", "keys.toml")
    assert set(used(run)) == {"h0"}
    assert "--unsigned" in refusals(run)[network.name]
    assert set(used(world.learn("h0.bundle", "--unsigned", network, "--keys", "keys.toml"))) == {
        "h0",
        "0",
        "1",
    }
    # A file added to the folder, whose site name differs from its file name.
    (first, _) = sorted((network / "surrogates").glob("*.pb"))
    forged(network / "surrogates" / "z.pb", "h2", first.read_bytes())
    run = world.learn("h0.bundle", "--unsigned", network, "--keys", "keys.toml")
    assert set(used(run)) == {"h0", "0", "1"}
    assert "but the run folder stores it under 'z'" in refusals(run)["z.pb"]


def test_a_site_counts_once_and_what_it_signed_counts_first(world: World, tmp_path: Path) -> None:
    world.request()
    bundle = world.release(0)
    world.keys(0)
    (tmp_path / "again.bundle").write_bytes(bundle.read_bytes())
    run = world.learn("h0.bundle", "again.bundle", "h0.bundle", "--keys", "keys.toml")
    records = used(run)
    assert set(records) == {"h0"}
    assert metrics_of(run)["sites"] == {"invited": 3, "used": 1, "rejected": 2, "dropped": 0}
    # It comes first in the alphabet, and before the bundle on the command line.
    forged(tmp_path / "a.pb", "h0", next((run / "surrogates").glob("*.pb")).read_bytes())
    run = world.learn("--unsigned", "a.pb", "h0.bundle", "--keys", "keys.toml")
    assert used(run) == records
    assert "a second surrogate of site 'h0'" in refusals(run)["a.pb"]


def test_one_key_under_two_names_is_no_two_sites(world: World, tmp_path: Path) -> None:
    world.request()
    world.release(0)
    line = world.site("offline", "key", "--node-config", world.node(0))
    (tmp_path / "keys.toml").write_text(line + line.replace("h0", "h1"))
    world.coordinator("offline", "learn", "r.json", "h0.bundle", "--keys", "keys.toml", code=1)
    assert "'h0' and 'h1' have the same key" in world.wrong


# Point 11: a request is valid only if the coordinator signed it and it is unchanged.


def rewritten(request: Path, change: Callable[[str], str]) -> None:
    text = request.read_text()
    assert change(text) != text
    request.write_text(change(text))


def signed(world: World, field: str, value: str) -> bytes:
    """The request with this value of a field, signed by the coordinator."""
    honest = read_request(world.folder / "r.json", None)
    object.__setattr__(honest, field, value)
    return honest.signed(world.key)


def for_another_purpose(world: World) -> bytes:
    """The coordinator's signature, but of a bundle."""
    body = (world.folder / "r.json").read_bytes().partition(b"\n")[2]
    return FIRST_LINE.encode() + sign(body, world.key, b"bundle").hex().encode() + b"\n" + body


# tests/common/security/test_signed_requests.py tries what its reader refuses in full.
REFUSED: dict[str, tuple[Callable[[World], bytes], str]] = {
    "changed": (lambda world: (world.folder / "r.json").read_bytes().replace(b"1e-05", b"1e-04"), "changed on its way"),
    "not signed": (lambda world: (world.folder / "r.json").read_bytes().partition(b"\n")[2], "no request of"),
    "signed for another purpose": (for_another_purpose, "changed on its way"),
    "of another coordinator": (lambda world: Request("0" * 16, SETTINGS, None).signed(new_key()), "another coordinator"),
    "an id that is a path": (lambda world: signed(world, "id", "../../etc/x"), "16 hexadecimal digits"),
    "expired": (lambda world: signed(world, "expires", "2020-02-29"), "expired on 2020-02-29"),
    "too large": (lambda world: FIRST_LINE.encode() + b"0" * 128 + bytes(LARGEST_REQUEST), "larger than the limit"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_no_other_request_than_the_coordinators_own_causes_any_work(
    world: World, kind: str
) -> None:
    request = world.request(settings=PRIVATE)
    made, why = REFUSED[kind]
    request.write_bytes(made(world))
    world.refused(why)


def test_a_request_that_never_ends_is_refused(world: World) -> None:
    (world.folder / "zero").symlink_to("/dev/zero")
    world.refused("it is no file", "zero")


def test_a_site_that_pins_no_key_answers_no_request(world: World, tmp_path: Path) -> None:
    world.request()
    world.refused("set coordinator-key to the output of `coordinator sites key`", pinned="")
    for pinned in ("ab" * 64, "ab" * 63, str(tmp_path / "nowhere.pub"), str(tmp_path)):
        world.refused("", pinned=pinned)
    assert world.release(0, pinned="certificates/coordinator.pub").exists()


def test_a_request_is_answered_once(world: World) -> None:
    world.request(settings=PRIVATE)
    assert world.release(0).exists()
    node = parse_node_config(parse_overrides([world.node(0)]))
    (ledger,) = (world.folder / node.state).rglob("*.jsonl")
    before = ledger.read_bytes()
    # The same file again, and the same request with another file name.
    (world.folder / "copy.json").write_bytes((world.folder / "r.json").read_bytes())
    for name in ("r.json", "copy.json"):
        assert not world.release(0, name, "second.bundle", code=1).exists()
        assert "would spend the budget again" in world.wrong
    assert ledger.read_bytes() == before
    # A new request with the same settings is a different request, whose answer replaces no other.
    world.request("new.json", PRIVATE)
    first = (world.folder / "h0.bundle").read_bytes()
    world.release(0, "new.json", code=1)
    assert "exists" in world.wrong
    assert (world.folder / "h0.bundle").read_bytes() == first
    assert ledger.read_bytes() == before
    assert world.release(0, "new.json", "second.bundle").exists()


@pytest.mark.parametrize("loss", ["none", "damaged", "state-dir"])
def test_a_request_stays_answered_when_a_person_reopens_the_ledger(world: World, loss: str) -> None:
    (world.folder / "images").mkdir()
    for name in "ab":
        (world.folder / "images" / name).mkdir()
        for number in range(3):
            Image.new("L", (8, 8), 40 * number + ord(name[0]) % 9).save(
                world.folder / f"images/{name}/{number}.png"
            )
    folders = 'data-dir="images" state-dir="state" cache-dir="cache" check-log-dir="check-log"'
    own = f'site="h" data="imagefolder" {folders} coordinator-key="{world.pinned}"'
    there = ("--node-config", own)
    world.request(settings=IMAGES)
    world.site("ledger", "open", "--yes", *there)
    world.site("offline", "release", "r.json", "--out", "first.bundle", *there)
    for _ in range(2):
        if loss == "damaged":
            (file,) = (world.folder / "state" / "ledgers").glob("*.jsonl")
            file.write_bytes(file.read_bytes().replace(b'"release"', b'"relapse"') + b"\xff\n")
        if loss == "state-dir":
            shutil.rmtree(world.folder / "state")
        world.site("ledger", "reopen", "--reason", "x", "--epsilon-spent", "0.5", *there)
        world.site("offline", "release", "r.json", "--out", "second.bundle", *there, code=1)
        assert "was answered" in world.wrong
        assert not (world.folder / "second.bundle").exists()
    world.request("new.json", IMAGES)
    world.site("offline", "release", "new.json", "--out", "second.bundle", *there)


def test_a_bundle_for_other_settings_under_the_same_id_does_not_count(world: World) -> None:
    """An attacker who changes the coordinator's copy of a request cannot make a site's reply count
    for another request.
    """
    request = world.request()
    world.release(0)
    world.keys(0)
    rewritten(request, lambda text: text.replace('"head.epochs": 1', '"head.epochs": 2'))
    run = world.learn("h0.bundle", "--keys", "keys.toml", code=1)
    assert "other settings than this file holds" in refusals(run)["h0.bundle"]
    assert "h0.bundle: the site has answered" in world.wrong


def test_the_coordinators_key_is_made_once_and_for_its_owner_alone(world: World) -> None:
    credentials = world.folder / "certificates"
    assert (credentials / "coordinator.key").stat().st_mode & 0o77 == 0
    assert (credentials / "coordinator.pub").read_text().strip() == world.pinned
    world.coordinator("sites", "certs", "certificates", "--host", "localhost", "--site", "h0")
    assert world.coordinator("sites", "key", "certificates").strip() == world.pinned
    (credentials / "coordinator.pub").unlink()
    assert world.coordinator("sites", "key", "certificates").strip() == world.pinned
    # A key that sites have pinned is not silently replaced by another.
    (credentials / "coordinator.key").unlink()
    world.coordinator("sites", "key", "certificates", code=1)
    assert "restore it" in world.wrong
    world.coordinator("offline", "request", "certificates", "--out", "r.json", code=1)
    assert not (world.folder / "r.json").exists()
