"""A hospital and its coordinator in containers: the commands of the guides, as printed, and what
each container reaches.
"""

import os
import random
import socket
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from tests.containers import IMAGE, engine, run
from tests.deploy.test_compose import DEPLOY
from tests.deploy.test_guides import calls
from tests.e2e.processes import free_ports, until

pytestmark = pytest.mark.slow

USER = "1000:1000" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"
# As in the guide, at one hospital.
DATA = 'classes="no,yes" image-size=28 epsilon=1.0 delta=1e-5'
RUN = f'method="dpcvae" dpcvae.rounds=2 dpcvae.local-epochs=1 sites=1 {DATA} deadline=400.0'
ROUNDS = f'method="dp-fedavg" fedavg.rounds=40 fedavg.local-epochs=1 sites=1 {DATA} deadline=400.0'
REACH = """
import socket, sys
for host, port in (each.rsplit(":", 1) for each in sys.argv[1:]):
    try:
        socket.create_connection((host, int(port)), 3).close()
        print("reached", host, port)
    except OSError:
        pass
"""


class Machine:
    """A folder with a compose file and its `.env`; by hand it runs what the guides print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine, self._compose = engine()

    def compose(self, *words: str) -> str:
        profile = (
            ["--profile", "by-hand"]
            if self._compose == ["podman-compose"] and words[:1] == ("run",)
            else []
        )
        return run(*self._compose, *profile, *words, cwd=self.folder)

    def inside(self, service: str, *words: str) -> str:
        return self.compose("exec", "-T", service, *words)


def own_address() -> str:
    """The address of this machine by which its containers reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def owned(folder: Path) -> None:
    """Give a folder to the user of the containers."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, *map(int, USER.split(":")))


@pytest.fixture(scope="module")
def address() -> str:
    return f"{own_address()}:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Machine]:
    engine()
    folder = tmp_path_factory.mktemp("containers") / "federation"
    folder.mkdir(parents=True)
    for above in (folder.parent, folder.parent.parent):
        above.chmod(0o755)
    (folder / "compose.yml").write_text((DEPLOY / "compose.coordinator.yml").read_text())
    (folder / ".env").write_text(
        f"RUN_AS={USER}\nIMAGE={IMAGE}\nFLEET_PORT={address.rpartition(':')[2]}\n"
    )
    for name in ("state", "app", "runs", "registered", "runtime", "control"):
        (folder / name).mkdir()
    owned(folder)
    machine = Machine(folder)
    named = ["--host", address.rpartition(":")[0], "--site", "north", "--site", "east"]
    credentials(machine, "sites", "certs", "certificates", *named)
    credentials(
        machine, "sites", "kit", "certificates", "north", "--coordinator", address, "--image", IMAGE
    )
    try:
        machine.compose("up", "-d")
        until(lambda: (folder / "registered" / "registered.json").exists(), 180)
        yield machine
    finally:
        machine.compose("down", "--timeout", "5")


def credentials(machine: Machine, *words: str) -> str:
    """The function of the guide."""
    mounted = ["--user", USER, "--network", "none", "-v", f"{machine.folder}:/work", "-w", "/work"]
    return run(machine.engine, "run", "--rm", *mounted, IMAGE, "coordinator", *words)


@pytest.fixture(scope="module")
def hospital(coordinator: Machine) -> Iterator[Machine]:
    with tarfile.open(coordinator.folder / "north.tar.gz") as archive:
        archive.extractall(coordinator.folder.parent)
    kit = Machine(coordinator.folder.parent / "north")
    with (kit.folder / ".env").open("a") as settings:
        settings.write(f"RUN_AS={USER}\n")
    for number in range(400):
        folder = kit.folder / "data" / ("no", "yes")[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = random.Random(number).randbytes(28 * 28)
        Image.frombytes("L", (28, 28), pixels).point(
            lambda grey, at=number % 2: grey // 2 + 100 * at
        ).save(folder / f"{number}.png")
    owned(kit.folder)
    try:
        # As both pages print it, once.
        assert "opened" in kit.compose("run", "--rm", "site", "site", "ledger", "open")
        kit.compose("up", "-d")
        yield kit
    finally:
        kit.compose("down", "--timeout", "5")


def test_apps_reach_nothing_and_a_hospital_only_the_fleet_port(
    coordinator: Machine, hospital: Machine, address: str
) -> None:
    fleet, host = address, address.rpartition(":")[0]
    with socket.create_server(("0.0.0.0", 0)) as listener:
        Thread(target=lambda: [listener.accept() for _ in range(9)], daemon=True).start()
        service = f"{host}:{listener.getsockname()[1]}"
        targets = [
            service, fleet, "superlink:9092", "superlink:9091", "node:9094", "127.0.0.1:9093",
        ]  # fmt: skip
        for machine in (coordinator, hospital):
            assert (
                machine.inside("app", "python", "-c", "print(*open('/proc/net/dev'))").count(":")
                == 1
            ), "not only lo"
            assert "reached" not in machine.inside("app", "python", "-c", REACH, *targets)
        found = hospital.inside(
            "node", "python", "-c", REACH, fleet, f"{host}:9091", f"{host}:9093", "127.0.0.1:9094"
        )
    assert f"reached {fleet.replace(':', ' ')}" in found
    assert found.count("reached") == 1


def test_the_kits_commands_work_as_printed(
    coordinator: Machine, hospital: Machine, address: str
) -> None:
    printed = [
        line
        for page, service, line in calls()
        if page.endswith("kit/README.md") and service == "site"
    ]
    link = next(
        line for page, service, line in calls() if page == "deploy/README.md" and service == "node"
    )
    assert "finished:completed" in coordinator.inside("superlink", "coordinator", "run", "-c", RUN)
    # A ledger is opened once.
    commands = [line for line in printed if "open" not in line]
    assert [] in commands
    for line in commands:
        found = hospital.compose("run", "--rm", "site", *line)
        assert not any(word in found for word in ("error", "FAIL")), line
    assert "PASS" in hospital.compose(
        "run", "--rm", "node", *(word.replace("fl.example.org:9092", address) for word in link)
    )
    assert "known      north" in coordinator.compose("run", "--rm", "register")


def test_the_guides_commands_work_as_printed(
    coordinator: Machine, hospital: Machine, address: str
) -> None:
    """In the guide's order, at one hospital; the placeholder NAME is the new hospital, east."""
    outputs: dict[str, str] = {}
    known = {"fl.example.org:9092": address, "NAME": "east", "sites=3": "sites=1"}
    for page, service, line in calls():
        words = [" ".join(line[:3]), *line] if page == "deploy/README.md" else []
        # What the fixtures have done already.
        if (
            not words
            or {"--host", "open"} & set(line)
            or line[2:5] == ["kit", "certificates", "north"]
        ):
            continue
        for old, new in known.items():
            line = [word.replace(old, new) for word in line]
        before(words[0], coordinator, hospital)
        if service == "":
            found = credentials(coordinator, *line[1:])
        elif service == "superlink":
            found = coordinator.inside(service, *line)
        else:
            found = (hospital if service in ("site", "node") else coordinator).compose(
                "run", "--rm", service, *line
            )
        assert not any(word in found for word in ("error", "FAIL")), (line, found)
        outputs[words[0]] = found
        if words[0] == "site offline key":
            (key,) = (each for each in found.splitlines() if each.startswith("north = "))
            (coordinator.folder / "keys.toml").write_text(key)
        if "--renew" in line:
            coordinator.compose("restart", "superlink")
    assert "finished:completed, 1 of 1 sites used" in outputs["coordinator run -c"]
    assert "stopped" in outputs["coordinator stop latest"]
    assert "no, yes" in hospital.compose("run", "--rm", "site", "site", "models", "list"), (
        "the signed model of the run is kept"
    )
    assert "epsilon 1" in outputs["coordinator offline learn"]
    assert "unregistered  east" in outputs["coordinator sites unregister"]
    assert "known      east" in outputs[""], (
        "the last command lists the keys, with the new one of east"
    )


