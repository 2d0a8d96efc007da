"""The coordinator's ServerApp: parses the configuration and calls `federate`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import ServerApp

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.logs import configure_log
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.strategies import Grid
from fedsurrogate.strategies.base.outcome import Registered

from .lifecycle.before_start import check_start

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation. An invalid setting stops it before any request to a site."""
    configure_log(os.environ)
    simulated = flower().is_simulation(grid)
    config = _checked(context, simulated)
    if simulated:
        _wait_for_ray(config, context.run_id)
    flower().pull_soon()
    flower().outlast_interruptions(grid, config.settings.deadline)
    flower().limit_replies(grid, config.settings.max_payload_mib * 2**20)

    from .federate import federate

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
        FedSurrogateError: with the reason, which the run folder has, too.
    """
    from .deployment.audit_log import check_run_allowed
    from .federate import fail_before_start

    try:
        check_run_allowed(rules, config.full_digest, config.settings.approval)
    except FedSurrogateError as error:
        fail_before_start(config, run_id, error, simulated=False)


def _checked(context: Context, simulated: bool) -> Run:
    """The run. If its settings cannot work, a run folder says why, because `flwr run` does not;
    raises FedSurrogateError.
    """
    from .lifecycle.before_start import check_output

    try:
        config = parse_run(context.run_config)
        check_start(config, simulated)
        return config
    except FedSurrogateError as error:
        from .federate import fail_before_start

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
    from .lifecycle.before_start import ray_start

    with ray_start() as problem:
        if problem:
            from .federate import fail_before_start

            fail_before_start(config, run_id, RunError(problem))
    flower().replace_killed_workers()
