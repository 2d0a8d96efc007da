"""Write run folders, a site's state and an exchange by file, as this commit writes them; later
commits must read them.

    PYTHONPATH=. python tests/pins/stored.py FOLDER

FOLDER must not exist. Tests read the ones in tests/pins/stored, which the commit in its commit.txt
has written. They are never written anew in place: what a later form adds gets a folder of its own,
and the old one stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.budget import Budget, spent
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from tests.children import ok, ran
from tests.grid import ROOT, InProcessGrid, NodeConfig, run_federation, run_folders

STORED = Path(__file__).parent / "stored"
CLASSES, DIMENSION, RECORDS, TESTED = ("benign", "malignant", "unclear"), 6, 45, 15
NAMED = ",".join(CLASSES)
FAST: dict[str, Any] = {"head.min-steps": 10, "head.epochs": 1, "seed": 3}
SITES = ("north", "south", "west")
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "classes": NAMED}
CHAIN: dict[str, Any] = {
    "fedpft.topology": "chain",
    "fedpft.covariance": "diag",
    "fedpft.order": ",".join(SITES),
}
RUNS: dict[str, dict[str, Any]] = {
    "fedpft": {"fedpft.rank": 2},
    "fedpft-private": BUDGET | {"fedpft.covariance": "diag"},
    "fedpft-secure-sum": {
        "fedpft.covariance": "gram",
        "secure-aggregation": True,
        "classes": NAMED,
    },
    "fedpft-chain": CHAIN,
    "fedpft-chain-interrupted": CHAIN,
    "dpcvae": {
        "method": "dpcvae",
        "dpcvae.rounds": 2,
        "dpcvae.latent": 2,
        "dpcvae.synthetic": 5,
        "dpcvae.local-epochs": 1,
    },
    "fedlap": {
        **{
            "method": "fedlap",
            "fedlap.model": "linear",
            "fedlap.rounds": 1,
            "fedlap.images-per-class": 2,
        },
        **{"fedlap.image-steps": 2, "fedlap.server-steps": 3},
    },
    "fedavg-interrupted": {"method": "fedavg", "fedavg.rounds": 4, "fedavg.local-epochs": 1},
}
# Requests for an update that the coordinator sends before its connection breaks: of two rounds, and
# of two sites.
BEFORE_THE_BREAK = {"fedavg-interrupted": 6, "fedpft-chain-interrupted": 2}
OPEN_POLICY = (
    "without-dp = true\nsmallest-class = 1\nepsilon-per-run = 100.0\nepsilon-total = 1000.0\n"
    "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
)
# Of the site whose state is stored. It has charged two releases by file, and a run in rounds that
# samples records.
TOTAL, PER_RUN, DELTA = 40.0, 8.0, 1e-5
POLICY = f"epsilon-per-run = {PER_RUN}\nepsilon-total = {TOTAL}\ndelta = {DELTA}\n"
BY_FILE = f'epsilon=8.0 delta=1e-5 classes="{NAMED}" fedpft.covariance="spherical"'
SAMPLED: dict[str, Any] = {
    **{
        "method": "dp-fedavg",
        "fedavg.rounds": 2,
        "fedavg.sample-rate": 0.5,
        "fedavg.local-epochs": 1,
    },
    **{"epsilon": 1.0, "delta": 1e-5, "classes": NAMED},
}


def write_features(folder: Path, seed: int = 0) -> None:
    """Features (n, 6) of three classes, with a split in the files."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(RECORDS + TESTED) % len(CLASSES)
    centres = 2 * torch.eye(DIMENSION)[: len(CLASSES)]
    features = centres[labels] + torch.randn(len(labels), DIMENSION, generator=generator)
    folder.mkdir(parents=True)
    for part, rows in (("train", slice(0, RECORDS)), ("test", slice(RECORDS, None))):
        content = {"x": features[rows].contiguous(), "y": labels[rows].contiguous()}
        metadata = {"classes": NAMED, "fingerprint": "f" * 16}
        save_file(content, folder / f"features-{part}.safetensors", metadata)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Settings of stored runs name folders below the working folder, so that no path of a machine
    is in them.
    """
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def nodes(home: Path, policy: str = OPEN_POLICY) -> list[NodeConfig]:
    """Node-configs of three hospitals with data in `home/data/NAME`, each with its own state."""
    found: list[NodeConfig] = []
    for name in SITES:
        own = home / "sites" / name
        own.mkdir(parents=True, exist_ok=True)
        (own / "policy.toml").write_text(policy)
        folders = {f"{each}-dir": str(own / each) for each in ("state", "check-log", "cache")}
        data: NodeConfig = {
            "data": "safetensors",
            "data-dir": str(home / "data" / name),
            "dataset": "features",
        }
        found.append({"site": name, "policy": str(own / "policy.toml")} | data | folders)
    return found


def federate(home: Path, grid: InProcessGrid | None = None, **settings: Any) -> Path:
    """A run of the three hospitals of `home`; returns its run folder."""
    with working_in(home):
        return run_federation(
            home, grid or InProcessGrid(nodes(home)), output_dir="runs", **settings
        ).absolute()


def _interrupted(home: Path, requests: int, settings: dict[str, Any]) -> Path:
    """The run folder of a run whose connection breaks after so many requests for an update."""
    grid, before = InProcessGrid(nodes(home)), set(run_folders(home / "runs"))
    push = grid.push_messages

    def breaks(messages: Any) -> Any:
        chosen = list(messages)
        if len(grid.asked("train")) == requests and any(
            each.metadata.message_type == "train" for each in chosen
        ):
            raise ConnectionError("the SuperLink is gone")
        return push(chosen)

    grid.push_messages = breaks  # type: ignore[method-assign]
    try:
        federate(home, grid, **settings)
    except ConnectionError:
        (run,) = set(run_folders(home / "runs")) - before
        return run
    raise AssertionError("the run was not interrupted")


def command(home: Path, *words: str) -> str:
    """Run `coordinator ...` or `site ...` in `home`, and return its output."""
    app = {"coordinator": "server_app", "site": "client_app"}[words[0]]
    module = f"fedsurrogate.{app}.cli.main"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = ok(ran([sys.executable, "-m", module, *words[1:]], cwd=home, env=environment))
    return done.stdout


def _hospital(home: Path, out: Path) -> dict[str, Any]:
    """A site's state after two releases by file and a run in rounds, and the last exchange by file;
    returns its spending.
    """
    north = nodes(home, POLICY)[0] | {
        "coordinator-key": str(home / "certificates" / "coordinator.pub")
    }
    node = " ".join(f'{key}="{value}"' for key, value in north.items())
    command(home, "coordinator", "sites", "key", "certificates")
    command(home, "site", "ledger", "open", "--yes", "--node-config", node)
    (out / "exchange").mkdir()
    (out / "exchange" / "keys.toml").write_text(
        command(home, "site", "offline", "key", "--node-config", node)
    )
    for number in (1, 2):
        request, bundle = f"{number}.json", f"{number}.bundle"
        asks = ("offline", "request", "certificates", "--out", request, "-c", BY_FILE)
        command(home, "coordinator", *asks)
        gives = ("offline", "release", request, "--out", bundle, "--node-config", node)
        command(home, "site", *gives)
    shutil.copy(home / "2.json", out / "exchange" / "request.json")
    shutil.copy(home / "2.bundle", out / "exchange" / "north.bundle")
    federate(home, InProcessGrid(nodes(home, POLICY)), **FAST, **SAMPLED)
    for name in ("state", "check-log"):
        ignored = shutil.ignore_patterns("*.log", "*.lock", "requests.json")
        shutil.copytree(home / "sites" / "north" / name, out / "site" / name, ignore=ignored)
    ledger = ledger_in(out / "site")
    entries = ledger.entries()
    found = {
        "entries": len(entries),
        "last": entries[-1]["hash"],
        "spent": spent(entries, budget()),
        "epsilon at delta": ledger.spent(DELTA),
    }
    ledger.path.with_suffix(".lock").unlink()
    return found


def budget() -> Budget:
    """The limits of the site's policy."""
    return Budget(TOTAL, DELTA, PER_RUN)


def ledger_in(site: Path) -> Ledger:
    """The one ledger of a site's state, with its check log."""
    (file,) = (site / "state" / "ledgers").glob("*.jsonl")
    return Ledger(file.parent, file.stem, CheckLog(site / "check-log", file.stem, site / "state"))


def write(out: Path) -> None:
    """Write everything into `out`."""
    out.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        home, hospital = Path(folder) / "runs of three", Path(folder) / "hospital"
        for number, name in enumerate(SITES):
            write_features(home / "data" / name, number)
        shutil.copytree(home / "data", out / "data")
        shutil.copytree(home / "data", hospital / "data")
        for name, settings in RUNS.items():
            own = FAST | settings
            requests = BEFORE_THE_BREAK.get(name)
            run = _interrupted(home, requests, own) if requests else federate(home, **own)
            shutil.copytree(run, out / name)
        expected = _hospital(hospital, out)
    (out / "site" / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    rooms = ("common", "client_app", "strategies", "server_app")
    commit = ran(["git", "log", "-1", "--format=%H", "--", *rooms], cwd=ROOT, check=True).stdout
    (out / "commit.txt").write_text(commit)


def main() -> None:
    """Write everything into the folder on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a folder that does not exist")
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
