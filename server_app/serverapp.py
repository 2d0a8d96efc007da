"""The coordinator's ServerApp: parses the configuration and calls `federate`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.logs.output import configure_log
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.flat import Scalar

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation. An invalid setting stops it before any request to a site."""
    configure_log(os.environ)
    simulated = flower().is_simulation(grid)
    config = _checked(context, simulated)
    if simulated:
        _wait_for_ray(config, context.run_id)
    flower().outlast_interruptions(grid, config.settings.deadline)
    from fedsurrogate.server_app.federate import federate
    from fedsurrogate.strategies.base.registered import Registered

    federate(
        config,
        grid,
        context.run_id,
        None if simulated else Registered.here(os.environ),
        simulated=simulated,
    )


def _checked(context: Context, simulated: bool) -> Run:
    """The run. If its settings cannot work, a run folder says why, because `flwr run` does not;
    raises FedSurrogateError.
    """
    from fedsurrogate.server_app.lifecycle.before_start import check_output, check_start

    try:
        config = parse_run(context.run_config)
        check_start(config, simulated)
        return config
    except FedSurrogateError as error:
        from fedsurrogate.server_app.federate import fail_before_start

        nearest = _nearest(context.run_config)
        try:
            check_output(nearest.settings.output_dir)
        except FedSurrogateError:
            raise error from None
        fail_before_start(nearest, context.run_id, error, simulated)


def _nearest(settings: Mapping[str, Scalar]) -> Run:
    """A run with these settings; without the others where they cannot work."""
    for names in (settings.keys(), ("output-dir", "method"), ("output-dir",)):
        with suppress(FedSurrogateError):
            return parse_run({name: settings[name] for name in names if name in settings})
    return parse_run({})


def _wait_for_ray(config: Run, run_id: int) -> None:
    """Wait until Flower's simulation has started Ray. If it does not start, the run folder says
    why; raises RunError.
    """
    from fedsurrogate.server_app.lifecycle.ray_start import ray_start

    with ray_start() as problem:
        if problem:
            from fedsurrogate.server_app.federate import fail_before_start

            fail_before_start(config, run_id, RunError(problem))
    flower().replace_killed_workers()
