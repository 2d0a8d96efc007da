"""Runs whose messages are files (offline exchange), compared with the same runs over a network, and attacks
on the files.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.offline.answers import is_message, reply_to
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import ConfigError, FedSurrogateError, RunError, SealError
from fedsurrogate.common.message_files import (
    REQUEST,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.documents import pack_file
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.common.wire.surrogate_proto import pack_dealt, unpack_dealt
from fedsurrogate.server_app.deployment.request_key import (
    VARIABLE,
    make_request_key,
    read_request_key,
)
from fedsurrogate.server_app.exchange import make_request, run_by_files
from tests.client_app.model_use.hospitals import CLASSES, rows_of_classes, write_images
from tests.commands import coordinator, site
from tests.grid import CACHE, FAST, events_of, metrics_of, run_federation, run_folders

PLAIN: dict[str, Any] = {"fedpft.covariance": "spherical", **FAST}
GRAM: dict[str, Any] = {
    "fedpft.covariance": "gram",
    "secure-aggregation": True,
    "classes": ",".join(map(str, range(10))),
}
IMAGES: dict[str, Any] = PLAIN | {
    "backbone": "pixels",
    "image-size": 8,
    "classes": ",".join(CLASSES),
}
Settings = dict[str, Any]
Posted = Callable[[Path], None]


class Post:
    """A coordinator's folder, and three hospitals that answer every request that is carried to
    them.
    """

    def __init__(self, home: Path, count: int = 3) -> None:
        self.home, self.out, self.lines = home, home / "carried", list[str]()
        make_request_key(home / "keys")
        self.coordinator = read_request_key(home / "keys")
        self.nodes = {f"site-{index}": self.node(index, count) for index in range(count)}
        lines = [
            f'{name} = "{public_key(private_key(node, name)).hex()}"'
            for name, node in self.nodes.items()
        ]
        (home / "keys.toml").write_text("\n".join(lines))

    def node(self, index: int, count: int) -> NodeConfig:
        (self.home / "policy.toml").write_text(
            "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
        )
        return parse_node_config(
            {
                "site": f"site-{index}",
                "data": "digits",
                "partition-id": index,
                "num-partitions": count,
                "state-dir": str(self.home / f"state-{index}"),
                "cache-dir": CACHE.name,
                "coordinator-key": public_key(self.coordinator).hex(),
                "policy": str(self.home / "policy.toml"),
            }
        )

    def run(self, settings: Settings, carry: Posted | None = None) -> Path:
        """A run; `carry` answers a request file, as `self.answer` does."""
        chosen = {"output-dir": str(self.home / "runs")} | settings
        with self.walking(carry or self.answer):
            return run_by_files(
                chosen, self.home / "keys", self.home / "keys.toml", self.out, 30, self.lines.append
            )

    @contextmanager
    def walking(self, carry: Posted) -> Iterator[None]:
        """Carry every new request to its site. What fails there is raised at the end."""
        ended, failed = threading.Event(), list[BaseException]()

        def walk() -> None:
            done: set[Path] = set()
            while not ended.is_set():
                for file in sorted(set(self.out.glob("*.request")) - done):
                    done.add(file)
                    try:
                        carry(file)
                    except BaseException as error:
                        failed.append(error)
                        file.with_suffix(".lost").touch()
                time.sleep(0.05)

        walker = threading.Thread(target=walk)
        walker.start()
        try:
            yield
        finally:
            ended.set()
            walker.join()
        assert not failed, failed

    def answer(self, file: Path, node: NodeConfig | None = None) -> None:
        """What a hospital does with a request: written aside and renamed, as a file manager copies."""
        site = file.stem.partition("-")[2]
        aside = file.with_suffix(".carried")
        reply_to(aside, file, node or self.nodes[site])
        aside.replace(file.with_suffix(".reply"))

    def spent(self, site: str) -> int:
        """Number of releases in a site's ledger."""
        entries = open_gate(self.nodes[site], "digits", "").ledger.entries()
        return sum(entry["kind"] == "release" for entry in entries)


def over_the_network(home: Path, count: int, settings: Settings) -> Path:
    nodes = [
        {"site": f"site-{k}", "data": "digits", "partition-id": k, "num-partitions": count}
        | {
            "state-dir": str(home / f"net-{k}"),
            "cache-dir": CACHE.name,
            "policy": str(home / "policy.toml"),
        }
        for k in range(count)
    ]
    return run_federation(home, nodes, **settings)


