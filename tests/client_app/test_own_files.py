"""No other account of a hospital's machine can read what a run or a command leaves there, under the
most open umask.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest
import typer.main

import fedsurrogate.client_app.cli.main
import fedsurrogate.client_app.processes.app_process
from fedsurrogate.client_app.model_use.store import models_folder, read_index
from fedsurrogate.client_app.node_config import (
    NodeConfig,
    close_to_others,
    own_files,
    parse_node_config,
    readable_by_others,
)
from fedsurrogate.common import files
from fedsurrogate.common.security.documents import Proposal, SignedProposal
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.exchange import make_request
from tests.client_app.methods.dpcvae.test_downstream import generator_file
from tests.client_app.model_use.hospitals import (
    PRIVATE,
    federation,
    rows_of_classes,
    site,
    text,
    write_images,
)
from tests.grid import FAST, run_federation, sites
from tests.server_app.test_offline import COORDINATOR

__all__ = ["generator_file"]
OTHERS = stat.S_IRWXG | stat.S_IRWXO
RUN = (
    'backbone="pixels" image-size=8 classes="1,2,7" epsilon=2.0 delta=1e-5 '
    'fedpft.covariance="spherical"'
)
# Programs that run until they are stopped.
SERVE = {"join", "app", "node", "metrics"}


@contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


class Made:
    """Files and folders that Python code makes while others could read them: also temporary ones."""

    def __init__(self, patch: pytest.MonkeyPatch, *within: Path) -> None:
        self.open_to_others: list[str] = []
        self._within = within
        for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "mkdir")):
            patch.setattr(module, name, self._watched(getattr(module, name), name))

    def _watched(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            mode = named.get("mode", arguments[0] if arguments else "r")
            makes = name == "mkdir" or (
                bool(mode & os.O_CREAT) if isinstance(mode, int) else bool(set("wax") & set(mode))
            )
            if makes and isinstance(path, str | os.PathLike) and not Path(path).exists():
                umask = os.umask(0)
                os.umask(umask)
                where = Path(path).absolute()
                if umask & 0o77 != 0o77 and any(map(where.is_relative_to, self._within)):
                    self.open_to_others.append(str(where))
            return real(path, *arguments, **named)

        return call


def readable(*folders: Path) -> list[str]:
    """Files and folders that others may read, below these folders and themselves."""
    every = [each for folder in folders for each in (folder, *folder.rglob("*"))]
    return [
        f"{each} {each.lstat().st_mode & 0o777:o}"
        for each in every
        if each.lstat().st_mode & OTHERS
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital after a run that sent pixels, whose umask was the most open one; and new images."""
    home = tmp_path_factory.mktemp("home")
    (home / "tmp").mkdir(mode=0o700)
    made_within = [home / f"clinic-{k}-{kind}" for k in (0, 1) for kind in ("state", "cache")]
    with pytest.MonkeyPatch.context() as patch, open_umask():
        patch.setattr(tempfile, "tempdir", str(home / "tmp"))
        # A person opens the ledger, by a command.
        patch.setattr(
            "tests.grid.open_new",
            lambda node: site("ledger", "open", "--yes", "--node-config", text(node)),
        )
        made = Made(patch, *made_within, home / "tmp", home / "check-log")
        nodes, _ = federation(home, decided=False)
    (home / "made.txt").write_text("\n".join(made.open_to_others))
    own = nodes[0] | {"site": "clinic-0"}
    (home / "node.txt").write_text(text(own))
    rows = rows_of_classes()[240:300]
    write_images(home / "new", rows, labelled=False)
    write_images(home / "labelled", rows)
    lines = [f"{row:04}.png,p{number // 3}" for number, row in enumerate(rows)]
    (home / "new" / "list.csv").write_text("path,who\n" + "\n".join(lines) + "\n")
    return home


def node_of(home: Path) -> NodeConfig:
    return parse_node_config(parse_overrides([(home / "node.txt").read_text()]))


