"""No failure at a site leaks its data: the tests put secrets everywhere, and search for them in all
that left the site.
"""

from __future__ import annotations

import base64
import logging
import platform
import shutil
import socket
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedsurrogate.client_app.governance.ledger import dataset_id
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.common.errors import PUBLIC_SENTENCES, FedSurrogateError, RunError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.wire.records import INFO, to_record
from tests.e2e.processes import federation
from tests.e2e.test_in_process import image_folder
from tests.grid import (
    FAST,
    InProcessGrid,
    NodeConfig,
    events_of,
    metrics_of,
    open_new,
    run_federation,
    run_folders,
)
from tests.registry import TINY, settings_of

# One secret for every possible place; each begins with this.
MARK = "geheim"
QUICK: dict[str, Any] = FAST | {"fedpft.covariance": "spherical", "quorum": 0.5, "deadline": 30.0}


class Sudden(BaseException):
    """A BaseException that is not an Exception, as Rust libraries raise it for a panic."""


@dataclass
class Hospital:
    """A site's folder with secret names only, its node-config, and a stack to undo changes to it."""

    root: Path
    node: NodeConfig
    settings: dict[str, Any] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def data(self) -> Path:
        return Path(str(self.node["data-dir"]))

    @property
    def state(self) -> Path:
        return Path(str(self.node["state-dir"]))

    def replaced(self, target: str, value: Any) -> None:
        """Replace a name in the code until the end of the test."""
        module, _, name = target.rpartition(".")
        __import__(module)
        self.undo.enter_context(patch.object(sys.modules[module], name, value))

    def raising(self, target: str, error: BaseException) -> None:
        def fail(*_: object, **__: object) -> Any:
            raise error

        self.replaced(target, fail)


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hospital]:
    monkeypatch.setenv("HOSPITAL_TOKEN", f"{MARK}-environment")
    monkeypatch.setattr(socket, "gethostname", lambda: f"{MARK}-host")
    monkeypatch.setattr(platform, "node", lambda: f"{MARK}-host")
    root = tmp_path / f"{MARK}-root"
    data = image_folder(root / f"{MARK}-data", range(60))
    for row, file in enumerate(sorted(data.rglob("*.png"))):
        file.rename(file.with_name(f"{MARK}-patient-{row}.png"))
    shutil.copytree(data / "3", data / f"{MARK}-rare")
    policy = root / f"{MARK}-policy.toml"
    policy.write_text(
        "without-dp = true\nsmallest-class = 2\nepsilon-per-run = 10.0\nepsilon-total = "
        "20.0\ndelta = 0.001\nexact-sums-at-models = true\nexact-runs-may-differ = true\n"
    )
    node: NodeConfig = {
        "site": "clinic",
        "data": "imagefolder",
        "data-dir": str(data),
        "policy": str(policy),
    }
    node |= {
        name: str(root / f"{MARK}-{name}") for name in ("state-dir", "cache-dir", "check-log-dir")
    }
    open_new(node)
    with ExitStack() as undo:
        yield Hospital(root, node, {"classes": "0,1,2,3"}, undo)
    _let_go(root)


