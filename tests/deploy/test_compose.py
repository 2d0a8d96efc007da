"""Checks of the compose files without Docker: every reference, every command, every network access."""

import os
import re
import shlex
import socket
import ssl
import sys
import tarfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from click import Command, Group
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode
from typer.main import get_command

import fedsurrogate.client_app.cli.main
import fedsurrogate.server_app.cli.main
from deploy import lock
from fedsurrogate.client_app.diagnostics.site_checks import is_isolated, is_supernode
from fedsurrogate.client_app.kit import KNOWN, read_kit
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.offline.keys import coordinator_key
from fedsurrogate.client_app.processes.own_account import SETTINGS
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.kit import pack_kit
from fedsurrogate.server_app.deployment.request_key import read_request_key
from tests import documents
from tests.children import ran

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Those whose containers are ours; tests/deploy/test_monitoring.py has the one of Prometheus and Grafana.
OTHERS = {DEPLOY / f"compose.{name}.yml" for name in ("gpu", "monitoring")}
FILES = sorted(set(DEPLOY.glob("compose.*.yml")) - OTHERS)
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
# Commands that pass their arguments on to Flower.
FLOWER = {"coordinator superlink": superlink, "site node": supernode}
OURS = {
    "coordinator": fedsurrogate.server_app.cli.main.app,
    "site": fedsurrogate.client_app.cli.main.app,
}
PUBLIC_PORTS = {"9092"}
PLACE = "fl.example.org:9092"


def settings_of_a_kit(folder: Path) -> dict[str, str]:
    """The .env file of a kit for the site north, parsed."""
    issue(folder / "certificates", ("fl.example.org",), ("north",))
    archive = folder / "north.tar.gz"
    pack_kit(folder / "certificates", "north", PLACE, "fedsurrogate", archive)
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    lines = (folder / "north" / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) | {
        "RUN_AS": "1000:1000"
    }


def interpolated(file: Path, settings: Mapping[str, str]) -> str:
    """A compose file with its variables replaced as by compose. Fails if a required variable is not
    set.
    """

    def value(found: re.Match[str]) -> str:
        name, kind, default = found.groups()
        assert kind != "?" or settings.get(name), found.group()
        assert kind or name in settings, found.group()
        return settings.get(name) or (default if kind == "-" else "")

    return VARIABLE.sub(value, file.read_text())


