"""Cost of a small simulation: Flower's engine, with and without what its start can do without, and
the local engine.

Processor time of all processes of a run, those of Ray included, from Linux' /proc; other work on
the machine changes it little. The settings train next to nothing, so that what is measured is the
start and the end.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import psutil

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import ROOT

SITES = 3
SETTINGS = "head.min-steps=20 head.epochs=1"
MARK = "FEDSURROGATE_MEASURED"
# Flower 1.34 passes no such choice to `ray.init`; Ray reads these variables.
WITHOUT_PRESTART = {"RAY_prestart_worker_first_driver": "0"}
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "local engine": (["--engine", "local"], {}),
    "Flower's engine": (["--engine", "flower"], {}),
    "Flower's engine, Ray starts no idle workers": (["--engine", "flower"], WITHOUT_PRESTART),
    "Flower's engine, one process for all sites": (["--engine", "flower", "--parallel", "1"], {}),
}
# Names of processes in their command lines; of several, the first.
NAMES = (
    *("ray::", "default_worker", "dashboard/agent", "runtime_env/agent"),
    *("log_monitor", "monitor.py", "gcs_server", "raylet"),
    *("flower-superlink", "flwr-simulation", "flwr", "fedsurrogate.server_app.cli"),
)
Seconds = dict[str, float]


def measured(words: list[str], variables: dict[str, str]) -> tuple[float, Seconds, int]:
    """Seconds, seconds of processor time by kind of process, and number of processes of a run."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    spent: dict[tuple[int, float], float] = {}
    names: dict[tuple[int, float], str] = {}
    ended = threading.Event()

    def watch() -> None:
        while True:
            for process in psutil.process_iter():
                try:
                    if process.environ().get(MARK) == mark:
                        used = process.cpu_times()
                        key, line = (
                            (process.pid, process.create_time()),
                            " ".join(process.cmdline()),
                        )
                        spent[key] = used.user + used.system
                        names[key] = next(
                            (name for name in NAMES if name in line), names.get(key, "other")
                        )
                except psutil.Error:
                    continue
            if ended.wait(0.1):
                return

    with tempfile.TemporaryDirectory() as folder:
        environment = (
            os.environ | variables | {MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
        command = [
            sys.executable,
            "-m",
            "fedsurrogate.server_app.cli.main",
            "simulate",
            "--sites",
            str(SITES),
            "-c",
            SETTINGS,
            *words,
        ]
        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, check=False, capture_output=True, text=True
            )
        finally:
            took = time.perf_counter() - started
            ended.set()
            watcher.join()
        if done.returncode:
            sys.exit(done.stderr)
    kinds: Seconds = {}
    for key, used in spent.items():
        kinds[names[key]] = round(kinds.get(names[key], 0.0) + used, 2)
    return took, kinds, len(spent)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    measurements: dict[str, list[tuple[float, Seconds, int]]] = {name: [] for name in VARIANTS}
    for _ in range(repeats):
        for name, variant in VARIANTS.items():
            measurements[name].append(measured(*variant))
            print(name, measurements[name][-1], flush=True)
    rows = [
        [
            name,
            round(statistics.median(sum(kinds.values()) for _, kinds, _ in runs), 1),
            round(statistics.median(took for took, _, _ in runs), 1),
            runs[0][2],
            len(runs),
        ]
        for name, runs in measurements.items()
    ]
    kinds = {name: runs[0][1] for name, runs in measurements.items()}
    columns = ["what", "processor s", "s", "processes", "runs"]
    load = round(os.getloadavg()[0], 1)
    report(
        "simulation-start",
        f"{SITES} sites on the digits",
        columns,
        rows,
        settings=SETTINGS,
        load=load,
        processes=kinds,
    )


if __name__ == "__main__":
    main()