def _let_go(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


class OtherRun(Run):
    """A run whose settings have another digest."""

    digest = MARK  # type: ignore[assignment]


def of_another_digest(flat: dict[str, Any]) -> Run:
    run = parse_run(flat)
    return OtherRun(run.settings, run.method, run.plan)


Break = Callable[[Hospital], None]
BOOM = f"{MARK}-exception in /mnt/{MARK}/patient"


def node(**values: Any) -> Break:
    return lambda h: h.node.update({key.replace("_", "-"): value for key, value in values.items()})


def run(**values: Any) -> Break:
    return lambda h: h.settings.update(
        {key.replace("__", ".").replace("_", "-"): value for key, value in values.items()}
    )


def raising(target: str, error: BaseException) -> Break:
    return lambda h: h.raising(target, error)


def answering(function: str, error: BaseException) -> Break:
    """An error where requests are answered."""
    return raising(f"fedsurrogate.client_app.requests.{function}", error)


def void(_: object) -> None:
    """Discard a value."""


def both(first: Break, second: Break) -> Break:
    return lambda h: void((first(h), second(h)))


def policy(text: str) -> Break:
    return lambda h: void(Path(str(h.node["policy"])).write_text(text))


def break_images(h: Hospital) -> None:
    for file in h.data.rglob("*.png"):
        file.write_bytes(f"{MARK}-content".encode() * 20)


def a_link_to_nowhere(h: Hospital) -> None:
    shutil.rmtree(h.data)
    h.data.symlink_to(h.root / f"{MARK}-elsewhere")


def written(name: str, text: str) -> Break:
    return lambda h: void((h.data / name).write_text(text))


def own_weights(h: Hospital) -> None:
    file = h.root / f"{MARK}.pth"
    file.write_text(MARK)
    h.node["weights-path"] = str(file)


def ledger(content: bytes) -> Break:
    """A ledger of this data with other content."""

    def change(h: Hospital) -> None:
        file = h.state / "ledgers" / f"{dataset_id('imagefolder', str(h.data))}.jsonl"
        file.write_bytes(content)

    return change


def a_locked_ledger(h: Hospital) -> None:
    from filelock import FileLock

    (file,) = (h.state / "ledgers").glob("*.jsonl")
    h.replaced("fedsurrogate.client_app.governance.ledger.LOCK_SECONDS", 0.01)
    h.undo.enter_context(FileLock(file.with_suffix(".lock")))


def lose(h: Hospital, *folders: str) -> None:
    for folder in folders:
        shutil.rmtree(str(h.node[folder]))


def damaged_check_log(h: Hospital) -> None:
    (file,) = Path(str(h.node["check-log-dir"])).glob("*.witness")
    file.write_text(f"{MARK}-witness")


def file_in_the_way(key: str) -> Break:
    def change(h: Hospital) -> None:
        place = Path(str(h.node[key]))
        shutil.rmtree(place, ignore_errors=True)
        place.write_text(f"{MARK}-in-the-way")

    return change


def broken_key(h: Hospital) -> None:
    h.settings |= {"fedpft.topology": "chain", "fedpft.seal": True}
    file = h.state / "keys" / "clinic.key"
    file.parent.mkdir(parents=True)
    file.write_bytes(f"{MARK}-key".encode())


def a_full_disk(h: Hospital) -> None:
    """A real file on which every write fails with the operating system's error."""

    def full(path: Path, content: bytes) -> int:
        with Path("/dev/full").open("wb", buffering=0) as device:
            try:
                return device.write(content)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None

    h.replaced("os.write", lambda descriptor, line: full(Path(f"/{MARK}"), line))


def a_result_that_cannot_be_sent(h: Hospital) -> None:
    import fedsurrogate.client_app.requests as answers

    h.undo.enter_context(
        patch.dict(answers.WORK, {"surrogate": lambda asked, gate: (None, {"note": Path(BOOM)})})
    )


def a_library_that_does_not_load(h: Hospital) -> None:
    """Remove the site's code from the imported modules, as at the first message of a process."""
    import fedsurrogate.client_app.requests

    h.undo.callback(
        sys.modules.update, {"fedsurrogate.client_app.requests": fedsurrogate.client_app.requests}
    )
    del sys.modules["fedsurrogate.client_app.requests"]

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fedsurrogate.client_app.requests":
                raise OSError(f"libtorch.so: cannot open shared object file: /opt/{MARK}/lib")

    finder = Broken()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    h.undo.callback(sys.meta_path.remove, finder)


MOBILENET = "torchvision:mobilenet_v2"
PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "image-size": 8}
# Deep inside a method's work. Other methods fail where their work begins.
INSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "fedpft": ("fedsurrogate.client_app.methods.fedpft.surrogate.fit", {}),
    "sums": ("fedsurrogate.client_app.methods.fedpft.surrogate.noisy_sums", PRIVATE),
    "chain": ("fedsurrogate.client_app.methods.fedpft.surrogate.train_on_features", {"fedpft.topology": "chain"}),
    "kd": ("fedsurrogate.client_app.methods.local_training.train_on_features", {"method": "kd"}),
    "average": ("fedsurrogate.client_app.methods.local_training.train_on_features", {"method": "average"}),
    "fedavg": ("fedsurrogate.client_app.methods.fedavg.update.train", {"method": "fedavg", "fedavg.rounds": 1}),
    "dp-fedavg": (
        "fedsurrogate.client_app.methods.fedavg.update.train_privately",
        {"method": "dp-fedavg", "fedavg.rounds": 1} | PRIVATE,
    ),
    "fedlap": (
        "fedsurrogate.client_app.methods.fedlap.approximation.stream",
        {"method": "fedlap", "fedlap.model": "linear", "fedlap.rounds": 1},
    ),
    "dpcvae": ("fedsurrogate.client_app.methods.dpcvae.training.scaled", {"method": "dpcvae", "dpcvae.rounds": 2}),
}  # fmt: skip
OTHERS = {
    name: (
        spec.usual.combination.site.replace(":", "."),
        settings_of(spec, TINY) | (PRIVATE if spec.needs_budget else {}),
    )
    for name, spec in METHODS.items()
    # Where nothing but metrics leaves the sites, a failure is one of the evaluation.
    if name not in INSIDE and spec.usual.kind != "alone"
}