def test_a_run_leaves_nothing_that_other_accounts_can_read(home: Path) -> None:
    node = node_of(home)
    kept = {node.state, node.cache, node.check_log}
    assert not readable(*kept)
    names = {path.relative_to(folder).parts[0] for folder in kept for path in folder.rglob("*")}
    assert {"features", "site.log", "ledgers", "models"} <= names, "of the run"
    assert any(path.name == "x.npy" for path in node.cache.rglob("*"))
    assert not list((home / "tmp").iterdir())


def test_a_run_makes_no_file_before_its_umask_is_set(home: Path) -> None:
    assert (home / "made.txt").read_text() == ""


# Every command that ends; OUT is a new folder.
COMMANDS: dict[str, tuple[str, ...]] = {
    "ledger show": ("--node-config", "NODE"),
    "ledger reopen": ("--node-config", "NODE", "--reason", "x", "--epsilon-spent", "1"),
    "offline key": ("--node-config", "NODE"),
    "offline release": ("HOME/request.json", "--node-config", "NODE", "--out", "OUT/bundle"),
    "check": ("--node-config", "NODE", "-c", RUN),
    "features": ("--node-config", "NODE", "-c", RUN, "--out", "OUT/features.safetensors"),
    "settings": (),
    "policy": ("--node-config", "NODE"),
    "ledger forget": ("--node-config", "NODE", "--yes"),
    "doctor": ("--node-config", "NODE", "-c", RUN),
    "models list": ("--node-config", "NODE"),
    "models add": ("HOME/model.fedsurrogate", "--node-config", "NODE"),
    "models use": ("MODEL", "--node-config", "NODE"),
    "models back": ("--node-config", "NODE"),
    "predict": ("MODEL", "--data-dir", "HOME/new", "--patient-column", "who", "--node-config", "NODE", "--out", "OUT/p.csv",
                "--by-patient", "OUT/patients.csv"),
    "evaluate": ("MODEL", "--data-dir", "HOME/labelled", "--node-config", "NODE", "--out", "OUT/evaluation",
                 "--positive", "7", "--sensitivity", "0.9", "--store"),
    "adapt": ("MODEL", "--data-dir", "HOME/labelled", "--node-config", "NODE", "--store"),
    "enrol": ("north", "--hospital", "North", "--contact", "it@north.example", "--out", "OUT/north"),
    "backup": ("OUT/north.backup", "--node-config", "NODE"),
    "approve": ("HOME/proposal.json", "--officer", "Dr. N", "--node-config", "NODE"),
    "check --attack": ("--node-config", "NODE", "-c", RUN, "--seconds", "0", "--out", "OUT/audit"),
    "check --sheet": ("--node-config", "NODE", "-c", RUN),
    "generator synthesize": ("GENERATOR", "--per-class", "150", "--out", "OUT/set.safetensors"),
    "generator classify": ("SET", "--node-config", "DIGITS", "--out", "OUT/heads.safetensors"),
    "generator ood": ("SET", "--node-config", "DIGITS", "--unknown", "0", "--out", "OUT/scores.csv"),
}  # fmt: skip
# These need a generator, and each the file of the one before.
WITH_A_GENERATOR = ("generator synthesize", "generator classify", "generator ood")


def leaves(command: click.Command, name: str = "") -> Iterator[str]:
    """The names of all subcommands that a person types."""
    if not isinstance(command, click.Group):
        yield name
        return
    for key, inner in command.commands.items():
        yield from leaves(inner, f"{name} {key}".strip())


def test_every_command_is_tried() -> None:
    every = set(leaves(typer.main.get_command(fedsurrogate.client_app.cli.main.app)))
    # `home` opens a ledger; the tests of `fetch` and `restore` look at their files.
    assert every == set(COMMANDS) - {"check --sheet", "check --attack"} | SERVE | {
        "ledger open",
        "fetch",
        "restore",
    }


