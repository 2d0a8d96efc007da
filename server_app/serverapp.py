"""The coordinator's ServerApp: parses the configuration and calls `federate`."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.logs.output import configure_log
from fedsurrogate.common.run import Run, parse_run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation. An invalid setting stops it before it starts."""
    configure_log(os.environ)
    config = parse_run(context.run_config)
    if simulated := flower().is_simulation(grid):
        _wait_for_ray(config, context.run_id)
    flower().outlast_interruptions(grid, config.settings.deadline)
    from fedsurrogate.server_app.federate import federate
    from fedsurrogate.strategies.base.registered import Registered

    registered = None if simulated else Registered.here(os.environ)
    if registered is not None:
        _check_allowed(config, context.run_id, registered.file.parent)
    federate(
        config,
        grid,
        context.run_id,
        registered,
        simulated=simulated,
    )


def _check_allowed(config: Run, run_id: int, rules: Path) -> None:
    """End a run that too few people have signed, also one that another program has submitted.

    Args:
        config: the run.
        run_id: Flower's number.
        rules: folder of the federation's rules.

    Raises:
        RunError: with the reason, which the run folder has, too.
    """
    from fedsurrogate.server_app.deployment.federation_rules import check_run_allowed
    from fedsurrogate.server_app.federate import fail_before_start

    try:
        check_run_allowed(rules, config.full_digest, config.settings.approval)
    except ConfigError as error:
        fail_before_start(config, run_id, str(error), simulated=False)


def _wait_for_ray(config: Run, run_id: int) -> None:
    """Wait until Flower's simulation has started Ray. If it does not start, the run folder says
    why; raises RunError.
    """
    from fedsurrogate.server_app.lifecycle.ray_start import ray_start

    with ray_start() as problem:
        if problem:
            from fedsurrogate.server_app.federate import fail_before_start

            fail_before_start(config, run_id, problem)
    flower().replace_killed_workers()