def within(method: str, error: BaseException) -> Break:
    target, settings = (INSIDE | OTHERS)[method]

    def change(h: Hospital) -> None:
        h.settings |= settings
        h.raising(target, error)

    return change


# The failure, and the code that the coordinator receives.
FAILURES: dict[str, tuple[Break, str]] = {
    "data folder missing": (node(data_dir=f"/mnt/{MARK}/data"), "data"),
    "data folder a link to nowhere": (a_link_to_nowhere, "data"),
    "data folder with a null in it": (node(data_dir=f"/mnt/{MARK}\0data"), "internal"),
    "all images broken": (break_images, "data"),
    "data set missing": (node(dataset=f"{MARK}-set"), "data"),
    "data set outside": (node(dataset=f"../{MARK}"), "data"),
    "table without the column": (
        written(f"{MARK}-table.csv", f"{MARK}-column,other\nx,1\n"),
        "data",
    ),
    "table of files that are not there": (
        written(f"{MARK}-table.csv", f"path,label\n{MARK}-scan.png,3\n"),
        "data",
    ),
    "table that is no text": (written(f"{MARK}-table.csv", f"path,label\n\0{MARK}"), "data"),
    "patient column missing": (node(patient_column=f"{MARK}-patient"), "data"),
    "parquet that is none": (both(node(data="parquet"), written("all.parquet", MARK)), "data"),
    "safetensors that are none": (
        both(node(data="safetensors"), written("all.safetensors", MARK)),
        "data",
    ),
    "no class of the run": (run(classes="plague"), "data"),
    "node-config with an unknown key": (node(**{f"{MARK}_key": "x"}), "config"),
    "node-config with a wrong value": (node(partition_id=f"{MARK}-number"), "config"),
    "node-config with a wrong name": (node(site=f"{MARK} clinic"), "config"),
    "weights missing": (
        both(node(weights_path=f"/mnt/{MARK}/weights.pth"), run(backbone=MOBILENET)),
        "backbone",
    ),
    "weights that are none": (both(own_weights, run(backbone=MOBILENET)), "backbone"),
    "policy missing": (node(policy=f"/mnt/{MARK}/policy.toml"), "policy"),
    "policy that is no TOML": (policy(f"{MARK} = = 1"), "config"),
    "policy with an unknown key": (policy(f'{MARK} = "x"'), "config"),
    "policy that forbids": (policy(f'methods = ["{MARK}-*"]\nwithout-dp = true'), "policy"),
    "policy against privacy of this kind": (run(epsilon=50.0, delta=1e-5), "policy"),
    "budget exhausted": (
        both(policy("epsilon-per-run = 2.0\nepsilon-total = 0.1"), run(**PRIVATE)),
        "budget",
    ),
    "ledger edited": (ledger(f'{{"{MARK}": 1}}\n'.encode()), "ledger"),
    "ledger that is none": (ledger(MARK.encode() * 100 + b"\n"), "ledger"),
    "ledger locked": (a_locked_ledger, "ledger"),
    "ledger that was never opened": (lambda h: lose(h, "state-dir", "check-log-dir"), "ledger"),
    "ledger lost": (lambda h: lose(h, "state-dir"), "ledger"),
    "check log lost": (lambda h: lose(h, "check-log-dir"), "ledger"),
    "check log damaged": (damaged_check_log, "ledger"),
    "check log folder a file": (file_in_the_way("check-log-dir"), "ledger"),
    "ledger on a full disk": (a_full_disk, "ledger"),
    "state folder a file": (file_in_the_way("state-dir"), "storage"),
    "cache folder a file": (file_in_the_way("cache-dir"), "data"),
    "key damaged": (broken_key, "seal"),
    "another exception": (answering("prepare", ValueError(BOOM)), "internal"),
    "an exception that says it is ours": (
        raising(
            "fedsurrogate.client_app.requests.prepare",
            type(f"{MARK}Error", (FedSurrogateError,), {})(BOOM),
        ),
        "internal",
    ),
    "no memory": (answering("prepare", MemoryError(BOOM)), "internal"),
    "too deep": (answering("prepare", RecursionError(BOOM)), "internal"),
    "a library that exits": (answering("prepare", SystemExit(BOOM)), "internal"),
    "a library that panics": (answering("prepare", Sudden(BOOM)), "internal"),
    "a library that does not load": (a_library_that_does_not_load, "internal"),
    "an exception after the release": (answering("to_record", TypeError(BOOM)), "internal"),
    "a result that cannot be sent": (a_result_that_cannot_be_sent, "internal"),
    "settings that cannot be read": (answering("kept_run", KeyError(BOOM)), "internal"),
    "another run's digest": (
        lambda h: h.replaced("fedsurrogate.client_app.requests.kept_run", of_another_digest),
        "surrogate",
    ),
    **{
        f"{method} fails": (within(method, ZeroDivisionError(BOOM)), "internal")
        for method in INSIDE | OTHERS
    },
    **{
        f"{method} is out of memory": (within(method, MemoryError(BOOM)), "internal")
        for method in ("fedpft", "fedavg")
    },
}
# Here the site does not know its name or folders, or cannot write there: only its console reports
# the failure.
WITHOUT_LOG = {name for name in FAILURES if name.startswith("node-config")} | {
    "state folder a file",
    "a library that does not load",
}


