"""A site with a million records: peak memory below 2 GB, seconds for 100,000 rows, the same
surrogate after a kill, and a private one charged once.

Rows of features (safetensors, half precision) go through the site's own code: reader, features in a
file, sums or mixtures in a stream. Each row of the table is one process.
"""

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.harness.commands import result_of, start_child
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import ROOT

DIMENSION, CLASSES, IMAGES = 128, 10, 60_000
RUNS: dict[str, dict[str, str | int | float | bool]] = {
    "lowrank, one Gaussian a class": {"fedpft.covariance": "lowrank"},
    "gram": {"fedpft.covariance": "gram"},
    "diag, ten Gaussians a class": {"fedpft.covariance": "diag", "fedpft.components": 10},
    "noisy sums, epsilon 1": {
        "epsilon": 1.0,
        "delta": 1e-7,
        "classes": ",".join(map(str, range(CLASSES))),
    },
}


def make_rows(folder: Path, rows: int) -> None:
    """Clusters with their own correlations, in half precision."""
    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(0)
    centres, y = (
        torch.randn(CLASSES, 3, DIMENSION, generator=rng),
        torch.randint(CLASSES, (rows,), generator=rng),
    )
    x = torch.empty(rows, DIMENSION, dtype=torch.float16)
    for at in range(0, rows, 50_000):
        own = y[at : at + 50_000]
        cluster = torch.randint(3, (len(own),), generator=rng)
        x[at : at + 50_000] = (
            centres[own, cluster] + torch.randn(len(own), DIMENSION, generator=rng)
        ).half()
    save_file({"x": x, "y": y}, folder / "rows.safetensors", {"fingerprint": "synthetic"})


