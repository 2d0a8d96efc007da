"""The compose files, as far as they can be checked without Docker: every reference, every command, who reaches what."""

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command, Group
from flwr.supercore.cli.flower_superexec import _parse_args as superexec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode
from typer.main import get_command

import client_app.cli
import server_app.cli
from client_app.settings import parse_node_config
from common.config import parse_overrides

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(DEPLOY.glob("compose.*.yml"))
FLOWER = {"flower-superlink": superlink, "flower-supernode": supernode, "flower-superexec": superexec}
OURS = {"coordinator": server_app.cli.app, "site": client_app.cli.app}
PUBLIC_PORTS = {"9092"}


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def compose(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(yaml.safe_load(request.param.read_text()))


def words(command: Any) -> list[str]:
    return [str(word) for word in command] if isinstance(command, list) else shlex.split(command)


def check_ours(arguments: list[str]) -> None:
    """Raise when one of our own commands would not take these arguments."""
    command: Command = get_command(OURS[arguments[0]])
    rest = arguments[1:]
    while isinstance(command, Group):
        command = command.commands[rest.pop(0)]
    command.make_context(arguments[0], rest)


def volumes(service: Mapping[str, Any]) -> dict[str, str]:
    """Where each volume is mounted; read-only ones end with :ro."""
    return dict(text.split(":", 1) for text in service.get("volumes", ()))


def networks(service: Mapping[str, Any]) -> set[str]:
    return set(service.get("networks", ()))


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
        used = {each for service in services.values() for each in (*networks(service), *volumes(service))}
        assert set(compose.get(section) or ()) <= used


def test_every_command_is_one_that_its_program_takes(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        command = words(service["command"])
        if command[0] in FLOWER:
            FLOWER[command[0]]().parse_args(command[1:])
        elif command[0] == "sh":
            (line,) = [each for each in command[2].split("&&") if each.strip().startswith(tuple(OURS))]
            check_ours(shlex.split(line))
        else:
            check_ours(command)
        check = service.get("healthcheck", {}).get("test", [])
        if check[1:2] == ["site"]:
            check_ours(check[1:])
        elif check:
            assert check[:3] == ["CMD", "python", "-c"], name
            compile(check[3], name, "exec")


def test_every_node_config_is_one_a_site_takes(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        command = words(service["command"])
        if "--node-config" in command:
            text = command[command.index("--node-config") + 1]
            assert parse_node_config(parse_overrides([text])).site


def test_only_the_fleet_port_can_be_reached_and_nothing_runs_as_root(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert str(port).rpartition(":")[2] in PUBLIC_PORTS, name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "user" not in service
        command = words(service["command"])
        if command[0] == "flower-superlink":
            addresses = {
                flag: command[command.index(flag) + 1] for flag in ("--control-api-address", "--serverappio-api-address")
            }
            assert all(address.startswith("127.0.0.1:") for address in addresses.values()), addresses
    assert "USER 10001:10001" in (DEPLOY / "Dockerfile").read_text()


def test_a_hospitals_data_is_in_its_app_alone_which_reaches_nobody_else(compose: dict[str, Any]) -> None:
    services = compose["services"]
    apps = {name: service for name, service in services.items() if "clientapp" in words(service["command"])}
    for name, app in apps.items():
        (own,) = networks(app)
        assert compose["networks"][own]["internal"] is True
        others = {other for other, service in services.items() if own in networks(service)} - {name}
        assert [words(services[other]["command"])[0] for other in others] == ["flower-supernode"]
        for volume in volumes(app):
            assert not any(volume in volumes(service) for other, service in services.items() if other != name), volume
    lines = [networks(service) for service in services.values() if words(service["command"])[0] == "flower-supernode"]
    assert all(not one & other for index, one in enumerate(lines) for other in lines[:index])


def test_the_image_gets_every_dependency_but_rays() -> None:
    command = [sys.executable, str(DEPLOY / "requirements.py"), str(DEPLOY.parent / "pyproject.toml")]
    whole, small = (
        subprocess.run([*command, choice], capture_output=True, text=True, check=True).stdout.splitlines()
        for choice in ("yes", "no")
    )
    listed = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [each.replace("flwr[simulation]", "flwr") for each in listed] == whole[1:]
    left_out = {each.partition(">")[0] for each in set(whole) - set(small)}
    assert left_out == {"torchvision", "open_clip_torch", "timm"}


def test_what_the_demo_needs_is_said_where_it_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", str(DEPLOY / "demo.sh")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "demo-compose needs docker" in done.stderr
