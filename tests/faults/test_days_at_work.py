"""What happens to a federation on working days: two runs at once, a laptop sleeps, a clock jumps, data
are gone, a name moves, a certificate ends, the SuperLink's disk is full, versions change.

Hospitals are `site join`, with keys and TLS. All troubles are south's or the coordinator's: none stops
north, and nobody pays twice. Each test leaves the federation well.
"""

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fedsurrogate.client_app.processes.supervisor import SLEPT
from fedsurrogate.common.errors import PUBLIC_SENTENCES
from fedsurrogate.common.security.registrations import TABLE, read_table, write_table
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, stop_process
from tests.children import ok, ran
from tests.e2e.environments import checkout_at
from tests.e2e.hospitals import Hospital
from tests.e2e.processes import BIN, coordinator, environment, events, federation, newest, until
from tests.faults.clocks import Clock
from tests.faults.conftest import PRIVATE, Scene
from tests.faults.joined import JoinedSite
from tests.faults.links import Link
from tests.faults.test_full_disks import Disk

pytestmark = pytest.mark.faults
NAME = "fl.example.org"
ROUNDS = 'method="dp-fedavg" fedavg.rounds=3'
# Seconds for a site that is well, on a busy machine.
SOON = 60.0
NEWER = "9.9.9"


class Day(Scene):
    """North and south at work. Where this machine lets a test do so, south has the time of `clock`
    and the names of `hosts`, and the SuperLink's database lies on `disk`.
    """

    def __init__(self, home: Path, kept: ExitStack) -> None:
        self.credentials, flower, self.disk = home / "certificates", home / "flower", None
        issue(self.credentials, ("127.0.0.1", NAME), ("north", "south"))
        with suppress(pytest.skip.Exception):
            self.disk = Disk(flower, "64m")
            kept.callback(self.disk.gone)
        running = kept.enter_context(federation(flower, [], self.credentials))
        sites = {name: Hospital(home, name, seed) for seed, name in enumerate(("north", "south"))}
        super().__init__(running, sites, home)
        self.south, self.line = sites["south"], Link(running.fleet)
        self.clock, self.hosts = Clock(home), home / "hosts"
        self.stand_at("127.0.0.1")
        self.joined = {name: self._join(name) for name in sites}
        for site in self.joined.values():
            kept.callback(site.end)
        for site in self.joined.values():
            site.connected()

    def _join(self, name: str) -> JoinedSite:
        at, before, variables = self.running.fleet, list[str](), dict[str, str]()
        if name == "south":
            variables = self.clock.variables or {}
        if name == "south" and self.disk is not None:
            at = f"{NAME}:{self.line.address.rpartition(':')[2]}"
            own = 'mount --bind "$0" /etc/hosts && exec "$@"'
            before = ["unshare", "--mount", "sh", "-c", own, str(self.hosts)]
        kit = self.credentials / "sites" / name
        link = ["--superlink", at, "--root-certificates", f"{kit}/ca.crt"]
        link += ["--auth-supernode-private-key", f"{kit}/site.key"]
        return JoinedSite(self.running, self.sites[name], link, before, variables)

    def stand_at(self, address: str) -> None:
        """Let the coordinator's name mean this address at south."""
        self.hosts.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    def shows(self, *texts: str) -> None:
        """Wait until south's terminal shows all these."""
        until(lambda: all(text in self.joined["south"].shown() for text in texts))

    def restart_superlink(self) -> None:
        """Restart it with its database, and wait until both sites are connected anew."""
        before = {name: site.shown().count("connected; only") for name, site in self.joined.items()}
        stop_process(self.running.superlink.pid)
        self.running.start_superlink()
        for name, site in self.joined.items():
            site.connected(before[name] + 1)

    def works(self, more: int = 1) -> None:
        """A run uses both sites, and each has paid once for it."""
        before = self.charged()
        assert self.result(self.submit(deadline=4 * SOON))["sites"]["used"] == 2
        assert self.charged() == {name: count + more for name, count in before.items()}


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    with ExitStack() as kept:
        yield Day(tmp_path_factory.mktemp("day"), kept)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same code as a later version."""
    copy = checkout_at(tmp_path_factory.mktemp("newer") / "code")
    project = copy / "pyproject.toml"
    text = re.sub(r'(?m)^version = ".*"', f'version = "{NEWER}"', project.read_text(), count=1)
    project.write_text(text)
    return copy


def test_two_runs_at_once_are_both_served_and_a_second_superlink_does_not_start(day: Day) -> None:
    before = day.charged()
    runs = [day.submit(deadline=4 * SOON) for _ in range(2)]
    second = psutil.Process(day.running.superlink.pid)
    done = ran(second.cmdline(), timeout=300, env=environment(day.running.home), cwd=day.running.home)  # fmt: skip
    assert done.returncode != 0
    assert "in use" in done.stdout + done.stderr
    assert [day.running.wait(run) for run in runs] == ["finished:completed"] * 2
    assert day.charged() == {name: count + 2 for name, count in before.items()}


def test_a_hospital_that_slept_past_the_deadline_reads_so_and_takes_part_in_the_next_run(
    day: Day,
) -> None:
    before, site = day.charged(), day.joined["south"]
    run = day.submit_held("south", deadline=SOON)
    asleep, began = site.all(), time.monotonic()
    for process in asleep:
        process.send_signal(signal.SIGSTOP)
    assert day.result(run)["sites"]["used"] == 1
    until(lambda: time.monotonic() - began > SLEPT + 5)
    day.south.let_go()
    for process in asleep:
        process.send_signal(signal.SIGCONT)
    day.shows("this machine was asleep, or this program was stopped, for")
    until(lambda: site.process("task") is None)
    charged = day.charged()
    assert charged["north"] == before["north"] + 1
    assert charged["south"] <= before["south"] + 1
    day.works()
    assert "Traceback" not in site.shown()


def test_data_that_are_gone_after_the_join_cost_nothing_and_the_log_says_so(day: Day) -> None:
    before, data = day.charged(), day.south.home / "data"
    gone = data.rename(day.south.home / "unmounted")
    metrics = day.result(day.submit(deadline=4 * SOON))
    assert (metrics["sites"]["used"], metrics["sites"]["rejected"]) == (1, 1)
    assert day.reported("rejected")["south"] == PUBLIC_SENTENCES["data"]
    assert "no such folder" in (day.south.state / "site.log").read_text()
    gone.rename(data)
    assert day.charged() == before | {"north": before["north"] + 1}
    day.works()


def test_a_clock_that_jumps_in_a_run_is_named_with_how_much_and_which_way(day: Day) -> None:
    if day.clock.variables is None:
        pytest.skip("needs a C compiler")
    before = day.charged()
    run = day.submit_held("south", deadline=SOON)
    day.clock.set(3615)
    day.south.let_go()
    day.result(run)
    # From a node that has lost its connection; one that is heard may go on.
    day.line.cut()
    day.line.mend()
    day.shows("FAIL key: this machine's clock is 1 h ahead of the coordinator's, which refuses")
    connected = day.joined["south"].shown().count("connected; only")
    day.clock.set(0)
    day.joined["south"].connected(connected + 1)
    assert day.charged()["south"] <= before["south"] + 1
    day.works()


def test_a_name_that_moves_to_another_address_in_a_run_is_followed(day: Day) -> None:
    if day.disk is None:
        pytest.skip("needs file systems of its own")
    before = day.charged()
    run = day.submit_held("south", deadline=6 * SOON)
    other = Link(day.running.fleet, "127.0.0.2", int(day.line.address.rpartition(":")[2]))
    day.stand_at("127.0.0.2")
    day.line.cut()
    day.south.let_go()
    assert day.result(run)["sites"]["used"] == 2
    assert day.charged() == {name: count + 1 for name, count in before.items()}
    day.works()
    other.cut()
    day.line.mend()
    day.stand_at("127.0.0.1")
    day.works()


def test_a_superlink_whose_disk_is_full_charges_nobody_twice_and_serves_the_next_run(
    day: Day,
) -> None:
    """A small run may find room in its database, and end well; another waits for room."""
    if day.disk is None:
        pytest.skip("needs file systems of its own")
    before = day.charged()
    run = day.submit_held("south", deadline=6 * SOON)
    day.disk.fill()
    day.south.let_go()
    day.running.wait(run, SOON)
    day.disk.make_room()
    day.result(run)
    assert all(count <= before[name] + 1 for name, count in day.charged().items())
    day.works()


def test_the_coordinators_certificate_ends_and_sites_come_back_once_it_is_renewed(day: Day) -> None:
    issue(day.credentials, (), (), renew=True, days=0)
    stop_process(day.running.superlink.pid)
    day.running.start_superlink()
    day.shows(
        "FAIL TLS: the certificate is refused: certificate has expired", "certs FOLDER --renew"
    )
    ok(coordinator("sites", "certs", str(day.credentials), "--renew", cwd=day.home))
    day.restart_superlink()
    day.works()


def test_the_time_of_one_site_ends_in_a_run_which_goes_on_and_once_renewed_it_comes_back(
    day: Day,
) -> None:
    before, file = day.charged(), day.credentials / TABLE
    table, connected = read_table(file), day.joined["south"].shown().count("connected; only")
    run = day.submit_held("south", deadline=SOON)
    write_table(
        file, table | {"south": replace(table["south"], expires="2020-01-01T00:00:00+00:00")}
    )
    day.south.let_go()
    assert day.result(run)["sites"]["used"] == 1
    day.shows("the time has ended for which the coordinator accepts this site's key", "site enrol")
    write_table(file, table)
    day.joined["south"].connected(connected + 1)
    charged = day.charged()
    assert charged["north"] == before["north"] + 1
    assert charged["south"] <= before["south"] + 1
    day.works()


def unbegun(site: JoinedSite) -> int:
    """Messages received, less tasks begun."""
    shown = site.shown()
    return shown.count("Receiving:") - shown.count("Start `flwr-clientapp` process")


def test_a_site_that_is_upgraded_in_a_run_answers_what_it_has_received_and_goes_on(
    day: Day, newer: Path
) -> None:
    """Its message has arrived, and no task has begun."""
    site = day.joined["south"]
    app = site.await_process("app")
    rounds, balance = len(events(day.output, "round")), unbegun(site)
    run = day.submit(ROUNDS, deadline=6 * SOON)
    until(lambda: len(events(day.output, "round")) > rounds)
    app.suspend()
    until(lambda: site.process("task") is None and unbegun(site) > balance)
    site.first.terminate()
    day.shows("ending")
    app.resume()
    site.first.wait(120)
    connected = site.shown().count("connected; only")
    site.start(newer)
    site.connected(connected + 1)
    metrics = day.result(run)
    assert [entry["round"] for entry in metrics["rounds"]] == [1, 2, 3]
    assert metrics["seconds"]["total"] < 6 * SOON, "nobody waited for the deadline"
    assert day.reported("rejected")["south"].startswith("the site's app was ended")
    for each in day.sites.values():
        paid = [entry["round"] for entry in each.charges() if entry["flower_run"] == run]
        assert len(paid) == len(set(paid))
    day.works()
    assert f"this site uses its own, {NEWER}" in site.shown()


def test_a_coordinator_that_is_upgraded_in_a_run_prints_what_continues_it_with_the_next_version(
    day: Day, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints is typed, in another folder."""
    settings = (
        f'{PRIVATE} {ROUNDS} sites=2 quorum=0.3 deadline={4 * SOON} output-dir="{day.output}"'
    )
    known = environment(day.home)

    def typed(*words: str, source: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(BIN / "coordinator"), *words], cwd=day.south.home, text=True,
            env=known | {"PYTHONPATH": str(source)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    before, rounds = day.charged(), len(events(day.output, "round"))
    begun = typed("run", *day.running.control, "-c", settings, source=APP_FOLDER)
    until(lambda: len(events(day.output, "round")) > rounds)
    stop_process(day.running.superlink.pid)
    stop_process(day.running.execs[0].pid)
    monkeypatch.setenv("PYTHONPATH", str(newer))
    day.running.start_superlink()
    day.running.restart_exec(0)
    _, errors = begun.communicate(timeout=600)
    assert begun.returncode == 1
    assert "the run ended as running" not in errors
    (line,) = re.findall(r"continue it: (.*)", errors)
    program, *words = shlex.split(line)
    assert program == "coordinator"
    old = typed(*words, source=APP_FOLDER)
    assert f"installed with this SuperLink, version {NEWER}" in old.communicate(timeout=600)[1]
    again = typed(*words, source=newer)
    printed = again.communicate(timeout=900)
    assert again.returncode == 0, printed
    assert newest(day.output)[1]["privacy"]["epsilon"] <= 1.0
    for name, each in day.sites.items():
        paid = [entry["round"] for entry in each.charges()[before[name] :]]
        assert {1, 2} <= set(paid)
        assert len(paid) <= 3, "what was under way is paid, and is one of the rounds"
