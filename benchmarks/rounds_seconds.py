"""Seconds of a round over gRPC with TLS, where sites train for a fraction of a second. Claim: such a
round takes less than 1.5 s, FedAvg of 50 rounds less than 90 s, and a site at rest less than 1.1 GB.

A SuperLink and sites that have joined, all on this machine, as real processes. For each run: seconds
of `coordinator run`, the median round, and the processor time of a site, and of the SuperLink, for
each task. The anchor is an echo of a model's size over gRPC with the same certificates, in the same
run. Memory is the proportional share (Pss) of all processes of one site. `--before FOLDER` measures a
checkout of an earlier version too, in the same run, with the same runs; its environment is its own
`.venv`, or else this one. `--repeats` measures both so often, in turn.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import ROOT
from fedsurrogate.server_app.deployment.submit import flower_environment, stop_process

CLASSES = ",".join(map(str, range(10)))
RUNS = {
    "FedAvg, 8 rounds": 'method="fedavg" fedavg.rounds=8',
    "FedAvg, 50 rounds": 'method="fedavg" fedavg.rounds=50',
    "DP-CVAE, 11 rounds": f'method="dpcvae" dpcvae.rounds=11 classes="{CLASSES}"',
    "DP-CVAE, 50 rounds": f'method="dpcvae" dpcvae.rounds=50 classes="{CLASSES}"',
    "FedLAP, 20 rounds": (
        f'method="fedlap" fedlap.model="mlp" fedlap.rounds=20 classes="{CLASSES}" '
        'fedlap.images-per-class=10 fedlap.descent="annealed"'
    ),
}
READY_SECONDS = 120.0
ECHOES, ECHO_BYTES = 200, 2600


class Site:
    """A site that has joined, as `site join` starts it."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment
            )

    def family(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def processor_seconds(self) -> float:
        """Of all processes, those included that have ended."""
        total = 0.0
        for process in self.family():
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
        return total

    def pss(self) -> int:
        """Bytes of memory, of which processes that share a page have a part each."""
        total = 0
        for process in self.family():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def tasks(self) -> int:
        return self.log.read_text().count("Receiving:")


@contextmanager
def federation(
    tree: Path, sites: int
) -> Iterator[tuple[list[Site], psutil.Process, list[str], Path]]:
    """Sites that have joined a SuperLink, its process, flags of its Control API, and a folder.

    Args:
        tree: A checkout, whose code runs.
        sites: Number of sites.
    """
    with tempfile.TemporaryDirectory() as folder:
        home, started, commands = Path(folder), [], programs(tree)
        environment = dict(flower_environment(str(home))) | {
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{commands}:{os.environ['PATH']}",
        }
        names = [f"hospital-{index}" for index in range(sites)]
        (fleet,) = free_ports(1)
        control = f"unix:{home}/link/control:9093"

        def call(*words: str) -> None:
            subprocess.run(
                [commands / "coordinator", *words], env=environment, cwd=home, check=True
            )

        flags = ["--control", control, "--root-certificates", "certificates/ca.crt"]
        call(
            "sites",
            "certs",
            "certificates",
            "--host",
            "127.0.0.1",
            *(w for n in names for w in ("--site", n)),
        )
        link = [str(commands / "coordinator"), *superlink_words(home, fleet, control)]
        with (home / "superlink.log").open("w") as log:
            superlink = subprocess.Popen(
                link, env=environment, cwd=home, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            wait_for_port(fleet)
            call("sites", "register", "certificates", *flags)
            for index, name in enumerate(names):
                node = f'site="{name}" data="digits" partition-id={index} num-partitions={sites} '
                node += f'cache-dir="{home}/cache-{index}" state-dir="{home}/state-{index}"'
                kit = home / "certificates" / "sites" / name
                command = [str(commands / "site"), "join", "--superlink", f"127.0.0.1:{fleet}"]
                command += ["--root-certificates", str(kit / "ca.crt"), "--node-config", node]
                command += ["--auth-supernode-private-key", str(kit / "site.key")]
                started.append(Site(command, home / f"{name}.log", environment))
            for site in started:
                site_ready(site)
            yield started, psutil.Process(superlink.pid), flags, home
        finally:
            for site in started:
                stop_process(site.process.pid)
            stop_process(superlink.pid)


def superlink_words(home: Path, fleet: int, control: str) -> list[str]:
    """`coordinator superlink` in a folder with its certificates; fleet: the port of the sites."""
    words = ["superlink", "--database", f"{home}/state.db"]
    words += ["--enable-supernode-auth", "--fleet-api-address", f"127.0.0.1:{fleet}"]
    words += ["--control-api-address", control]
    words += ["--serverappio-api-address", f"unix:{home}/link/app:9091"]
    for option, file in (("ca-certfile", "ca"), ("certfile", "server"), ("keyfile", "server")):
        ending = "key" if option == "keyfile" else "crt"
        words += [f"--ssl-{option}", f"{home}/certificates/{file}.{ending}"]
    return words


def programs(tree: Path) -> Path:
    """The folder of the commands of a checkout."""
    own = tree / ".venv" / "bin"
    return own if own.is_dir() else Path(sys.executable).parent


def site_ready(site: Site) -> None:
    """Wait until a site is connected, and uses no processor any more."""
    end = time.monotonic() + READY_SECONDS
    while "connected; only" not in site.log.read_text():
        if time.monotonic() > end or site.process.poll() is not None:
            raise TimeoutError(site.log.read_text()[-2000:])
        time.sleep(0.2)
    before = -1.0
    while (now := site.processor_seconds()) - before > 0.1:
        before = now
        time.sleep(2.0)


def measured(tree: Path, sites: int, runs: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each run."""
    rows = []
    with federation(tree, sites) as (started, superlink, flags, home):
        anchor = echo(home / "certificates")
        rest = max(site.pss() for site in started)
        for name in runs:
            before = [(site.processor_seconds(), site.tasks()) for site in started]
            linked = sum(superlink.cpu_times()[:2])
            settings = f"{RUNS[name]} sites={sites} deadline=600.0"
            environment = dict(flower_environment(str(home)))
            environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            command = [str(programs(tree) / "coordinator"), "run", *flags, "-c", settings]
            begun, most = time.monotonic(), 0
            with (home / "run.log").open("w") as log:
                run = subprocess.Popen(
                    command, env=environment, cwd=home, stdout=log, stderr=subprocess.STDOUT
                )
                while run.poll() is None:
                    time.sleep(0.5)
                    most = max(most, started[0].pss())
            seconds, text = time.monotonic() - begun, (home / "run.log").read_text()
            if run.returncode:
                raise RuntimeError(text[-2000:] + started[0].log.read_text()[-2000:])
            folder = Path(re.findall(r"\S+", text)[-1])
            rounds = json.loads((home / folder / "metrics.json").read_text())["rounds"]
            taken = seconds_of(rounds)
            spent = sum(site.processor_seconds() for site in started) - sum(s for s, _ in before)
            linked = sum(superlink.cpu_times()[:2]) - linked
            tasks = sum(site.tasks() for site in started) - sum(count for _, count in before)
            rows.append(
                {
                    "run": name,
                    "sites": sites,
                    "seconds": round(seconds, 1),
                    "least round": round(min(taken), 2),
                    "median round": round(statistics.median(taken), 2),
                    "longest": round(max(taken), 2),
                    "echo ms": round(1000 * anchor, 1),
                    "processor seconds a task": round(spent / max(1, tasks), 3),
                    "of the SuperLink": round(linked / max(1, tasks), 3),
                    "tasks": tasks,
                    "MB at rest": rest // 10**6,
                    "MB at most": most // 10**6,
                }
            )
            print(rows[-1], flush=True)
    return rows


def echo(certificates: Path) -> float:
    """Median seconds of a call that returns what it is given, over gRPC with TLS."""
    handler = grpc.method_handlers_generic_handler(
        "echo", {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request)}
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    pair = tuple((certificates / f"server.{each}").read_bytes() for each in ("key", "crt"))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    trust = grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes())
    seconds, content = [], os.urandom(ECHO_BYTES)
    with grpc.secure_channel(f"127.0.0.1:{port}", trust) as channel:
        call = channel.unary_unary("/echo/Echo")
        for _ in range(ECHOES):
            begun = time.perf_counter()
            assert call(content) == content
            seconds.append(time.perf_counter() - begun)
    server.stop(None)
    return statistics.median(seconds)


def seconds_of(rounds: list[dict[str, Any]]) -> list[float]:
    """Seconds of each round; a run counts them from its beginning."""
    ends = [each["seconds"] for each in rounds]
    return [end - begin for begin, end in pairwise(ends)]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for_port(port: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--before", type=Path, help="checkout of an earlier version")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    trees = {"before": options.before.resolve()} if options.before else {}
    trees["now"] = ROOT
    rows = [
        {"version": version} | row
        for _ in range(options.repeats)
        for version, tree in trees.items()
        for row in measured(tree, options.sites, options.runs)
    ]
    columns = list(rows[0])
    title = f"rounds over gRPC with TLS, {options.sites} sites on the digits"
    load = round(os.getloadavg()[0], 1)
    report(
        f"rounds-seconds-{options.sites}", title, columns, [[*r.values()] for r in rows], load=load
    )


if __name__ == "__main__":
    main()
