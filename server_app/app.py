"""The coordinator's ServerApp: configuration in, then `federate`."""

from __future__ import annotations

import os
import sys
import time

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from common.config.run_config import parse_run_config

RAY_SECONDS = 60.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation. A wrong setting stops it before anything starts."""
    config = parse_run_config(context.run_config)
    if simulated := type(grid).__name__ == "InMemoryGrid":
        _wait_for_ray()
    from server_app.federate import federate
    from strategies.base.registered import Registered

    federate(config, grid, context.run_id, None if simulated else Registered.here(os.environ))


def _wait_for_ray() -> None:
    """Let Flower's simulation start Ray first, which happens in this same process.

    When Ray does not start, no half-begun run folder is left; and nothing forks while torch's libraries are being loaded.
    """
    end = time.monotonic() + RAY_SECONDS
    while time.monotonic() < end:
        ray = sys.modules.get("ray")
        if ray is not None and getattr(ray, "is_initialized", bool)():
            return
        time.sleep(0.05)
