"""One federation of two Flowers, as hospitals move one at a time: sites of 1.34 over gRPC and of the
newest over HTTP, at a SuperLink of the newest, with TLS and registered keys.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsurrogate.common.flower.interface import HTTP_OPTION
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.submit import stop_process
from tests import newest_flower
from tests.attacks.coordinator.test_foreign_app import PATIENTS, Theft
from tests.attacks.coordinator.test_sent_code import doors
from tests.children import ok, ran
from tests.e2e.processes import (
    BIN,
    PATIENCE,
    environment,
    free_ports,
    heed_signals,
    listens,
    newest,
    until,
)
from tests.newest_flower import NEW, OLD

pytestmark = [pytest.mark.slow, newest_flower.needed]
FLOWERS = [OLD, OLD, NEW, NEW]
# Flower's own command, which reaches no Unix socket by itself.
FLWR = (
    sys.executable,
    "-P",
    "-c",
    "from fedsurrogate.common.flower.v142_fleet import reach_unix_sockets as reach; reach(); "
    "from flwr.cli.app import app; app(prog_name='flwr')",
)
ALL = 'sites=4 deadline=600.0 classes="0,1,2,3,4,5,6,7,8,9" '
PRIVATE = ALL + "epsilon=1.0 delta=1e-5 secure-aggregation=true"
LONG = 'method="fedavg" sites=4 deadline=600.0 fedavg.rounds=300 head.epochs=1'
# A coordinator that has its own code run by Flower's SuperLink, and sends it to every node from there.
AGENT = """
import json
from pathlib import Path
from flwr.agentapp import AgentApp
app = AgentApp()
@app.main()
def main(agent, context):
    def call(name, **arguments):
        reply = agent.grid.call({{"name": name, "call_id": name, "arguments": arguments}})
        return json.loads(reply["output"])
    if context.node_id != 1:
        Path({trace!r}).mkdir(exist_ok=True)
        Path({trace!r}, str(context.node_id)).touch()
        call("push_reply_message", payload=Path({secret!r}).read_text())
        return
    nodes = call("get_nodes", sample_size=None)["nodes"]
    sent = call("push_messages", messages=[
        {{"dst_node_id": each["id"], "payload": "a", "reply_to_message_id": None}} for each in nodes
    ])
    replies = []
    for each in sent["results"]:
        try:
            got = call("pull_messages", message_ids=[each["message_id"]], timeout=300)["messages"]
            replies += [one["error"] or one["payload"] for one in got]
        except Exception as error:
            replies.append("no text: " + type(error).__name__)
    Path({answers!r}).write_text(json.dumps({{"asked": len(nodes), "replies": replies}}))
"""
# The newest `flwr run` asks no question that such an app needs an answer to.
START = """
import sys
from pathlib import Path
from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from fedsurrogate.common.flower.v142_fleet import reach_unix_sockets
import hashlib
reach_unix_sockets()
app, address = sys.argv[1:]
content = build_fab_from_disk(Path(app))
version = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
with ControlHttpClient.from_server_address(address, True, None, version) as client:
    fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    print(client.StartRun(StartRunRequest(fab=fab, user_prompt="go")).run_id)