def services_of(file: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """The services of a compose file with these settings."""
    return dict(yaml.safe_load(interpolated(DEPLOY / file, settings))["services"])


def node_of(service: Mapping[str, Any]) -> NodeConfig:
    """What a hospital's app reads in its environment."""
    return parse_node_config(parse_overrides([settings_of(service)]))


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def compose(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(interpolated(request.param, settings_of_a_kit(tmp_path))))


def words(command: Any) -> list[str]:
    return [str(word) for word in command] if isinstance(command, list) else shlex.split(command)


def check_ours(arguments: list[str], settings: str = "") -> None:
    """Raise if one of our own commands would not accept these arguments, with the settings of a site in
    its environment.
    """
    command: Command = get_command(OURS[arguments[0]])
    rest = arguments[1:]
    while isinstance(command, Group) and (rest or not command.invoke_without_command):
        command = command.commands[rest.pop(0)]
    with patch.dict(os.environ, {SETTINGS: settings} if settings else {}):
        command.make_context(arguments[0], rest)


def check_started(command: list[str], settings: str = "") -> None:
    """Raise if what a container starts would not accept its arguments: a command of ours, or Flower's
    behind one.
    """
    for program, parser in FLOWER.items():
        if " ".join(command).startswith(program):
            own, rest = own_options(command), command[len(program.split()) :]
            parser().parse_args([word for word in rest if word not in own])
            return
    check_ours(command, settings)


def volumes(service: Mapping[str, Any]) -> dict[str, str]:
    """Mount point of each volume; read-only ones end with :ro."""
    return dict(text.split(":", 1) for text in service.get("volumes", ()))


def own_options(command: list[str]) -> tuple[str, ...]:
    """The options of `site node` itself, with their values; Flower gets the others."""
    own = ("--runtime", "--retry") if command[:2] == ["site", "node"] else ()
    return tuple(
        word for name in own if name in command for word in command[command.index(name) :][:2]
    )


def is_node(service: Mapping[str, Any]) -> bool:
    """Whether a service is a hospital's SuperNode."""
    return words(service["command"])[:2] == ["site", "node"]


def networks(service: Mapping[str, Any]) -> set[str]:
    return set(service.get("networks", ()))


@pytest.mark.parametrize("role", ["coordinator", "hospital"])
def test_figures_are_shown_by_a_container_that_sees_no_data_no_ledger_and_no_key(
    role: str, tmp_path: Path
) -> None:
    text = interpolated(DEPLOY / f"compose.{role}.yml", settings_of_a_kit(tmp_path))
    compose = yaml.safe_load(text)
    service = compose["services"]["metrics"]
    assert service["profiles"] == ["monitoring"]
    assert "ports" not in service
    seen = set(volumes(service))
    assert seen <= {
        "./certificates/ca.crt", "./certificates/server.crt", "./runs", "./registered", "./runtime", "./control",
    }  # fmt: skip
    shared = service.get("network_mode", "").partition(":")[2]
    joined = compose["services"][shared] if shared else service
    assert joined["networks"]["monitoring"] == {"aliases": ["exporter"]}
    assert compose["networks"]["monitoring"] == {"internal": True}


def test_every_reference_is_defined(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        assert networks(service) <= set(compose.get("networks", ())), name
        assert set(service.get("depends_on", ())) <= set(services), name
        mode = service.get("network_mode", "none")
        assert mode == "none" or mode.partition(":")[2] in services, name
        for volume in volumes(service):
            assert volume.startswith((".", "$", "/")) or volume in compose["volumes"], name
    for section in ("networks", "volumes"):
        used = {
            each
            for service in services.values()
            for each in (*networks(service), *volumes(service))
        }
        assert set(compose.get(section) or ()) <= used


def test_every_command_is_one_that_its_program_takes(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        command = words(service["command"])
        if command[0] == "sh":
            (line,) = [
                each for each in command[2].split("&&") if each.strip().startswith(tuple(OURS))
            ]
            check_ours(shlex.split(line))
        else:
            check_started(command, service.get("environment", {}).get(SETTINGS, ""))
        check = service.get("healthcheck", {}).get("test", [])
        if check[1:2] == ["site"]:
            check_ours(check[1:])
        elif check:
            assert check[:3] == ["CMD", "python", "-c"], name
            compile(check[3], name, "exec")


def settings_of(service: Mapping[str, Any]) -> str:
    """The node-config of a hospital's app, from its environment."""
    return str(service["environment"][SETTINGS])


def test_every_node_config_is_one_a_site_takes_and_only_its_app_has_it(
    compose: dict[str, Any],
) -> None:
    for service in compose["services"].values():
        command = words(service["command"])
        assert "--node-config" not in command
        if command[:2] == ["site", "app"]:
            assert node_of(service).site
        elif is_node(service):
            assert SETTINGS not in service.get("environment", {})


def test_only_the_fleet_port_can_be_reached_and_nothing_runs_as_root(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert str(port).rpartition(":")[2] in PUBLIC_PORTS, name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service.get("user", "10001:10001") in ("10001:10001", "1000:1000")
        command = words(service["command"])
        if command[:2] == ["coordinator", "superlink"]:
            places = service["environment"]["FEDSURROGATE_CONTROL"], command[-1]
            assert places == ("unix:/control/link/control:9093", "unix:/runtime/link/app:9091")
            assert "--control-api-address" not in command
            assert {"/certificates/ca.key", "/certificates", "/certificates/sites"}.isdisjoint(
                where.split(":")[0] for where in volumes(service).values()
            )
    assert "USER 10001:10001" in (DEPLOY / "Dockerfile").read_text()


def test_apps_have_no_network_and_a_socket_that_only_their_own_node_shares(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    for name, service in services.items():
        command = words(service["command"])
        if command[1:2] != ["app"]:
            continue
        assert service["network_mode"] == "none", name
        assert any(re.match("unix:/runtime/(link/)?app", word) for word in command), name
        (shared,) = (volume for volume, where in volumes(service).items() if where == "/runtime")
        users = [
            words(other["command"])[:2]
            for other in services.values()
            if shared in volumes(other)
            if "profiles" not in other
        ]
        other_side = ["site", "node"] if command[0] == "site" else ["coordinator", "superlink"]
        assert sorted(users) == sorted([command[:2], other_side]), name


def test_a_hospitals_app_looks_at_its_data_and_the_health_of_its_node_shows_what_it_found(
    tmp_path: Path,
) -> None:
    app = services_of("compose.hospital.yml", settings_of_a_kit(tmp_path))["app"]
    # Where the app runs, /data and the folder of the policy are what the node-config names: a mount
    # of the file alone would keep the old one when an editor replaces it.
    node = node_of(app)
    policy = str(Path(node.policy).parent)
    assert {node.data_dir, policy} <= {each.split(":")[0] for each in volumes(app).values()}


def test_the_health_of_every_node_is_that_of_its_data_too(compose: dict[str, Any]) -> None:
    for service in filter(is_node, compose["services"].values()):
        command, check = words(service["command"]), service["healthcheck"]["test"]
        runtime = command[command.index("--runtime") + 1]
        assert check[check.index("--runtime") + 1] == runtime


def test_a_hospitals_data_is_in_its_app_alone(compose: dict[str, Any]) -> None:
    services = compose["services"]
    apps = {
        name: service
        for name, service in services.items()
        if words(service["command"])[:2] == ["site", "app"]
    }
    nodes = [service for service in services.values() if is_node(service)]
    assert len(apps) == len(nodes)
    by_hand = {name for name, service in services.items() if service.get("profiles") == ["by-hand"]}
    assert all(services[name]["network_mode"] == "none" for name in by_hand)
    for name, app in apps.items():
        for volume, where in volumes(app).items():
            users = {other for other, service in services.items() if volume in volumes(service)}
            assert where == "/runtime" or users <= {name, *by_hand}, volume
    lines = [networks(node) for node in nodes]
    assert all(not one & other for index, one in enumerate(lines) for other in lines[:index])


def test_where_people_type_commands_the_audit_log_can_be_written(compose: dict[str, Any]) -> None:
    """`coordinator run` in the SuperLink's container starts nothing without its line."""
    logs = set()
    for service in compose["services"].values():
        if words(service.get("command", ""))[1:2] not in (["superlink"], ["sites"]):
            continue
        known = service["environment"]
        log = known.get("FEDSURROGATE_AUDIT_LOG")
        folder = str(Path(log or known["FEDSURROGATE_REGISTERED"]).parent)
        (where,) = [each for each in volumes(service).values() if each.split(":")[0] == folder]
        assert not where.endswith(":ro")
        logs.add((log, dict(map(reversed, volumes(service).items()))[where]))
    assert len(logs) <= 1, "one log"


def test_every_container_has_limits_and_begins_again_after_a_crash(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        ends = service.get("profiles") == ["by-hand"] or name in ("certificates", "register")
        assert service["restart"] == ("no" if ends else "unless-stopped"), name
        assert 256 <= service["pids_limit"] <= 4096, name
        assert re.fullmatch(r"\d+g", str(service["mem_limit"])), name


def test_no_supernode_starts_code_that_a_run_brings(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        command = words(service["command"])
        assert is_isolated(command) or not is_supernode(command), name
        assert "clientapp" not in command, name


def test_no_guide_shows_a_supernode_without_isolation() -> None:
    for guide in (*documents.PAGES, DEPLOY / "demo.sh"):
        for line in guide.read_text().replace("\\\n", " ").splitlines():
            bare = re.search(r"flower-supernode(?! +--isolation process)", line)
            assert not bare or not line.lstrip().startswith(("flower-supernode", "docker", "$")), (
                f"{guide}: {line}"
            )
            assert "flower-superexec" not in line, f"{guide}: {line}"


def test_data_and_papers_are_read_only(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume, where in volumes(service).items():
            read = ("/data", "/certificates", "/server", "/kit", "/weights", "/policy", "/held-out")
            if where.split(":")[0].startswith(read) and name != "certificates":
                assert where.endswith(":ro"), f"{name}: {volume}"


def test_a_hospitals_ledger_and_its_check_log_are_on_volumes_of_their_own(tmp_path: Path) -> None:
    services = services_of("compose.hospital.yml", settings_of_a_kit(tmp_path))
    for name in ("app", "site"):
        mounted = volumes(services[name])
        assert {mounted["./state"], mounted["./check-log"]} == {"/state", "/check-log"}
    node = node_of(services["app"])
    assert (node.state, node.check_log) == (Path("/state"), Path("/check-log"))


def test_compose_and_site_join_know_the_same_settings_of_a_kit(tmp_path: Path) -> None:
    settings = settings_of_a_kit(tmp_path)
    text = (tmp_path / "north" / "compose.yml").read_text()
    asked = {name for name, _, _ in VARIABLE.findall(text)}
    assert set(settings) <= asked <= KNOWN


@pytest.mark.parametrize(
    "more",
    [
        {"WEIGHTS": "/weights/v.safetensors", "WEIGHTS_DIR": "{home}/w"},
        {"HELD_OUT": "/held-out", "HELD_OUT_DIR": "{home}/h"},
        {"HELD_OUT": "/data", "PEERS": "/state/peers.toml"},
        {"DATASET": "a,b", "LABEL_COLUMN": "class", "PATIENT_COLUMN": "who", "DEVICE": "cpu"},
        {"PARTITION_ID": "1", "NUM_PARTITIONS": "3", "CHECK_LOG": "{home}/other"},
    ],
    ids=lambda more: "-".join(more),
)
def test_a_kit_is_the_same_site_in_containers_and_as_a_process(
    tmp_path: Path, more: dict[str, str]
) -> None:
    """Up to where folders are: containers see them at the places that their volumes name."""
    own = {name: value.format(home=tmp_path) for name, value in more.items()}
    settings = settings_of_a_kit(tmp_path) | {"DATA": "./data"} | own
    kit = tmp_path / "north"
    (kit / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    text = interpolated(kit / "compose.yml", settings)
    app = yaml.safe_load(text)["services"]["app"]
    shown = parse_overrides([settings_of(app)])
    here = parse_overrides([read_kit(kit).node_config()])
    places = {place.removesuffix(":ro"): kit / folder for folder, place in volumes(app).items()}
    for name in ("data-dir", "weights-path", "held-out-dir", "peers", "policy", "coordinator-key",
                 "state-dir", "check-log-dir", "cache-dir"):  # fmt: skip
        if place := str(shown.get(name, "")):
            inside = max((each for each in places if place.startswith(each)), key=len)
            shown[name] = str(places[inside]) + place.removeprefix(inside)
    assert parse_node_config(shown) == parse_node_config(here)


def test_a_kit_holds_one_sites_certificates_for_nobody_else_to_read(tmp_path: Path) -> None:
    settings_of_a_kit(tmp_path)
    archive, kit = tmp_path / "north.tar.gz", tmp_path / "north"
    credentials = tmp_path / "certificates"
    assert archive.stat().st_mode & 0o77 == 0
    assert (kit / "certificates" / "site.key").stat().st_mode & 0o77 == 0
    own = {path.name: path.read_bytes() for path in (kit / "certificates").iterdir()}
    assert own.pop("coordinator.pub")
    assert own == {
        name: (credentials / "sites" / "north" / name).read_bytes()
        for name in ("ca.crt", "site.key", "site.pub")
    }
    pinned = parse_node_config({"coordinator-key": str(kit / "certificates" / "coordinator.pub")})
    assert coordinator_key(pinned) == public_key((credentials / "coordinator.key").read_bytes())
    assert all(
        (kit / folder).is_dir()
        for folder in ("state", "check-log", "cache", "runtime", "data", "weights", "held-out")
    )
    for name, place, file, why in (
        ("north", PLACE, "north", "north.tar.gz' exists"),
        ("east", PLACE, "east", "make it with `coordinator sites certs .* --site east`"),
        ("north", "https://fl.example.org", "again", "coordinator = 'https://fl.example.org'"),
    ):
        with pytest.raises(ConfigError, match=why):
            pack_kit(credentials, name, place, "fedsurrogate", tmp_path / f"{file}.tar.gz")


def test_the_image_gets_all_that_sites_and_coordinator_use_but_not_ray() -> None:
    """The names of the lock's packages, as the Dockerfile prints them."""
    text = (DEPLOY / "Dockerfile").read_text()
    assert 'extras="image $([ "${BACKBONES}" = no ] || echo backbones) ${EXTRAS}"' in text
    locked = lock.read()
    small, whole = locked.names(["image"]), locked.names(["image", "backbones"])
    assert locked.names(["core", "generators", "tables", "dicom", "plots"]) <= small
    assert {"torchvision", "open-clip-torch", "timm"} <= whole - small
    assert not {"ray", "pytest", "pylibjpeg-libjpeg"} & whole
    assert "pylibjpeg-libjpeg" in locked.names(["image", "dicom-decoders"])


def test_every_file_that_the_image_copies_is_sent_to_the_build() -> None:
    sent = [
        line.removeprefix("!")
        for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines()
        if line[:1] == "!"
    ]
    lines = [
        line.split()[1:]
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
    ]
    copied = [source for line in lines if not line[0].startswith("--") for source in line[:-1]]
    assert "fedsurrogate" in copied
    # A pattern with one letter in brackets is for a file that need not exist.
    assert {re.sub(r"\[(\w)\]", r"\1", source) for source in copied} <= set(sent)


def test_the_coordinators_app_reads_the_table_that_register_writes_and_cannot_change_it() -> None:
    for file in ("compose.coordinator.yml", "compose.demo.yml"):
        services = services_of(file, {"RUN_AS": "1000:1000"})
        commands = {tuple(words(each["command"])[:2]): each for each in services.values()}
        app = commands["coordinator", "app"]
        register = services["register"]
        table = Path(register["environment"]["FEDSURROGATE_REGISTERED"])
        assert app["environment"]["FEDSURROGATE_REGISTERED"] == str(table)
        (shared,) = set(volumes(app)) & set(volumes(register))
        assert volumes(register)[shared] == str(table.parent)
        assert volumes(app)[shared] == f"{table.parent}:ro"
        # Where a person calls `coordinator sites list`, for the names.
        superlink = services["superlink"]
        assert superlink["environment"]["FEDSURROGATE_REGISTERED"] == str(table)
        assert volumes(superlink)[shared] == f"{table.parent}:ro"


def test_the_coordinators_app_signs_models_with_the_key_that_kits_pin(tmp_path: Path) -> None:
    app = services_of("compose.coordinator.yml", settings_of_a_kit(tmp_path))["app"]
    (own,) = (
        own
        for own, place in volumes(app).items()
        if place == f"{app['environment']['FEDSURROGATE_SIGNING']}/coordinator.key:ro"
    )
    pinned = (tmp_path / "north" / "certificates" / "coordinator.pub").read_text().strip()
    assert public_key(read_request_key((tmp_path / own).parent)).hex() == pinned


@pytest.mark.parametrize(("held_out", "apart"), [("/held-out", True), ("/data", False)])
def test_a_kit_names_held_out_records_that_its_app_can_read(
    tmp_path: Path, held_out: str, apart: bool
) -> None:
    """Without a setting a site names none, and takes part in no evaluation."""
    settings = settings_of_a_kit(tmp_path)
    for value in ("", held_out):
        services = services_of("compose.hospital.yml", settings | {"HELD_OUT": value})
        node = node_of(services["app"])
        assert node.held_out_dir == value
    assert node.held_out_apart is apart
    assert volumes(services["app"])["./held-out"] == "/held-out:ro"
    assert "./held-out" not in volumes(services["node"])


@pytest.mark.parametrize("days", [0, 30])
def test_a_coordinator_whose_certificate_has_expired_is_not_healthy(
    tmp_path: Path, days: int
) -> None:
    issue(tmp_path, ("localhost",), ("north",), days=days)
    text = (DEPLOY / "compose.coordinator.yml").read_text()
    check = yaml.safe_load(text)["services"]["superlink"]["healthcheck"]["test"]
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    secured.set_alpn_protocols(["h2"])
    fleet = socket.create_server(("127.0.0.1", 0))
    control = socket.create_server(str(tmp_path / "control:9093"), family=socket.AF_UNIX)
    code = check[-1].replace("/certificates", str(tmp_path)).replace("/control/link", str(tmp_path))
    code = code.replace("9092", str(fleet.getsockname()[1]))

    def answer() -> None:
        with suppress(OSError):
            secured.wrap_socket(fleet.accept()[0], server_side=True)

    thread = threading.Thread(target=answer)
    thread.start()
    assert check[:3] == ["CMD", "python", "-c"]
    done = ran([sys.executable, "-c", code])
    thread.join()
    control.close()
    assert (done.returncode == 0) == (days > 0), done.stderr
    assert days or "certificate has expired" in done.stderr
