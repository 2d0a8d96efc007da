"""A page of metrics for Prometheus, and what every machine has to show on it: certificates and disks."""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import make_server

from .errors import ConfigError
from .extras import needed_for
from .flower.environment import is_loopback

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "fedsurrogate_"
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]*)?")


class Collector(Protocol):
    """What has metrics, read anew at each request."""

    def collect(self) -> Iterable[Metric]:
        """All current metrics."""
        ...


class MachineCollector:
    """Certificates and disks of a machine, as a `prometheus_client` collector.

    Args:
        certificates: PEM files.
        folders: by the name that their series have.
    """

    def __init__(self, certificates: Sequence[Path], folders: Mapping[str, Path]) -> None:
        self._certificates, self._folders = certificates, folders

    def collect(self) -> Iterable[Metric]:
        """All current metrics."""
        expiries = {file.name: expiry(file) for file in self._certificates}
        yield series(
            "certificate_expiry_timestamp_seconds",
            "Unix time at which a certificate ends; 0: its file cannot be read.",
            ("file",),
            [((name,), at) for name, at in expiries.items()],
        )
        yield from disk_series({name: disk(folder) for name, folder in self._folders.items()})


def series(
    name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """One metric.

    Args:
        name: without the prefix that all of ours have.
        help_text: for the page.
        labels: names of the labels.
        values: the labels' values and the number of each series.

    Returns:
        A gauge.

    Raises:
        PackageError: without the extra `monitor`.
    """
    with needed_for("the page of metrics"):
        from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(PREFIX + name, help_text, labels=labels)
    for labelled, value in values:
        family.add_metric(labelled, value)
    return family


def disk(folder: Path) -> tuple[float, float] | None:
    """Free and all bytes of a folder's disk, as its user may use them; None if it is not there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return float(usage.free), float(usage.total)


def disk_series(disks: Mapping[str, tuple[float, float] | None]) -> Iterator[Metric]:
    """The two metrics of disks, from `disk` of each folder."""
    there = {name: each for name, each in disks.items() if each is not None}
    for place, (name, help_text) in enumerate(
        (
            ("disk_free_bytes", "Free bytes of a folder's disk, for this user."),
            ("disk_size_bytes", "Bytes of a folder's disk."),
        )
    ):
        yield series(
            name, help_text, ("folder",), [((key,), each[place]) for key, each in there.items()]
        )


def expiry(file: Path) -> float:
    """Unix time at which a certificate ends; 0 for a file that cannot be read as one."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError, x509.InvalidVersion):
        return 0.0


@contextmanager
def serve_page(
    collectors: Sequence[Collector], host: str, port: int, exposed: bool, user: str
) -> Iterator[str]:
    """Serve metrics from a thread while the context is open, to requests that name this machine by an
    address, by `host`, or by a name without a dot.

    Args:
        collectors: what is shown.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        exposed: whether other machines may reach the address.
        user: the command, for the error without the extra `monitor`.

    Yields:
        The URL of the page.

    Raises:
        ConfigError: for an address that other machines reach unless `exposed`, for an address that
            cannot be used.
        PackageError: without the extra `monitor`.
    """
    with needed_for(user):
        from prometheus_client import CollectorRegistry, make_wsgi_app
        from prometheus_client.exposition import ThreadingWSGIServer, _SilentHandler

    if not (exposed or is_loopback(f"[{host}]:")):
        raise ConfigError(
            f"--listen {host!r}: other machines reach this address, and no password protects it; "
            "listen on 127.0.0.1, or add --exposed and allow only your monitoring to reach it"
        )
    # Without `auto_describe`, registration reads nothing.
    registry = CollectorRegistry(auto_describe=False)
    for each in collectors:
        registry.register(each)
    page = make_wsgi_app(registry)

    def served(environ: dict[str, Any], begin: Callable[..., Any]) -> Any:
        if is_named(environ.get("HTTP_HOST", ""), host):
            return page(environ, begin)
        begin("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [
            b"This page is for programs that name this machine by its address, or by --listen.\n"
        ]

    class PageServer(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = make_server(host, port, served, PageServer, handler_class=_SilentHandler)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
    except OSError as error:
        raise ConfigError(
            f"--listen {host}:{port}: cannot listen there ({error.strerror})"
        ) from None
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_named(header: str, host: str) -> bool:
    """Whether a request names this machine, not a name of the web that leads a browser here.

    Args:
        header: the request's Host.
        host: where the page is served, as a person named it.

    Example:
        >>> [is_named(each, "127.0.0.1") for each in ("127.0.0.1:9464", "exporter:9464", "a.example")]
        [True, True, False]
    """
    if (found := HOST.fullmatch(header)) is None:
        return False
    name = found[1] or found[2]
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    # A name without a dot is of this machine or of its own network.
    return "." not in name or name.casefold() == host.casefold()
