"""The environment of Flower's processes: telemetry, updates, proxies, Ray; addresses of sockets;
how long a process waits between two looks for work.
"""

from __future__ import annotations

import ipaddress
import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray forks in a process in which Flower uses gRPC, whose fork handlers can hang the child.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# A job's settings, which Ray merges with those that Flower gives it.
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Names a function that Ray calls before it starts, in the thread that starts it.
RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
# Ray would join the cluster that the environment names, or one that runs on this machine. Its workers
# need not see the files and packages of this run.
OWN_CLUSTER = {"RAY_ADDRESS": "local"}
# How long Ray may take for each step of its start, in seconds.
RAY_PATIENCE = 240.0
# Unix time at which the command that makes a run was started; its processes inherit it.
COMMAND_BEGAN = "FEDSURROGATE_COMMAND_BEGAN"

# Variables by which gRPC finds its proxy, in this order; in small letters only.
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Beginning of the address of a Unix socket, as gRPC writes it: unix:/path.
UNIX = "unix:"


def quoted_python(executable: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which Ray starts its workers, whatever characters the path of Python holds.

    Ray starts a worker with a line for bash, in which it quotes everything but the path of Python.

    Args:
        executable: Path of Python, as in `sys.executable`.
        environment: Variables of this process. A job's settings that are there already stay as they
            are.

    Returns:
        No variable for a path that needs no quotes.
    """
    quoted = shlex.quote(executable)
    if quoted == executable or RAY_JOB in environment:
        return {}
    return {RAY_JOB: json.dumps({"runtime_env": {"py_executable": quoted}})}


def before_ray(workers: dict[str, Any] | None) -> dict[str, Any] | None:
    """Let Ray wait longer for its servers. Ray calls this if `prepared_ray` names it.

    Args:
        workers: Settings of Ray's workers.

    Returns:
        The same settings.
    """
    from . import flower

    flower().prepare_ray(RAY_PATIENCE)
    return workers


def prepared_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which Ray calls `before_ray` before it starts.

    Flower starts Ray in the main thread, while the coordinator's app begins in another, which may
    be late.

    Args:
        environment: Variables of this process. A function that is named there already stays.
    """
    if RAY_HOOK in environment:
        return {}
    return {RAY_HOOK: f"{before_ray.__module__}.{before_ray.__name__}"}


def is_loopback(address: str) -> bool:
    """Whether an address, host:port, is of this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def no_proxy_option(address: str) -> list[tuple[str, int]]:
    """Options of a gRPC channel: no proxy to an address of this machine.

    gRPC would use `https_proxy` even there.
    """
    return [("grpc.enable_http_proxy", 0)] if is_loopback(address) else []


def without_proxy_here(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which gRPC uses the same proxy as in this one, but none to this machine; and
    so does HTTP.

    gRPC reads `no_grpc_proxy`, and `no_proxy` only without it; HTTP reads `no_proxy`, in any letters.
    """
    found = {}
    listed = environment.get("no_proxy", "")
    if any(environment.get(name) for name in PROXIES):
        grpc = environment.get("no_grpc_proxy", listed)
        found["no_grpc_proxy"] = ",".join(filter(None, [grpc, *LOOPBACK]))
    if any(environment.get(name) or environment.get(name.upper()) for name in PROXIES[1:]):
        plain = listed or environment.get("NO_PROXY", "")
        found["no_proxy"] = ",".join(filter(None, [plain, *LOOPBACK]))
    return found


# A wait as a share of the time since the last work.
SHARE = 0.1
# Shortest waits in seconds: to a process of the same machine, and to a SuperLink of many sites.
HERE, REMOTE = 0.02, 0.1


class Pace:
    """Waits a tenth of the time since the last work.

    Args:
        shortest: Seconds that a wait takes at least.

    Example:
        >>> pace = Pace(HERE)
        >>> pace.seconds(3.0)
        0.02
    """

    def __init__(self, shortest: float) -> None:
        self._shortest, self._last = shortest, time.monotonic()

    def worked(self) -> None:
        """There was work just now."""
        self._last = time.monotonic()

    def seconds(self, longest: float) -> float:
        """Seconds to wait now, at most `longest`."""
        since = time.monotonic() - self._last
        return min(longest, max(self._shortest, SHARE * since))

    def sleep(self, longest: float) -> None:
        """Wait; in place of a `time.sleep` of `longest` seconds."""
        time.sleep(self.seconds(longest))