def all_that_left(messages: list[Message], *folders: Path) -> dict[str, bytes]:
    """Every message on the wire, including error texts, and every file of the coordinator, packed
    and unpacked.
    """
    left = {}
    for number, message in enumerate(messages):
        objects = get_all_nested_objects(message).values()
        left[f"message {number}"] = b"".join(each.deflate() for each in objects)
        if message.has_error():
            left[f"error {number}"] = str(message.error.reason).encode()
    for folder in folders:
        left |= {str(path): _unpacked(path) for path in folder.rglob("*") if path.is_file()}
        left |= {f"name {path}": path.name.encode() for path in folder.rglob("*")}
    return left


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    # A database, or its log, contains the app's archive, but is not an archive.
    if not path.suffix.startswith(".db") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            content += b"".join(archive.read(name) for name in archive.namelist())
    if content[:2] == b"\x1f\x8b":
        content += zlib.decompress(content, 31)
    return content


def assert_no_secret(left: dict[str, bytes]) -> None:
    assert left
    forms = [
        MARK.encode(),
        MARK.encode("utf-16-le"),
        MARK.encode().hex().encode(),
        base64.b64encode(MARK.encode()),
    ]
    assert not [where for where, content in left.items() if any(form in content for form in forms)]


@contextmanager
def coordinator_log() -> Iterator[list[str]]:
    """The log of the coordinator's process, without the site's log, which the same process writes
    here.
    """
    sentence: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.name.startswith("fedsurrogate.site"):
                sentence.append(logging.Formatter().format(record))

    ear, loggers = Ear(), [logging.getLogger(), logging.getLogger("flwr")]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        yield sentence
    finally:
        for logger in loggers:
            logger.removeHandler(ear)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_leaves_a_code_and_nothing_else(
    tmp_path: Path, hospital: Hospital, name: str
) -> None:
    change, code = FAILURES[name]
    with ExitStack() as undo:
        hospital.undo = undo
        change(hospital)
        grid = InProcessGrid([hospital.node])
        with coordinator_log() as sentence, pytest.raises(RunError):
            run_federation(tmp_path, grid, opened=code != "ledger", **QUICK | hospital.settings)
    (folder,) = run_folders(tmp_path / "runs")
    assert metrics_of(folder)["status"] == "failed"
    rejected = [event["reason"] for event in events_of(folder) if event["event"] == "rejected"]
    assert rejected
    assert rejected == [PUBLIC_SENTENCES[code]] * len(rejected)
    assert not [reply for reply in grid.received if reply.has_error()]
    reported = [dict(reply.content.config_records[INFO]) for reply in grid.received]
    assert set(reported[-1]) <= {"status", "site"}
    assert_no_secret(
        all_that_left(grid.received, folder.parent) | {"log": "\n".join(sentence).encode()}
    )
    log = hospital.state / "site.log"
    assert name in WITHOUT_LOG or (log.is_file() and log.read_text())