"""
# A coordinator's SuperLink that takes any app, and starts the code of it.
ROGUE = """
from fedsurrogate.common.flower import v134
from fedsurrogate.server_app.cli.main import main
from fedsurrogate.server_app.deployment import superlink
start = v134.start_own_apps
flags = ["flower-superexec", "--insecure", "--runtime-api-address"]
v134.start_own_apps = lambda command: start([*flags, command[-1]])
v134.admit_runs = lambda admit: None
superlink.check_socket = lambda address: None
main()
"""


class Two:
    """A SuperLink of the newest Flower, and four sites: two of each Flower."""

    def __init__(self, home: Path) -> None:
        self.home, self.processes = home, list[subprocess.Popen[bytes]]()
        self._fleet, self._http = free_ports(2)
        self.sockets = Path(tempfile.mkdtemp(prefix="link-"))

    def begin(self) -> None:
        """Start everything, and wait until all sites are connected."""
        home = self.home
        names = [part for each in (*range(4), "bare") for part in ("--site", str(each))]
        ok(
            self.command(
                "coordinator", "sites", "certs", "certificates", "--host", "127.0.0.1", *names
            )
        )
        credentials = home / "certificates"
        named = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        trust = [
            part for each, file in named.items() for part in (f"--ssl-{each}", credentials / file)
        ]
        link = ["superlink", "--enable-supernode-auth", "--database", str(home / "state.db")]
        link += ["--control-api-address", self.control[1]]
        link += ["--fleet-api-address", f"127.0.0.1:{self._fleet}", *map(str, trust)]
        own = ["--serverappio-api-address", f"unix:{self.sockets}/app:9091"]
        # The keys were registered before the coordinator moved.
        before = self.start("before", OLD, "coordinator", *link, *own)
        self.register(OLD)
        stop_process(before.pid)
        self.flags = [*link, HTTP_OPTION, f"127.0.0.1:{self._http}"]
        self.superlink = self.start("link", NEW, "coordinator", *self.flags, *own)
        self.register(NEW)
        for site, flower in enumerate(FLOWERS):
            node = f'data="digits" partition-id={site} num-partitions=4 site="{site}" '
            node += f'cache-dir="{home}/cache" state-dir="{home}/state-{site}"'
            self.start(
                f"site-{site}", flower, "site", "join", *self.link(site), "--node-config", node
            )
        for site in range(4):
            until(lambda site=site: "connected;" in self.log(f"site-{site}"))  # type: ignore[misc]

    def register(self, flower: Mapping[str, str]) -> None:
        """Register the sites' keys once the SuperLink listens."""
        until(lambda: listens(self.control[1]))
        done = ok(
            self.command(
                "coordinator", "sites", "register", "certificates", *self.control, flower=flower
            )
        )
        word = "registered" if flower is OLD else "known"
        assert done.stdout.count(word) == 5, done.stdout

    @property
    def control(self) -> list[str]:
        """Flags by which the coordinator's commands reach the SuperLink."""
        authority = str(self.home / "certificates" / "ca.crt")
        control = f"unix:{self.sockets}/control:9093"
        return ["--control", control, "--root-certificates", authority]

    def link(self, site: int | str, flower: Mapping[str, str] | None = None) -> list[str]:
        """Flags by which a site reaches the SuperLink."""
        flower = flower or FLOWERS[int(site)]
        kit = self.home / "certificates" / "sites" / str(site)
        port = self._fleet if flower is OLD else self._http
        key = ["--auth-supernode-private-key", str(kit / "site.key")]
        return [
            *("--superlink", f"127.0.0.1:{port}", "--root-certificates", str(kit / "ca.crt")),
            *key,
        ]

    def start(self, name: str, flower: Mapping[str, str], *command: str) -> subprocess.Popen[bytes]:
        """Start a process that keeps running."""
        with (self.home / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.home,
                env=environment(self.home / "flwr") | flower,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=heed_signals,
            )
        self.processes.append(process)
        return process

    def command(
        self, *command: str, flower: Mapping[str, str] = NEW
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return ran(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.home,
            env=environment(self.home / "flwr") | flower,
            timeout=PATIENCE,
        )

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.home / f"{name}.log").read_text()

    def run(self, settings: str) -> dict[str, Any]:
        """Metrics of a run that has finished."""
        ok(self.command("coordinator", "run", *self.control, "-c", settings))
        return newest(self.home / "runs")[1]

    def doctor(self, site: int | str, flower: Mapping[str, str] | None = None) -> dict[str, str]:
        """States of the doctor's findings about the connection."""
        node = f'data="digits" partition-id=0 num-partitions=4 state-dir="{self.home}/doctor"'
        words = ["doctor", "--node-config", node, *self.link(site, flower), "--json"]
        done = self.command("site", *words, flower=flower or FLOWERS[int(site)])
        rows = {row["what"]: row["state"] for row in json.loads(done.stdout)}
        return {what: rows[what] for what in ("port", "TLS", "key")}

    def send_agent(self, folder: Path) -> Theft:
        """Start a run of another kind, whose code reads a file at each node that runs it."""
        theft = Theft.prepare(folder, self.home)
        facts = {"trace": str(theft.trace), "answers": str(theft.answers)}
        code = AGENT.format(secret=str(self.home / "patients.csv"), **facts)
        (theft.app / "visitor" / "agent.py").write_text(code)
        settings = theft.app / "pyproject.toml"
        text = re.sub(
            r"serverapp = .*\nclientapp = .*",
            'agentapp = "visitor.agent:app"',
            settings.read_text(),
        )
        settings.write_text(text.replace("[tool.flwr.app.config]\nnodes = 0\n", ""))
        ok(
            ran(
                [sys.executable, "-c", START, str(theft.app), self.control[1]],
                env=environment(self.home / "flwr") | NEW,
            )
        )
        return theft

    def stop(self) -> None:
        """Stop what still runs."""
        for process in reversed(self.processes):
            stop_process(process.pid)
        shutil.rmtree(self.sockets)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    found = Two(tmp_path_factory.mktemp("two"))
    try:
        found.begin()
        yield found
    finally:
        found.stop()


def test_both_take_part_in_one_private_run_with_a_secure_aggregation(two: Two) -> None:
    metrics = two.run(PRIVATE)
    assert metrics["status"] == "ok"
    assert metrics["sites"] == {"invited": 4, "used": 4, "rejected": 0, "dropped": 0}
    assert metrics["privacy"]["epsilon"] == pytest.approx(1.0, abs=0.01)
    assert (metrics["card"]["names"], metrics["card"]["used"]) == (
        "registered",
        ["0", "1", "2", "3"],
    )


