"""The coordinator's ServerApp: parses the configuration and calls `federate`."""

from __future__ import annotations

import os
import sys
import time

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from common.config.run_config import parse_run_config
from common.logs.output import configure_log

RAY_SECONDS = 60.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation. An invalid setting stops it before it starts."""
    configure_log(os.environ)
    config = parse_run_config(context.run_config)
    if simulated := type(grid).__name__ == "InMemoryGrid":
        _wait_for_ray()
    from server_app.federate import federate
    from strategies.base.registered import Registered

    federate(config, grid, context.run_id, None if simulated else Registered.here(os.environ), simulated=simulated)


def _wait_for_ray() -> None:
    """Wait until Flower's simulation has started Ray, which it does in this process.

    If Ray does not start, no incomplete run folder is left. Also, no process forks while torch's libraries are loaded.
    """
    end = time.monotonic() + RAY_SECONDS
    while time.monotonic() < end:
        ray = sys.modules.get("ray")
        if ray is not None and getattr(ray, "is_initialized", bool)():
            return
        time.sleep(0.05)