def test_a_message_of_wrong_content_is_answered_with_a_code(
    tmp_path: Path, hospital: Hospital
) -> None:
    grid = InProcessGrid([hospital.node])
    grid.run_config = {f"{MARK}-key": f"{MARK}-value"}
    contents = [
        RecordDict(),
        to_record(b"\xff" * 50, {"bytes": 50}),
        RecordDict({"x": ConfigRecord({"a": MARK})}),
    ]
    kinds = ("train", "evaluate", "query.compare", "query.hello", "query.head")
    messages = [Message(content, 1001, kind) for content in contents for kind in kinds]
    replies = list(grid.pull_messages(grid.push_messages(messages)))
    assert len(replies) == len(messages)
    assert {str(reply.content.config_records[INFO]["status"]) for reply in replies} == {"config"}
    assert_no_secret(all_that_left(replies))


def test_a_person_who_stops_the_site_gets_no_answer(hospital: Hospital) -> None:
    """There is no reply, so that the process ends. No text is needed, because Flower does not
    forward it.
    """
    grid = InProcessGrid([hospital.node])
    hospital.raising("fedsurrogate.client_app.requests.answer", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(grid.push_messages([Message(RecordDict(), 1001, "train")]))
    assert not list(grid.pull_messages(list(grid._waiting)))


def test_a_bundle_holds_nothing_of_where_it_was_made(tmp_path: Path, hospital: Hospital) -> None:
    request = Request.fresh(QUICK | {"classes": "0,1,2", "device": "cpu"}, None)
    file = tmp_path / "left" / "clinic.bundle"
    file.parent.mkdir()
    key = new_key()
    (tmp_path / "request").write_bytes(request.signed(key))
    release_to(
        file,
        tmp_path / "request",
        parse_node_config(hospital.node | {"coordinator-key": public_key(key).hex()}),
    )
    assert b"clinic" in file.read_bytes()
    assert_no_secret(all_that_left([], file.parent))


def test_a_run_that_succeeds_tells_nothing_of_a_class_left_out(
    tmp_path: Path, hospital: Hospital
) -> None:
    grid = InProcessGrid([hospital.node])
    folder = run_federation(tmp_path, grid, **QUICK | hospital.settings)
    assert metrics_of(folder)["sites"]["used"] == 1
    assert_no_secret(all_that_left(grid.received, folder.parent))


def test_a_real_site_whose_libraries_do_not_load_answers_with_a_code(tmp_path: Path) -> None:
    """Flower would send the text of an exception at import, and the SuperLink would store it."""
    library = tmp_path / f"{MARK}-lib" / "torch" / "__init__.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        f"raise OSError('/opt/{MARK}/libtorch.so: cannot open shared object file')\n"
    )
    home, output = tmp_path / "flower", tmp_path / "runs"
    config = f'site="clinic" data="digits" state-dir="{tmp_path}/{MARK}-state"'
    with federation(home, [config], at_nodes={"PYTHONPATH": str(library.parents[1])}) as running:
        status = running.run(f'sites=1 deadline=600.0 output-dir="{output}"', cwd=tmp_path)
    assert status == "finished:failed"
    (folder,) = output.iterdir()
    (rejected,) = (event for event in events_of(folder) if event["event"] == "rejected")
    assert rejected["reason"] == PUBLIC_SENTENCES["internal"]
    assert "libtorch.so" in (home / "app-0.log").read_text(), "the site's own console says why"
    left = all_that_left([], home, output)
    assert any(name.endswith("state.db") for name in left)
    assert_no_secret({name: content for name, content in left.items() if "app-0.log" not in name})