@pytest.mark.parametrize("site", range(4))
def test_the_doctor_of_each_knows_where_its_key_stands(two: Two, site: int) -> None:
    assert two.doctor(site) == {"port": "PASS", "TLS": "PASS", "key": "PASS"}


@pytest.mark.parametrize("flower", [OLD, NEW], ids=["1.34", "newest"])
def test_the_doctor_of_each_finds_a_key_that_is_not_registered(
    two: Two, flower: Mapping[str, str]
) -> None:
    if not (two.home / "certificates" / "sites" / "stranger").exists():
        issue(two.home / "certificates", (), ("stranger",))
    assert two.doctor("stranger", flower)["key"] == "FAIL"


def test_a_coordinator_lists_sites_and_follows_and_stops_runs(two: Two) -> None:
    done = two.command("coordinator", "sites", "list", "certificates", *two.control)
    connected = re.findall(r"│ \d +│ \w+ +│ connected", done.stdout)
    assert len(connected) == len(FLOWERS), done.stdout
    assert "never" in done.stdout, "the key of a node that has not come"
    before = two.command("coordinator", "runs", *two.control).stdout
    running = two.start("run", NEW, "coordinator", "run", *two.control, "-c", LONG)
    folders = two.home / "runs"
    known = {each.name for each in folders.glob("*")}
    until(lambda: {each.name for each in folders.glob("*")} > known)
    folder = next(each for each in folders.iterdir() if each.name not in known)
    follower = two.start("attach", NEW, "coordinator", "watch", folder.name, *two.control)
    until(lambda: "invited" in two.log("attach"))
    assert two.command("coordinator", "runs", *two.control).stdout != before
    ok(two.command("coordinator", "stop", folder.name, *two.control))
    assert [each.wait(PATIENCE) for each in (running, follower)] == [1, 1]
    assert json.loads((folder / "metrics.json").read_text())["status"] == "interrupted"


def test_a_superlink_of_the_newest_takes_no_other_app_and_listens_on_no_port_for_commands(
    two: Two, tmp_path: Path
) -> None:
    (tmp_path / "theft").mkdir()
    theft = Theft.prepare(tmp_path / "theft", two.home)
    trust = f'[superlink.attack]\naddress = "{two.control[1]}"\ninsecure = true\n'
    (two.home / "flwr" / "config.toml").write_text(trust)
    done = two.command(*FLWR, "run", str(theft.app), "attack", "--run-config", "nodes=4")
    assert done.returncode != 0
    assert "installed" in done.stdout + done.stderr
    places = doors(psutil.Process(two.superlink.pid), two._fleet)
    assert [each for each in places if each.startswith("127")] == [f"127.0.0.1:{two._http}"]


def test_no_site_runs_code_that_arrives_with_a_run(two: Two, tmp_path: Path) -> None:
    """Of another kind than a ClientApp; a SuperNode of Flower alone does run it, in the same run."""
    stop_process(two.superlink.pid)
    runtime = ["--serverappio-api-address", f"127.0.0.1:{free_ports(1)[0]}"]
    two.start("rogue", NEW, "python", "-c", ROGUE, *two.flags, *runtime)
    until(lambda: listens(two.control[1]))
    bare = [*two.link("bare", NEW), "--port", str(free_ports(1)[0])]
    node = two.start("bare", NEW, "flower-supernode", *bare)
    until(lambda: "SuperNode ID" in two.log("bare"))
    theft = two.send_agent(tmp_path / "agent")
    found = theft.result()
    stop_process(node.pid)
    assert (found["asked"], len(found["replies"])) == (5, 5), two.log("rogue")
    assert sum(PATIENTS in each for each in found["replies"]) == 1, found
    assert len(list(theft.trace.iterdir())) == 1
    assert sum("only the ClientApp" in each for each in found["replies"]) == FLOWERS.count(NEW)
    # Each site still works, and a ClientApp that arrives is not started either.
    other = Theft.prepare(tmp_path / "client", two.home)
    trust = f'[superlink.attack]\naddress = "{two.control[1]}"\ninsecure = true\n'
    (two.home / "flwr" / "config.toml").write_text(trust)
    done = two.command(*FLWR, "run", str(other.app), "attack", "--run-config", "nodes=4")
    assert "Successfully started run" in done.stdout, done.stdout + done.stderr
    found = other.result()
    assert len(found["replies"]) == 5
    assert not other.trace.exists()
    assert not any("loot" in each or PATIENTS in each for each in found["replies"])
    assert two.run(PRIVATE)["sites"]["used"] == 4