def tried(home: Path, out: Path, patch: pytest.MonkeyPatch, name: str, **places: str) -> None:
    """Run a command under an open umask; nothing that it makes, keeps or writes is readable."""
    words = (word.replace("HOME", str(home)).replace("OUT", str(out)) for word in COMMANDS[name])
    out.mkdir(mode=0o700, exist_ok=True)
    places = {"NODE": (home / "node.txt").read_text()} | places
    kept = [home / f"clinic-0-{kind}" for kind in ("state", "cache")]
    with open_umask():
        patch.setattr(tempfile, "tempdir", str(home / "tmp"))
        made = Made(patch, *kept, out, home / "tmp", home / "check-log")
        done = site(*name.split(), *(places.get(word, word) for word in words))
        patch.undo()
    # Without a model that was in use before, `site models back` refuses. `site doctor` looks at all
    # SuperNodes of this machine, of which another person's may be no good.
    assert name == "doctor" or done.code == int(name == "models back"), done
    assert not made.open_to_others
    node = node_of(home)
    assert not readable(out, node.state, node.cache, node.check_log)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "adapt" else [])
        for name in COMMANDS
        if name not in WITH_A_GENERATOR
    ],
)
def test_no_command_leaves_a_file_that_other_accounts_can_read(
    home: Path, tmp_path: Path, name: str
) -> None:
    own, key = (home / "node.txt").read_text(), files_key()
    if name == "offline release":
        settings = FAST | PRIVATE | {"epsilon": 2.0}
        (home / "request.json").unlink(missing_ok=True)
        make_request(settings, home / "request.json", COORDINATOR)
        own += f' coordinator-key="{key}"'
    if name == "approve":
        proposal = SignedProposal(Proposal.fresh("run", FAST | PRIVATE, "a test", 30))
        (home / "proposal.json").write_text(proposal.text())
    (model,) = list(read_index(node_of(home)).models)
    if name == "models add":
        file = models_folder(node_of(home)) / f"{model}.fedsurrogate"
        (home / "model.fedsurrogate").write_bytes(file.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        tried(home, tmp_path / "out", patch, name, NODE=own, MODEL=model)


def files_key() -> str:
    from fedsurrogate.common.security.sealing import public_key

    return public_key(COORDINATOR).hex()


@pytest.mark.slow
def test_no_command_of_generators_leaves_a_file_that_other_accounts_can_read(
    home: Path,
    tmp_path: Path,
    generator_file: Path,
) -> None:
    digits = f"cache-dir='{tmp_path}/cache' partition-id=0 num-partitions=3"
    places = {
        "GENERATOR": str(generator_file),
        "SET": str(tmp_path / "out" / "set.safetensors"),
        "DIGITS": digits,
    }
    for name in WITH_A_GENERATOR:
        with pytest.MonkeyPatch.context() as patch:
            tried(home, tmp_path / "out", patch, name, **places)


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (("app", "--runtime", "unix:/x"), "fedsurrogate.client_app.processes.app_process.serve"),
        (("node", "--runtime", "unix:/x"), "fedsurrogate.client_app.processes.supervisor.serve_node"),
        (
            ("join", "--superlink", "127.0.0.1:1", "--insecure"),
            "fedsurrogate.client_app.processes.supervisor.Supervisor.run",
        ),
    ],
)  # fmt: skip
def test_programs_that_serve_start_everything_for_this_account_only(
    home: Path, words: tuple[str, ...], starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def look(*_: object) -> None:
        seen.append(os.umask(0o077))

    monkeypatch.setattr(starts, look)
    node = ("--node-config", (home / "node.txt").read_text()) if words[0] != "node" else ()
    with open_umask():
        done = site(*words, *node)
    assert (done.code, seen) == (0, [0o077]), done


def test_the_app_of_a_task_works_for_this_account_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    class Flower:
        def client_task(self, *_: object) -> None:
            seen.append(os.umask(0o077))

    module = fedsurrogate.client_app.processes.app_process
    monkeypatch.setattr(module, "flower", Flower)
    monkeypatch.setattr(module, "AnswerOnTermination", lambda: None)
    monkeypatch.setattr(module.sys, "argv", ["site-app"])
    with open_umask():
        module.answer()
    assert seen == [0o077]


def test_the_umask_of_a_program_that_simulates_is_as_before() -> None:
    with open_umask():
        with files.owner_only():
            assert os.umask(0o077) == 0o077
        assert os.umask(0) == 0


def opened_up(node: NodeConfig) -> list[Path]:
    """Give every file of a site the mode that earlier versions gave."""
    every = [Path(each) for each in own_files(node)]
    for path in every:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return every


def test_what_an_earlier_version_left_readable_is_closed_at_the_next_request(
    home: Path, tmp_path: Path
) -> None:
    node, mine = node_of(home), node_of(home).state / "notes-of-a-person.txt"
    mine.write_text("x")
    mine.chmod(0o644)
    try:
        every = opened_up(node)
        assert len(every) > 10
        assert set(readable_by_others(node)) == set(every)
        done = site("doctor", "--node-config", (home / "node.txt").read_text())
        assert f"they may read {len(every)} files or folders" in " ".join(done.stdout.split())
        close_to_others(node)
        assert readable(node.state, node.cache, node.check_log) == [f"{mine} 644"]
        assert (
            "none can read what is kept here"
            in site("doctor", "--node-config", (home / "node.txt").read_text()).stdout
        )
    finally:
        mine.unlink()


def test_a_request_closes_files_before_it_reads_records(tmp_path: Path) -> None:
    folders = {"state_dir": str(tmp_path / "state"), "cache_dir": str(tmp_path / "cache")}
    run_federation(tmp_path, sites(2, **folders), **FAST)
    node = NodeConfig(**folders)
    assert len(opened_up(node)) > 4
    run_federation(tmp_path, sites(2, **folders), **FAST)
    assert not readable_by_others(node)


def test_every_name_that_a_site_keeps_is_one_of_its_own(home: Path) -> None:
    """A new file in the state folder would not be closed, were it missing in the list."""
    node = node_of(home)
    known = {Path(each) for each in own_files(node)}
    for folder in (node.state, node.cache, node.check_log):
        found = set(folder.rglob("*"))
        assert found <= known, f"missing in client_app/node_config.py: {found - known}"


def test_in_a_folder_closed_to_others_nothing_is_looked_at(tmp_path: Path) -> None:
    """What a site keeps in years costs a request nothing, and is closed where a folder is opened again."""
    node = NodeConfig(state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"))
    closed, opened = tmp_path / "state" / "runs", tmp_path / "state" / "sums"
    for each in (closed / "one" / "deeper", opened / "one"):
        each.mkdir(parents=True)
        (each / "file").write_text("x")
    for each in (p for folder in (closed, opened) for p in (folder, *folder.rglob("*"))):
        each.chmod(0o755)
    closed.chmod(0o700)
    inside = {opened, opened / "one", opened / "one" / "file"}
    assert set(readable_by_others(node)) == inside
    with patch.object(os, "scandir", wraps=os.scandir) as listed:
        readable_by_others(node)
    places = [str(call.args[0]) for call in listed.call_args_list]
    assert str(opened) in places
    assert not [each for each in places if each.startswith(str(closed))]
    closed.chmod(0o711)
    assert set(readable_by_others(node)) == inside | {closed, *closed.rglob("*")}
    close_to_others(node)
    assert not readable_by_others(node)
    assert (closed / "one" / "deeper" / "file").stat().st_mode & 0o777 == 0o700


def test_links_are_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "of-another"
    other.mkdir()
    (other / "file").write_text("x")
    (other / "file").chmod(0o644)
    other.chmod(0o755)
    node = NodeConfig(state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "models").symlink_to(other)
    (tmp_path / "state" / "runs").mkdir()
    (tmp_path / "state" / "runs" / "link").symlink_to(other / "file")
    close_to_others(node)
    assert (other / "file").stat().st_mode & 0o777 == 0o644
    assert other.stat().st_mode & 0o777 == 0o755
