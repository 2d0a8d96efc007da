"""`site doctor` behind a hospital's proxy: each step goes through it, and each fault is named with
what to do.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from fedsurrogate.client_app.diagnostics import connection_checks
from fedsurrogate.client_app.diagnostics.connection_checks import (
    Finding,
    Link,
    check_link,
    proxy_for,
)
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import PROXIES, without_proxy_here
from fedsurrogate.server_app.deployment.certificates import issue
from tests.faults.proxies import ConnectProxy


@pytest.fixture(scope="module")
def certificates_and_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    issue(folder, ("localhost",), ("north",))
    return folder


@pytest.fixture(scope="module")
def port(certificates_and_keys: Path) -> Iterator[int]:
    """A gRPC server with the coordinator's certificate."""
    server = grpc.server(ThreadPoolExecutor(4))
    pair = (
        (certificates_and_keys / "server.key").read_bytes(),
        (certificates_and_keys / "server.crt").read_bytes(),
    )
    found = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield found
    server.stop(None)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def examined(certificates_and_keys: Path, port: int) -> dict[str, Finding]:
    """The findings up to TLS and packets by step; the server is no SuperLink."""
    found = {}
    for each in check_link(Link("localhost", port, certificates_and_keys / "ca.crt", None)):
        found[each.what] = each
    return found


def test_without_a_proxy_every_step_passes(certificates_and_keys: Path, port: int) -> None:
    found = examined(certificates_and_keys, port)
    assert {name: found[name].state for name in ("TLS", "packets")} == {
        "TLS": "PASS",
        "packets": "PASS",
    }
    assert found["port"].state in ("PASS", "WARN"), (
        "localhost may have an IPv6 address without a listener"
    )
    assert "proxy" not in found


@pytest.mark.parametrize("credentials", ["", "north:pass%2Fword"])
def test_all_steps_go_through_the_proxy(
    certificates_and_keys: Path, port: int, monkeypatch: pytest.MonkeyPatch, credentials: str
) -> None:
    proxy = ConnectProxy(credentials.replace("%2F", "/"))
    monkeypatch.setenv(
        "https_proxy", proxy.url.replace("://", f"://{credentials}@" if credentials else "://")
    )
    found = examined(certificates_and_keys, port)
    assert {
        name: found[name].state for name in ("name", "port", "proxy", "TLS", "packets")
    } == dict.fromkeys(("name", "port", "proxy", "TLS", "packets"), "PASS")
    assert set(proxy.targets) == {f"localhost:{port}"}
    assert len(proxy.targets) >= 2
    assert "word" not in "".join(each.found + each.remedy for each in found.values())


