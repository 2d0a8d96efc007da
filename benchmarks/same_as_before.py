"""Whether this checkout sends the same bytes as an earlier revision: for every method, site by
site, message by message.

    PYTHONPATH=. python benchmarks/same_as_before.py [REV] [--only METHOD ...]

REV is HEAD~1 if it is not given. Its files are unpacked into a temporary folder. Then two
processes, one with these files and one with the checkout's, run every method over three sites in
one process, on the same records of the digits, with one thread, with and without privacy, and in
secure aggregation where its settings are not refused. What is drawn from the operating system follows from the run,
so noise of privacy and keys are the same too. Compared are the digest of the run, the planned bytes
as `coordinator plan` gives them, the payload of every request and of every reply, and the tensors
of the learned model. Prints a table by run; exits with 1 if anything differs, or if only one of the
two has a method.

It uses the settings, the command line, the two apps, and tests/grid.py of each revision.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "HEAD~1"
SITES, CLASSES, DIMENSION = 3, 10, 64
SHOWN, BEFORE_IT = 40, 15
NAMED = ",".join(map(str, range(CLASSES)))
BUDGET: dict[str, Any] = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "classes": NAMED,
    "fedavg.sample-rate": 1.0,
}
SUM: dict[str, Any] = {"secure-aggregation": True, "classes": NAMED}
SMALL: dict[str, Any] = {
    **{
        "partition": "iid",
        "test-fraction": 0.5,
        "seed": 5,
        "head.min-steps": 10,
        "head.epochs": 1,
        "head.max-samples": 1000,
    },
    **{
        "fedavg.rounds": 2,
        "fedavg.local-epochs": 1,
        "dpcvae.rounds": 2,
        "dpcvae.local-epochs": 1,
        "dpcvae.latent": 4,
    },
    **{
        "dpcvae.synthetic": 5,
        "fedlap.rounds": 2,
        "fedlap.image-steps": 2,
        "fedlap.server-steps": 3,
    },
    **{"fedlap.images-per-class": 2, "fedlap.model": "linear", "fedlap.trust-radius": 2.0},
}
# What every method runs in, where its settings are not refused.
SITUATIONS: dict[str, dict[str, Any]] = {
    "": {},
    "private": BUDGET,
    "secure aggregation": SUM,
    "private secure aggregation": SUM | BUDGET,
}
GRAM: dict[str, Any] = {"fedpft.covariance": "gram"}
# Further runs by name: settings. The part of a name before a comma is the method, or the kind of a
# run that counts.
RUNS: dict[str, dict[str, Any]] = {
    **{
        f"fedpft, {each}": {"fedpft.covariance": each}
        for each in ("full", "diag", "spherical", "gram")
    },
    "fedpft, mixtures": {"fedpft.components": 2},
    "fedpft, 8 bits": {"fedpft.bits": 8, "fedpft.rank": 4},
    "fedpft, chain": {"fedpft.topology": "chain", "fedpft.covariance": "diag"},
    "fedpft, private diag": BUDGET | {"fedpft.covariance": "diag"},
    "fedpft, private mixtures": BUDGET | {"fedpft.components": 2},
    "fedpft, theorem 4.1": BUDGET
    | {"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag", "epsilon": 1.0},
    "fedpft, private chain": BUDGET
    | {"fedpft.topology": "chain", "fedpft.covariance": "spherical"},
    "fedpft, secure aggregation of gram": SUM | GRAM,
    "fedpft, private secure aggregation of gram": SUM | BUDGET | GRAM,
    "fedavg, hidden layer": {"fedavg.model": "mlp", "fedavg.width": 8},
    "dp-fedavg, private secure aggregation of DP-SGD": SUM | BUDGET | {"fedavg.noise": "site"},
    "survey": {"classes": NAMED},
    "survey, private": BUDGET,
    "survey, private secure aggregation": SUM | BUDGET,
    "evaluation, private": BUDGET,
    "evaluation, private secure aggregation": SUM | BUDGET,
}
# By kind of a run that counts: the run before it whose model is evaluated.
EVALUATED = {"evaluation": "fedpft"}
COLUMNS = ("digest", "planned bytes", "requests", "replies", "model")
Found = dict[str, dict[str, Any]]


class Drawn:
    """Random bytes that follow from the name of a run, and from how many of this length were drawn
    before.

    By length, so that a name of a temporary file does not change the noise that is drawn after it.
    """

    def __init__(self) -> None:
        self.run, self.counts = "", dict[int, int]()

    def begin(self, run: str) -> None:
        self.run, self.counts = run, {}
        import torch

        torch.manual_seed(0)

    def __call__(self, count: int) -> bytes:
        self.counts[count] = self.counts.get(count, 0) + 1
        return hashlib.shake_256(f"{self.run} {count} {self.counts[count]}".encode()).digest(count)


def _imported(module: str) -> ModuleType:
    """A module of the revision in the current folder; in version 0.2 rooms were packages of their
    own.
    """
    try:
        return import_module(f"fedsurrogate.{module}")
    except ModuleNotFoundError:
        return import_module(module)


def runs_of(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Settings by name: these methods in every situation that does not refuse them, and RUNS."""
    parse, refusal = _imported("common.run").parse_run, _imported("common.errors").ConfigError
    found = {}
    for method, (situation, settings) in product(methods, SITUATIONS.items()):
        with contextlib.suppress(refusal):
            parse(SMALL | settings | {"method": method})
            found[f"{method}, {situation}".rstrip(", ")] = settings
    return found | RUNS


