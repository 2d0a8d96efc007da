"""Where the time of a set-up goes: from certificates to a site that waits for its first run.

The commands of a coordinator and one site on this machine, in order: certificates; the SuperLink until its
port answers; the site's key registered; `site join` until it is connected. Wall seconds and processor
seconds of all processes of a step. The anchor is a Python that imports torch, in the same run.
`--before FOLDER` measures a checkout of an earlier version too, in turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import ROOT
from benchmarks.rounds_seconds import Site, free_ports, programs, superlink_words, wait_for_port
from benchmarks.simulation_start import used
from fedsurrogate.server_app.deployment.submit import flower_environment, stop_process

Seconds = tuple[float, float]


def measured(tree: Path) -> dict[str, Seconds]:
    """Wall and processor seconds of each step with a checkout's commands."""
    found = dict[str, Seconds]()
    with tempfile.TemporaryDirectory() as folder:
        home, commands = Path(folder), programs(tree)
        environment = dict(flower_environment(folder)) | {
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{commands}:{os.environ['PATH']}",
        }

        def timed(step: str, *words: str | Path) -> None:
            began, spent = time.monotonic(), used()
            subprocess.run(words, env=environment, cwd=home, check=True, capture_output=True)
            found[step] = time.monotonic() - began, used() - spent

        def started(step: str, ready: Callable[[Site], object], *words: str | Path) -> None:
            began = time.monotonic()
            site = Site([str(word) for word in words], home / f"{step}.log", environment)
            running.append(site)
            ready(site)
            found[step] = time.monotonic() - began, site.processor_seconds()

        (port,), running = free_ports(1), list[Site]()
        control = f"unix:{home}/link/control:9093"
        flags = ("--control", control)
        flags += ("--root-certificates", f"{home}/certificates/ca.crt")
        coordinator, own = commands / "coordinator", home / "certificates"
        try:
            timed("python -c 'import torch'", sys.executable, "-c", "import torch")
            certify = ("certs", own, "--host", "127.0.0.1", "--site", "north")
            timed("certificates", coordinator, "sites", *certify)
            link = superlink_words(home, port, control)
            started("SuperLink", lambda _: wait_for_port(port), coordinator, *link)
            timed("key registered", coordinator, "sites", "register", own, *flags)
            kit = own / "sites" / "north"
            join = ["--superlink", f"127.0.0.1:{port}", "--root-certificates", kit / "ca.crt"]
            join += ["--auth-supernode-private-key", kit / "site.key", "--node-config"]
            join += [f'site="north" data="digits" state-dir="{home}/state"']
            started("site join", connected, commands / "site", "join", *join)
        finally:
            for each in running:
                with suppress(psutil.Error):
                    stop_process(each.process.pid)
    return found


def connected(site: Site) -> None:
    """Wait for its line."""
    while "connected; only" not in site.log.read_text():
        if site.process.poll() is not None:
            raise RuntimeError(site.log.read_text()[-2000:])
        time.sleep(0.02)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--before", type=Path, help="checkout of an earlier version")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    trees = {"before": options.before.resolve()} if options.before else {}
    trees["now"] = ROOT
    found = [(name, measured(tree)) for _ in range(options.repeats) for name, tree in trees.items()]
    rows = []
    for version in trees:
        for step in found[0][1]:
            wall, spent = zip(*(each[step] for name, each in found if name == version), strict=True)
            ends = (min(wall), statistics.median(wall), max(wall), statistics.median(spent))
            rows.append((version, step, *(round(each, 2) for each in ends)))
    columns = ("version", "step", "least s", "median s", "most s", "processor s, median")
    report("setup-seconds", "where the time of a set-up goes", columns, rows)


if __name__ == "__main__":
    main()