def memory(name: str) -> float:
    """A line of this process's status, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024 / 1e9


def work(name: str, data: Path, cache: Path) -> dict[str, Any]:
    """One process: the surrogate of a site. Returns its digest, seconds, and peaks of memory in GB."""
    peaks = {"anonymous": 0.0}

    def watch() -> None:
        while True:
            peaks["anonymous"] = max(peaks["anonymous"], memory("RssAnon"))
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    from fedsurrogate.client_app.features.site_features import load_site
    from fedsurrogate.client_app.governance.policy import policy_of
    from fedsurrogate.client_app.governance.release import site_function
    from fedsurrogate.client_app.methods.job import Job
    from fedsurrogate.client_app.node_config import parse_node_config
    from fedsurrogate.common.run import parse_run

    torch.set_num_threads(1)
    node = parse_node_config(
        {"data": "safetensors", "data-dir": str(data), "cache-dir": str(cache)}
    )
    run = parse_run(RUNS[name])
    idle = memory("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    own = load_site(run, node, policy_of(node).cache_mib)
    loaded = time.process_time() - cpu
    print("loaded", flush=True)
    payload = site_function(run.plan.combination)(Job(run, node, "hospital", own)).payload
    return {
        "sha256": hashlib.sha256(payload).hexdigest(),
        "rows": len(own.train.labels),
        "streamed": own.train.folder is not None,
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "load cpu": loaded,
        "idle": idle,
        "peak": memory("VmHWM"),
        "anonymous": peaks["anonymous"],
    }


def answered(name: str, data: Path, state: Path) -> dict[str, Any]:
    """One process: the site's reply to a request, with its ledger. Returns the digest of the
    released payload.
    """
    from fedsurrogate.client_app import requests
    from fedsurrogate.client_app.governance import release
    from fedsurrogate.client_app.governance.gate import open_ledger
    from fedsurrogate.client_app.node_config import parse_node_config
    from fedsurrogate.common.run import parse_run
    from fedsurrogate.common.wire.records import from_record, to_record

    torch.set_num_threads(1)
    load = release.load_site  # type: ignore[attr-defined]

    def loaded(*given: Any) -> Any:
        own = load(*given)
        print("loaded", flush=True)
        return own

    release.load_site = loaded  # type: ignore[attr-defined]
    places = {
        "data-dir": str(data),
        "cache-dir": str(state / "cache"),
        "state-dir": str(state / "state"),
    }
    node = parse_node_config({"data": "safetensors", **places})
    if not (state / "state").exists():
        open_ledger(node)
    question = to_record(None, {"run": parse_run(RUNS[name]).digest})
    reply = requests.answer("surrogate", question, RUNS[name], "1", node, "hospital")
    return {"sha256": hashlib.sha256(from_record(reply, 2**30)[0] or b"").hexdigest()}


def extracted(cache: Path) -> str:
    """Digest of the features of IMAGES images, computed through the cache."""
    from fedsurrogate.client_app.datasets.dataset import Dataset
    from fedsurrogate.client_app.features.extraction import extract
    from fedsurrogate.common.backbones.backbones import load_backbone

    def image(index: int, shortest: int) -> Image.Image:
        return Image.frombytes("L", (8, 8), hashlib.sha512(str(index).encode()).digest()).convert(
            "RGB"
        )

    labels = torch.zeros(IMAGES, dtype=torch.int64)
    dataset = Dataset("images", labels, ("0",), labels >= 0, "synthetic", opener=image)
    features = extract(dataset, load_backbone("pixels", device="cpu"), cache)
    return hashlib.sha256(features.x.numpy().tobytes()).hexdigest()


def child(*arguments: str) -> "subprocess.Popen[str]":
    return start_child(__file__, "--child", *arguments)


def killed_while_fitting(name: str, data: Path, cache: Path, seconds: float) -> None:
    """Kill the process in the middle of its fit."""
    process = child(name, str(data), str(cache))
    assert process.stdout is not None
    while process.stdout.readline() != "loaded\n":
        assert process.poll() is None
    time.sleep(seconds / 3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def charges(name: str, data: Path, state: Path, seconds: float) -> dict[str, Any]:
    """A private request that is killed in the middle of its fit, and answered again: what the
    ledger has of it.
    """

    def entries() -> list[dict[str, Any]]:
        lines = [
            line
            for file in state.rglob("ledgers/*.jsonl")
            for line in file.read_text().splitlines()
        ]
        return [entry for entry in map(json.loads, lines) if entry.get("kind") == "release"]

    killed_while_fitting(f"answer {name}", data, state, seconds)
    before = len(entries())
    released = result_of(child(f"answer {name}", str(data), str(state)))["sha256"]
    return {
        "charges at the kill": before,
        "charges after the reply": len(entries()),
        "the ledger has the digest of what left": [entry["sha256"] for entry in entries()]
        == [released],
    }


def killed_while_extracting(folder: Path) -> dict[str, Any]:
    """Images through a backbone: one process to its end; another killed at half, and continued by a
    third.
    """
    whole = result_of(child("images", str(folder / "whole"), ""))
    process, shards = child("images", str(folder / "killed"), ""), 0
    while shards < IMAGES // 2048 // 2:
        time.sleep(0.01)
        assert process.poll() is None
        shards = len(list(folder.glob("killed/features/*.partial/*.npz")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    continued = result_of(child("images", str(folder / "killed"), ""))
    return {
        "images": IMAGES,
        "complete at the kill": shards * 2048,
        "seconds without a kill": whole["seconds"],
        "seconds after the kill": continued["seconds"],
        "same features": whole["sha256"] == continued["sha256"],
    }


def main(most: int) -> None:
    rows, kills, charged = [], {}, {}
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        folder = Path(place)
        for count in (most // 4, most // 2, most):
            make_rows(folder / str(count), count)
            for name in RUNS:
                data, cache = folder / str(count), folder / "cache"
                done = result_of(child(name, str(data), str(cache)))
                each, fit = done["rows"] / 1e5, done["cpu"] - done["load cpu"]
                used = (done["cpu"], done["load cpu"] / each, fit / each)
                rows.append(
                    (
                        name,
                        count,
                        done["seconds"],
                        *used,
                        done["idle"],
                        done["anonymous"],
                        done["peak"],
                    )
                )
                print(rows[-1], flush=True)
                if count < most:
                    continue
                if "noisy" in name:
                    charged = charges(name, data, folder / "private", fit)
                else:
                    killed_while_fitting(name, data, cache, fit)
                    again = result_of(child(name, str(data), str(cache)))
                    kills[name] = again["sha256"] == done["sha256"]
        left = [path.name for path in folder.glob("cache/*")]
        extraction = killed_while_extracting(folder)
    columns = (
        "surrogate",
        "rows",
        "s",
        "CPU s",
        "load: CPU s / 100,000 rows",
        "fit: CPU s / 100,000 rows",
    )
    columns = (*columns, "GB before", "peak GB without mapped files", "peak GB")
    title = f"A large site: {most:,} rows x {DIMENSION}, {CLASSES} classes, one thread"
    facts = {
        "same surrogate after a kill": kills,
        "noisy sums killed": charged,
        "extraction": extraction,
        "files left": left,
    }
    report("large_site", title, columns, rows, **facts)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        chosen, first, second = sys.argv[2:5]
        began = time.perf_counter()
        if chosen == "images":
            print(
                json.dumps(
                    {"sha256": extracted(Path(first)), "seconds": time.perf_counter() - began}
                )
            )
        elif chosen.startswith("answer "):
            print(json.dumps(answered(chosen.removeprefix("answer "), Path(first), Path(second))))
        else:
            print(json.dumps(work(chosen, Path(first), Path(second))))
    else:
        parser = described(__doc__)
        parser.add_argument("rows", nargs="?", type=int, default=1_000_000)
        main(parser.parse_args().rows)