def measured(only: list[str], home: Path) -> Found:
    """What the files that this process imports give for each run."""
    import torch

    drawn = Drawn()
    os.urandom = drawn
    random._urandom = drawn  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    registry = _imported("common.methods")
    known = registry.METHODS
    # Another installation of the project must not answer for these files.
    assert Path(str(registry.__file__)).is_relative_to(Path.cwd()), registry.__file__
    found: Found = {}
    models: dict[str, bytes] = {}
    for name, settings in runs_of(known).items():
        kind = name.partition(",")[0]
        if only and kind not in only and name not in EVALUATED.values():
            continue
        drawn.begin(name)
        own = (
            SMALL
            | settings
            | ({"method": kind} if kind in known else _counting(kind, models, home))
        )
        try:
            found[name], models[name] = _one(own, home / name.replace(" ", "-"))
        except Exception as error:
            found[name] = dict.fromkeys(
                COLUMNS, f"{type(error).__name__}: {error}".replace(str(home), "HOME")
            )
    return found


def _counting(kind: str, models: dict[str, bytes], home: Path) -> dict[str, Any]:
    """Settings of a run that counts."""
    payload = models.get(EVALUATED.get(kind, ""))
    if payload is None:
        return {"counting.kind": kind}
    file = home / f"{kind}.pb"
    file.write_bytes(payload)
    digest = hashlib.sha256(payload).hexdigest()
    return {
        "counting.kind": kind,
        "counting.model": str(file),
        "counting.digest": digest,
    }