@pytest.mark.parametrize("settings", [PLAIN, GRAM], ids=["fedpft", "secure-aggregation"])
def test_the_model_is_that_of_the_same_run_over_the_network(
    tmp_path: Path, settings: Settings
) -> None:
    post = Post(tmp_path)
    carried, direct = post.run(settings), over_the_network(tmp_path, 3, settings)
    assert metrics_of(carried)["sites"] == metrics_of(direct)["sites"] | {"used": 3}
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (carried, direct))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.allclose(theirs[name], rtol=1e-5, atol=1e-6), name
    assert metrics_of(carried)["card"]["names"] == "registered"
    # The sites keep a model that the pinned key has signed.
    assert read_signed_model(carried / "model.fedsurrogate").key == public_key(post.coordinator)
    assert VARIABLE not in os.environ
    # Exact numbers of a site do not leave it in secure aggregation.
    reported = {event["site"] for event in events_of(carried) if event["event"] == "evaluated"}
    assert reported == (set() if settings is GRAM else set(post.nodes))
    assert "step 1: carry to their sites" in post.lines[0]


NOISY: Settings = {key: GRAM[key] for key in ("secure-aggregation", "classes")} | {
    "epsilon": 8.0,
    "delta": 1e-5,
}


@pytest.mark.parametrize(
    ("own", "told"),
    [({}, True), ({"fedpft.covariance": "gram"}, False), ({"head.solver": "logistic"}, False)],
)
def test_files_take_one_noisy_sum_unless_rounds_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Settings, told: bool
) -> None:
    monkeypatch.setattr("fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), 1),))
    post = Post(tmp_path, 4)
    rules = "mechanisms = ['secure-aggregation']\nepsilon-per-run = 8.0\nepsilon-total = 8.0\n"
    (tmp_path / "policy.toml").write_text(rules)
    run = metrics_of(post.run(NOISY | own))
    # Five answers a sum, and one when the model comes.
    steps = max(int(file.stem.partition("-")[0]) for file in post.out.glob("*.reply"))
    assert steps == (11 if "head.solver" in own else 6)
    assert run["sites"]["used"] == 4
    assert ("the head is that of one sum" in post.lines[0]) == told
    assert any("takes 2 sums" in line for line in post.lines) == told
    assert any("in 2 rounds" in line for line in post.lines) == ("head.solver" in own)


@pytest.mark.parametrize(
    "own",
    [
        {"fedpft.covariance": "spherical"},
        {"fedpft.covariance": "gram", "secure-aggregation": True},
        {"head.solver": "logistic", "secure-aggregation": True},
    ],
    ids=str,
)
def test_files_know_of_public_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Settings
) -> None:
    monkeypatch.setattr("fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), 1),))
    post = Post(tmp_path, 4)
    rules = (
        "mechanisms = ['sums', 'secure-aggregation']\nepsilon-per-run = 8.0\nepsilon-total = 8.0\n"
    )
    (tmp_path / "policy.toml").write_text(rules)
    save_file({"x": torch.rand(100, 64)}, tmp_path / "public.safetensors")
    public = {"fedpft.public": str(tmp_path / "public.safetensors"), "epsilon": 8.0, "delta": 1e-5}
    run = metrics_of(post.run({"classes": NOISY["classes"]} | public | own))
    assert run["sites"]["used"] == 4
    # The folder of the coordinator is its own affair.
    for file in post.out.glob("*.request"):
        assert str(tmp_path).encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("own", "depends"),
    [
        ({"head.solver": "logistic"}, True),
        # Of ten sites, a second moment would be lost in its noise.
        ({"features.records": 3_000}, True),
        ({"fedpft.covariance": "spherical"}, False),
        ({"head.solver": "logistic", "sites": 2}, False),
    ],
)
def test_approved_settings_that_lack_the_number_of_sites_are_refused_where_it_counts(
    own: Settings, depends: bool, tmp_path: Path
) -> None:
    """Sites refused a run that was not the approved one, after files had been carried to them."""
    post = Post(tmp_path, 2)
    settings = {"epsilon": 2.0, "delta": 1e-5, "classes": GRAM["classes"], **own}
    approved = settings | {"approval": "signed", "output-dir": str(tmp_path / "runs")}
    keys, lines = (tmp_path / "keys", tmp_path / "keys.toml"), post.lines.append
    asked: list[str] = []

    def asks(config: Run, *more: object) -> None:
        asked.append(config.full_digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsurrogate.server_app.exchange.federate", asks)
        message = "propose the run again with sites = 2" if depends else "left no folder"
        with pytest.raises(ConfigError if depends else RunError, match=message):
            run_by_files(approved, *keys, post.out, 30, lines)
    assert asked == ([] if depends else [parse_run(settings).full_digest])
    assert post.out.exists() != depends


def test_a_method_in_rounds_works_by_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Post(tmp_path, 2)
    settings = f'method="fedavg" fedavg.rounds=2 fedavg.local-epochs=1 output-dir="{tmp_path}/runs"'
    words = [
        "offline",
        "exchange",
        tmp_path / "keys",
        "--keys",
        tmp_path / "keys.toml",
        "--out",
        post.out,
        "-c",
        settings,
    ]
    with post.walking(post.answer):
        assert coordinator(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "01-site-0.request, 01-site-1.request" in out
    (folder,) = (tmp_path / "runs").glob("*fedavg*")
    assert [each["round"] for each in metrics_of(folder)["rounds"]] == [1, 2]
    assert metrics_of(folder)["sites"]["used"] == 2


def test_an_interrupted_exchange_prints_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    post = Post(tmp_path, 2)
    rounds = 'method="fedavg" fedavg.rounds=3 fedavg.local-epochs=1'
    settings = f'{rounds} output-dir="{tmp_path}/runs"'
    shared = ("--keys", tmp_path / "keys.toml", "--out", post.out, "-c", settings)

    def until_a_round(file: Path) -> None:
        """Ctrl-C, once a round is kept."""
        if list(tmp_path.glob("runs/*/checkpoint.safetensors")):
            os.kill(os.getpid(), signal.SIGINT)
        else:
            post.answer(file)

    with post.walking(until_a_round):
        assert coordinator(monkeypatch, "offline", "exchange", tmp_path / "keys", *shared) == 130
    (line,) = (
        each for each in capsys.readouterr().out.splitlines() if each.startswith("continue it: ")
    )
    program, *typed = shlex.split(line.removeprefix("continue it: "))
    assert program == "coordinator"
    post.out = Path(typed[typed.index("--out") + 1])
    assert not post.out.exists()
    (interrupted,) = run_folders(tmp_path / "runs")
    with post.walking(post.answer):
        assert coordinator(monkeypatch, *typed) == 0
    # Both can begin in one second, and then their names are in any order.
    (resumed,) = {*run_folders(tmp_path / "runs")} - {interrupted}
    assert [each["round"] for each in metrics_of(resumed)["rounds"]] == [1, 2, 3]


def test_shares_that_nobody_can_read_cost_their_sender_and_one_more_file_of_the_others(
    tmp_path: Path,
) -> None:
    """The refusal that names the sender is a reply file like any other, so nobody has to mark a
    site as lost.
    """
    post = Post(tmp_path, 4)

    def carry(file: Path) -> None:
        if file.name != "02-site-3.request":
            post.answer(file)
            return
        aside, key = file.with_suffix(".carried"), private_key(post.nodes["site-3"], "site-3")
        reply_to(aside, file, post.nodes["site-3"])
        honest = unpack_reply(aside.read_bytes(), public_key(key))
        dealt = unpack_dealt(honest.payload or b"")
        content = dict.fromkeys(dealt.content, bytes(50)) | {"site-3": dealt.content["site-3"]}
        spoiled = pack_dealt(replace(dealt, content=content))
        aside.write_bytes(pack_reply(replace(honest, payload=spoiled), key))
        aside.replace(file.with_suffix(".reply"))

    folder = post.run(GRAM | {"dropouts": 0.3}, carry)
    assert metrics_of(folder)["sites"] == {"invited": 4, "used": 3, "rejected": 1, "dropped": 0}
    (reason,) = [event["reason"] for event in events_of(folder) if event["event"] == "rejected"]
    assert "its shares cannot be used, by the report of 'site-0', 'site-1', 'site-2'" in reason
    assert sum(file.stem.endswith("site-0") for file in post.out.glob("*.reply")) == 7


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Post, Path]:
    """A run that has asked for surrogates, and got none. The first site has images of its own, and
    so a ledger.
    """
    post = Post(tmp_path)
    images = write_images(tmp_path / "images", rows_of_classes()[:120])
    post.nodes["site-0"] = post.nodes["site-0"].model_copy(
        update={"data": "imagefolder", "data_dir": str(images)}
    )
    open_ledger(post.nodes["site-0"])

    with pytest.raises(RunError, match="quorum"):
        post.run(IMAGES, lambda file: file.with_suffix(".lost").touch())
    return post, post.out / "01-site-0.request"


def test_a_request_is_answered_once_and_repeated_without_a_charge(
    asked: tuple[Post, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, file = asked
    before = post.spent("site-0")
    reply_to(tmp_path / "first", file, post.nodes["site-0"])
    assert post.spent("site-0") == before + 1
    assert "nothing is charged again" in reply_to(tmp_path / "again", file, post.nodes["site-0"])
    assert post.spent("site-0") == before + 1
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
    with pytest.raises(ConfigError, match="never replaced"):
        reply_to(tmp_path / "first", file, post.nodes["site-0"])
    own = post.nodes["site-0"].model_dump(by_alias=True, exclude_defaults=True, mode="json")
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in own.items())
    assert (
        site(
            monkeypatch,
            "offline",
            "release",
            file,
            "--out",
            tmp_path / "typed",
            "--node-config",
            text,
        )
        == 0
    )
    assert (tmp_path / "typed").read_bytes() == (tmp_path / "first").read_bytes()


def test_a_link_on_the_stick_leads_no_file_elsewhere(
    asked: tuple[Post, Path], tmp_path: Path
) -> None:
    """The name of a temporary file could be foreseen, and a link under it was followed."""
    post, file = asked
    own = tmp_path / "own-file"
    own.write_text("mine")
    (tmp_path / "reply.new").symlink_to(own)
    reply_to(tmp_path / "reply", file, post.nodes["site-0"])
    assert own.read_text() == "mine"


def test_a_request_that_is_not_the_coordinators_own_for_this_site_is_refused_before_any_work(
    asked: tuple[Post, Path], tmp_path: Path
) -> None:
    post, file = asked
    content, node = file.read_bytes(), post.nodes["site-0"]
    request = unpack_request(content, public_key(post.coordinator))
    before = post.spent("site-0")

    def as_other(**changes: Any) -> bytes:
        values = asdict(request) | {"has-payload": request.payload is not None} | changes
        payload = values.pop("payload") or b""
        return pack_file(values, payload, post.coordinator, REQUEST)

    signature, canonical = "signature does not fit", "no signed file in canonical form"
    wrong: list[tuple[bytes, type[FedSurrogateError], str]] = [
        (pack_request(request, new_key()), SealError, signature),
        (content.replace(b"spherical", b"diagonals"), SealError, signature),
        (as_other(site="site-1"), ConfigError, "for site 'site-1'"),
        (as_other(expires="2020-01-01"), ConfigError, "expired"),
        (as_other(expires="soon"), ConfigError, "no request"),
        (as_other(id="../../x"), ConfigError, "no request"),
        (as_other(kind="query.compare"), ConfigError, "does not answer"),
        (as_other(kind="query.open_log"), ConfigError, "does not answer"),
        (as_other(flower_run="../../x"), ConfigError, "no request"),
        (as_other(info={"run": None}), ConfigError, "no request"),
        (content + content[content.rindex(b"\x1a@") :], ConfigError, canonical),
        (content[:-1], FedSurrogateError, ""),
        (b"\x0a", FedSurrogateError, ""),
    ]
    for place, (each, kind, word) in enumerate(wrong):
        changed = tmp_path / f"changed-{place}"
        changed.write_bytes(each)
        with pytest.raises(kind, match=word):
            reply_to(tmp_path / "reply", changed, node)
    assert post.spent("site-0") == before
    assert not (tmp_path / "reply").exists()


def test_a_reply_names_no_path_and_a_request_of_the_other_kind_is_told_apart(
    asked: tuple[Post, Path], tmp_path: Path
) -> None:
    post, file = asked
    reply_to(tmp_path / "reply", file, post.nodes["site-0"])
    assert str(tmp_path).encode() not in (tmp_path / "reply").read_bytes()
    assert str(tmp_path).encode() not in file.read_bytes()
    assert is_message(file)
    make_request(PLAIN, tmp_path / "request.json", post.coordinator)
    assert not is_message(tmp_path / "request.json")
