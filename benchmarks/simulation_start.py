"""Cost of a small simulation, beside the import of torch: the local engine, and Flower's, with and
without what its start can do without; and the parts of the local one.

Processor time of all processes of a run, those of Ray included, from Linux' /proc; other work on
the machine changes it little. The command has nothing but its engine, in a new working folder; all
share a home folder. Goal: with the local engine at most 1.6 times the processor time of a process that
imports torch, measured in the same run. The report is drawn after the result is printed; a row says
what has been used until then.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import ROOT

SITES = 3
ANCHOR = "import torch"
MARK = "FEDSURROGATE_MEASURED"
# Flower 1.34 passes no such choice to `ray.init`; Ray reads these variables.
WITHOUT_PRESTART = {"RAY_prestart_worker_first_driver": "0"}
SIMULATE = ["-m", "fedsurrogate.server_app.cli.main", "simulate", "--sites", str(SITES), "--engine"]
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    ANCHOR: (["-c", "import torch"], {}),
    "local engine": ([*SIMULATE, "local"], {}),
    "Flower's engine": ([*SIMULATE, "flower"], {}),
    "Flower's engine, Ray starts no idle workers": ([*SIMULATE, "flower"], WITHOUT_PRESTART),
    "Flower's engine, one process for all sites": ([*SIMULATE, "flower", "--parallel", "1"], {}),
}
# Names of processes in their command lines; of several, the first.
NAMES = (
    *("ray::", "default_worker", "dashboard/agent", "runtime_env/agent"),
    *("log_monitor", "monitor.py", "gcs_server", "raylet"),
    *("flower-superlink", "flwr-simulation", "flwr", "fedsurrogate.server_app.cli"),
)
Seconds = dict[str, float]


def used() -> float:
    """Processor seconds of all processes that have been started from here and have ended."""
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.ru_utime + times.ru_stime


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
                        times = process.cpu_times()
                        key, line = (
                            (process.pid, process.create_time()),
                            " ".join(process.cmdline()),
                        )
                        spent[key] = times.user + times.system
                        names[key] = next(
                            (name for name in NAMES if name in line), names.get(key, "other")
                        )
                except psutil.Error:
                    continue
            if ended.wait(0.1):
                return

    with tempfile.TemporaryDirectory() as folder:
        own = {MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment = os.environ | variables | own
        command = [sys.executable, *words]
        watcher = threading.Thread(target=watch)
        watcher.start()
        before = used()
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
        if len(spent) == 1:
            # Its end too, which the watcher misses.
            spent = dict.fromkeys(spent, used() - before)
    kinds: Seconds = {}
    for key, seconds in spent.items():
        kinds[names[key]] = round(kinds.get(names[key], 0.0) + seconds, 2)
    return took, kinds, len(spent)


PARTS = (
    "import torch",
    "settings, Flower and own modules",
    "run, without its metrics",
    "metrics and their intervals",
    "import of matplotlib",
    "report",
    "start and end of the process",
)
UNTIL = "local engine, until the result is printed"
# Runs the command, and writes the processor seconds of its parts up to the report into a file.
TIMED = """
import json, time
from pathlib import Path
from fedsurrogate.server_app.cli import main as command
spent, now = {}, time.process_time
def add(name, begin):
    spent[name] = spent.get(name, 0.0) + now() - begin
def timed(name, holder, key):
    before = getattr(holder, key)
    def call(*values, **named):
        begin = now()
        try:
            return before(*values, **named)
        finally:
            add(name, begin)
    setattr(holder, key, call)
def drawn(folder, before=command._draw_report):
    begin = spent["until"] = now()
    import matplotlib.figure
    add("import of matplotlib", begin)
    begin = now()
    before(folder)
    add("report", begin)
begun = now()
import torch
add("import torch", begun)
begun = now()
from fedsurrogate.client_app import clientapp, requests
from fedsurrogate.client_app.methods import evaluation
from fedsurrogate.server_app.deployment import local_engine
add("settings, Flower and own modules", begun)
timed("metrics and their intervals", evaluation, "quality_of")
timed("run", local_engine, "simulate_here")
command._draw_report = drawn
try:
    command.main()
finally:
    Path(FILE).write_text(json.dumps(spent))
"""


def parts() -> tuple[list[float], float]:
    """Processor seconds of each of PARTS in one run with the local engine, and those of its process until
    the result is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun = used()
        file = Path(folder, "parts.json")
        script = TIMED.replace("FILE", repr(str(file)))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = ["simulate", "--engine", "local"]
        subprocess.run(
            [sys.executable, "-c", script, *words],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
        total = used() - begun
        spent = json.loads(file.read_text())
    until = spent.pop("until")
    spent["run, without its metrics"] = spent.pop("run") - spent["metrics and their intervals"]
    spent["start and end of the process"] = total - sum(spent.values())
    return [spent[name] for name in PARTS], until


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--local", action="store_true", help="the local engine alone; the others keep their rows"
    )
    options = parser.parse_args()
    chosen = [name for name in VARIANTS if not (options.local and "Flower" in name)]
    # As users have it: what was compiled once is kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    measurements: dict[str, list[tuple[float, Seconds, int]]] = {name: [] for name in chosen}
    shares, until = [], list[float]()
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        parts()  # matplotlib looks for fonts once.
        for _ in range(options.repeats):
            for name in chosen:
                measurements[name].append(measured(*VARIANTS[name]))
                print(name, measurements[name][-1], flush=True)
            found = parts()
            shares.append(found[0])
            until.append(found[1])
    anchor = statistics.median(sum(kinds.values()) for _, kinds, _ in measurements[ANCHOR])
    spent = {
        name: sorted(sum(kinds.values()) for _, kinds, _ in runs)
        for name, runs in measurements.items()
    }
    rows = [
        [
            name,
            round(statistics.median(spent[name]), 2),
            *(round(spent[name][at], 2) for at in (0, -1)),
            round(statistics.median(spent[name]) / anchor, 2),
            round(statistics.median(took for took, _, _ in runs), 1),
            runs[0][2],
            len(runs),
        ]
        for name, runs in measurements.items()
    ]
    median = statistics.median(until)
    numbers = (median, min(until), max(until), median / anchor)
    rows.append([UNTIL, *(round(each, 2) for each in numbers), "", 1, len(until)])
    kinds = {name: runs[0][1] for name, runs in measurements.items()}
    columns = ["what", "processor s", "least", "most", "x import torch", "s", "processes", "runs"]
    rows += kept_rows("simulation-start", lambda row: row[0] in (*chosen, UNTIL))
    load = round(os.getloadavg()[0], 1)
    title = f"{SITES} sites on the digits"
    report("simulation-start", title, columns, rows, load=load, processes=kinds)
    medians = [statistics.median(each) for each in zip(*shares, strict=True)]
    rows = [
        [name, round(each, 3), round(each / sum(medians), 2)]
        for name, each in zip(PARTS, medians, strict=True)
    ]
    columns = ["part", "processor s", "share"]
    title = "where the time of a small simulation goes"
    report("simulation-start-parts", title, columns, rows, load=load)


if __name__ == "__main__":
    main()