def _one(settings: dict[str, Any], home: Path) -> tuple[dict[str, Any], bytes]:
    """The digests of one run by column, and the model that its sites received in the end."""
    from tests.grid import InProcessGrid, run_federation, sites

    grid = InProcessGrid(sites(SITES), run_id=77)
    folder = run_federation(home, grid, **settings)
    requests, replies = (list(_payloads(messages)) for messages in (grid.sent, grid.received))
    last = [content for kind, content in requests if kind == "evaluate"]
    tensors = [
        _tensors(folder / name)
        for name in ("model.safetensors", "generator.safetensors")
        if (folder / name).is_file()
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    return {
        "digest": manifest["run"],
        "planned bytes": _planned(settings),
        "requests": _digest(requests),
        "replies": _digest(replies),
        "model": hashlib.sha256(b"".join(tensors)).hexdigest() if tensors else "none",
    }, last[-1] if last else b""


def _payloads(messages: list[Any]) -> Iterator[tuple[str, bytes]]:
    for message in messages:
        if message.has_content() and "payload" in message.content:
            yield (
                message.metadata.message_type,
                bytes(message.content.array_records["payload"]["payload"].data),
            )


def _digest(payloads: list[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for kind, content in payloads:
        whole.update(f"{kind} {len(content)} ".encode() + content)
    return (
        f"{len(payloads)} messages, {sum(len(each) for _, each in payloads)} bytes, "
        f"{whole.hexdigest()}"
    )


def _tensors(file: Path) -> bytes:
    """A safetensors file with its metadata in alphabetical order: the library writes them in any
    order.
    """
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return (
        json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True).encode()
        + content[8 + length :]
    )


def _planned(settings: dict[str, Any]) -> str:
    """What `coordinator plan` prints, as JSON."""
    coordinator = _imported("server_app.cli.main").main

    text = " ".join(
        f"{key}={json.dumps(value)}" for key, value in settings.items() if key != "counting.model"
    )
    out, words = (
        io.StringIO(),
        ["plan", "--json", "--classes", str(CLASSES), "--dimension", str(DIMENSION)],
    )
    before, sys.argv = sys.argv, ["coordinator", *words, "-c", text]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            coordinator()
    except SystemExit:
        pass
    except Exception as error:
        return type(error).__name__
    finally:
        sys.argv = before
    text = out.getvalue()
    return " ".join(text.split())


def of_files(files: Path, only: list[str]) -> Found:
    """The measurements of a process that imports these files."""
    with tempfile.TemporaryDirectory() as folder:
        out, script = Path(folder) / "found.json", Path(__file__).resolve()
        own = {
            "PYTHONPATH": str(files),
            "HOME": folder,
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        environment = os.environ | own
        command = [
            sys.executable,
            str(script),
            f"--measure={out}",
            *(f"--only={name}" for name in only),
        ]
        done = subprocess.run(
            command, cwd=files, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"the runs with {files} ended: {done.stderr[-3000:]}")
        found: Found = json.loads(out.read_text())
        return found


def compared(before: Found, now: Found) -> list[tuple[str, ...]]:
    """A row for each run: its name, and for each column "same" or what differs."""
    rows = []
    for name in before | now:
        if name not in before or name not in now:
            rows.append((name, "DIFFERENT: only one of the two has it", "", "", "", ""))
            continue
        pairs = [(before[name][column], now[name][column]) for column in COLUMNS]
        if all("Error: " in old and old == new for old, new in pairs):
            rows.append(
                (name, f"DIFFERENT: neither can run it: {pairs[0][0][:200]}", "", "", "", "")
            )
            continue
        rows.append(
            (
                name,
                *("same" if old == new else f"DIFFERENT: {_apart(old, new)}" for old, new in pairs),
            )
        )
    return rows


def _apart(old: str, new: str) -> str:
    """Two texts from a little before their first difference on."""
    equal = next(
        (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    at = max(0, equal - BEFORE_IT)
    return f"{old[at : at + SHOWN]!r} is now {new[at : at + SHOWN]!r}"


def unpacked(revision: str, folder: Path) -> Path:
    """The files of a revision in a folder."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision], capture_output=True, check=False
    )
    if archive.returncode and revision == BEFORE:
        print("skipped: needs a repository with the commit before")
        sys.exit(0)
    if archive.returncode:
        sys.exit(
            f"REV = {revision!r}: {archive.stderr.decode().strip()}; give a commit of this "
            "repository's history"
        )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "revision", nargs="?", default=BEFORE, metavar="REV", help="the earlier commit"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="METHOD",
        help="only this method, or kind of counts",
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        with tempfile.TemporaryDirectory() as folder:
            words.measure.write_text(json.dumps(measured(words.only, Path(folder))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        before = of_files(unpacked(words.revision, Path(folder)), words.only)
    rows = compared(before, of_files(ROOT, words.only))
    from rich.console import Console
    from rich.table import Table

    table = Table("run", *COLUMNS, title=f"this checkout against {words.revision}")
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)
    wrong = sum(any(cell.startswith("DIFFERENT") for cell in row) for row in rows)
    print(f"{len(rows)} runs, {wrong} of them different")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