def test_a_proxy_that_wants_a_password_is_named_with_the_variable(
    certificates_and_keys: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = ConnectProxy("north:secret")
    monkeypatch.setenv("https_proxy", proxy.url)
    last = list(examined(certificates_and_keys, port).values())[-1]
    assert (last.what, last.state) == ("proxy", "FAIL")
    assert "requires a user and password" in last.found
    assert "https_proxy=http://USER:PASSWORD@127.0.0.1" in last.remedy
    monkeypatch.setenv("https_proxy", proxy.url.replace("://", "://north:wrong@"))
    last = list(examined(certificates_and_keys, port).values())[-1]
    assert "refuses this user and password" in last.found
    assert "wrong" not in last.found + last.remedy


@pytest.mark.parametrize(
    ("status", "word"), [(403, "allow the method CONNECT"), (502, "the proxy resolves it")]
)
def test_a_proxy_without_a_tunnel_is_named(
    certificates_and_keys: Path, port: int, monkeypatch: pytest.MonkeyPatch, status: int, word: str
) -> None:
    monkeypatch.setenv("http_proxy", ConnectProxy(status=status).url)
    last = list(examined(certificates_and_keys, port).values())[-1]
    assert (last.what, last.state) == ("proxy", "FAIL")
    assert str(status) in last.found
    assert word in last.remedy


def test_a_device_that_inspects_tls_is_named_by_its_certificate(
    certificates_and_keys: Path, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("https_proxy", ConnectProxy(inspects=tmp_path).url)
    last = list(examined(certificates_and_keys, port).values())[-1]
    assert (last.what, last.state) == ("TLS", "FAIL")
    assert "inspects TLS: it presents a certificate of 'Gateway CA, Clinic'" in last.found
    assert f"exempt localhost port {port}" in last.remedy


def test_the_certificate_of_another_federation_is_no_inspection(
    certificates_and_keys: Path, port: int, tmp_path: Path
) -> None:
    issue(tmp_path, ("localhost",), ("north",))
    last = list(check_link(Link("localhost", port, tmp_path / "ca.crt", None)))[-1]
    assert (last.what, last.state) == ("TLS", "FAIL")
    assert "inspects" not in last.found


def test_packets_that_are_lost_when_they_are_large_are_noticed(
    certificates_and_keys: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsurrogate.client_app.diagnostics.connection_checks.SECONDS", 1.0)
    monkeypatch.setenv("https_proxy", ConnectProxy(hole=4000).url)
    found = examined(certificates_and_keys, port)
    assert found["TLS"].state == "PASS"
    assert found["packets"].state == "WARN"
    assert "MTU" in found["packets"].remedy


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"https_proxy": ""}, None),
        ({"https_proxy": "http://p:1", "grpc_proxy": "http://q:2"}, ("q", 2)),
        ({"http_proxy": "http://p"}, ("p", 80)),
        ({"https_proxy": "http://p:1", "no_proxy": "example.org"}, None),
        ({"https_proxy": "http://p:1", "no_proxy": "other.org, 10.0.0.0/8"}, ("p", 1)),
        ({"https_proxy": "http://p:1", "no_proxy": "example.org", "no_grpc_proxy": "x"}, ("p", 1)),
    ],
)
def test_the_proxy_is_the_one_that_grpc_takes(
    environment: dict[str, str], expected: tuple[str, int] | None
) -> None:
    found = proxy_for("fl.example.org", environment)
    assert (found and (found.host, found.port)) == expected


def test_a_proxy_that_grpc_cannot_use_is_refused_without_its_password() -> None:
    with pytest.raises(
        ConfigError, match=r"https_proxy = 'p:1': gRPC takes http://HOST:PORT"
    ) as caught:
        proxy_for("fl.example.org", {"https_proxy": "https://user:secret@p:1"})
    assert "secret" not in str(caught.value)


def test_processes_of_one_machine_talk_without_the_proxy() -> None:
    assert without_proxy_here({}) == {}
    known = without_proxy_here({"https_proxy": "http://p:1", "no_proxy": "example.org"})
    names = "example.org,localhost,127.0.0.1,::1"
    assert known == {"no_grpc_proxy": names, "no_proxy": names}
    here = "localhost,127.0.0.1,::1"
    assert without_proxy_here({"grpc_proxy": "http://p:1"}) == {"no_grpc_proxy": here}
    assert without_proxy_here({"HTTPS_PROXY": "http://p:1"}) == {"no_proxy": here}
    assert proxy_for("127.0.0.1", {"https_proxy": "http://p:1"} | known) is None


def test_a_name_with_ipv6_addresses_only_and_no_route_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2001:db8:: is for documentation: no machine has a route to it."""
    there = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::7", 9092, 0, 0))]
    monkeypatch.setattr(connection_checks.socket, "getaddrinfo", lambda *_, **__: there)

    def refuse(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(connection_checks.socket, "create_connection", refuse)
    *_, last = check_link(Link("fl.example.org", 9092, None, None))
    assert last.state == "FAIL"
    assert "IPv6 addresses only" in last.found
    assert "enable_ipv6" in last.remedy


def test_a_variable_in_capital_letters_is_noticed_when_the_way_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    last = list(check_link(Link("fl.invalid", 9092, None, None)))[-1]
    assert (last.what, last.state) == ("proxy", "WARN")
    assert "set https_proxy, in small letters" in last.remedy