def before(command: str, coordinator: Machine, hospital: Machine) -> None:
    """What a person does before a command of the guide."""
    if command == "coordinator stop latest":
        coordinator.compose("exec", "-T", "-d", "superlink", "coordinator", "run", "-c", ROUNDS)
        until(lambda: any((coordinator.folder / "runs").glob("*-dp-fedavg-*/events.jsonl")))
    elif command == "coordinator offline request":
        (coordinator.folder / "spring.json").unlink(missing_ok=True)
    elif command == "site offline release":
        move(coordinator, "spring.json", hospital)
    elif command == "coordinator offline learn":
        bundle = (hospital.folder / "state" / "north.bundle").read_bytes()
        (coordinator.folder / "north.bundle").write_bytes(bundle)
        owned(coordinator.folder)


def move(coordinator: Machine, file: str, hospital: Machine) -> None:
    """Carry a file from the coordinator to a hospital's folder `state`."""
    (hospital.folder / "state" / file).write_bytes((coordinator.folder / file).read_bytes())
    owned(hospital.folder / "state")


def test_containers_have_their_limits(coordinator: Machine, hospital: Machine) -> None:
    limits = (
        "import pathlib; print(*(f.read_text().strip() for f in "
        "pathlib.Path('/sys/fs/cgroup').rglob('pids.max')))"
    )
    for machine, service in ((coordinator, "superlink"), (hospital, "app")):
        assert "4096" in machine.inside(service, "python", "-c", limits).split()


if sys.platform != "linux":
    pytest.skip("containers share Unix sockets on Linux only", allow_module_level=True)
