"""The coordinator's ServerApp: parses the configuration and calls `federate`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from flwr.app import Context
from flwr.serverapp import ServerApp

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.logs import configure_log
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.signed_models.signed_model import SignedModel, make_signed_model
from fedsurrogate.strategies import Federation, Grid, strategy_of
from fedsurrogate.strategies.base.outcome import Outcome, Registered

from .deployment.request_key import signing_key
from .lifecycle.before_start import check_start
from .report.build import write_report
from .runs.writer import RunWriter

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

    registered = None if simulated else Registered.here(os.environ)
    if registered is not None:
        _check_allowed(config, context.run_id, registered.file.parent)
    federate(config, grid, context.run_id, registered, simulated=simulated)


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
            fail_before_start(config, run_id, RunError(problem))
    flower().replace_killed_workers()


STOPPED = (
    "Flower ended this app: the run was stopped, or the SuperLink or SuperExec above the "
    "app ended or was restarted"
)

log = logging.getLogger("flwr")


def federate(
    config: Run,
    grid: Grid,
    flower_run_id: int,
    registered: Registered | None = None,
    *,
    simulated: bool = False,
    report: bool = True,
) -> None:
    """Run one federation. After a failure the run folder is complete, its report gives the reason,
    and the error is raised. Settings that cannot work raise an error before there is a run folder.

    Args:
        config: the run.
        grid: by which messages reach the sites.
        flower_run_id: the number of the run in Flower.
        registered: the table of registered sites, if the SuperLink accepts only registered sites.
        simulated: whether all sites run on this machine, with the run's own data.
        report: whether the report of a run that succeeds is drawn, which takes longer than many a
            run; `write_report` draws it later.

    Raises:
        FedSurrogateError: the settings cannot work, or the run failed.
    """
    check_start(config, simulated)
    device = pick_device(config.settings.device)
    folder = RunWriter(config, flower_run_id, simulated)
    strategy = strategy_of(config.plan)(config, folder, device)
    strategy.registered, strategy.simulated = registered, simulated
    strategy.signer = None if simulated else _signer(config, flower_run_id)
    log.info("Run folder: %s", folder.path)
    failure, checks = None, config.settings.check_only
    report = report and not checks
    try:
        with finished(folder, strategy, report=report):
            if checks:
                strategy.identify(grid, config.settings.deadline)
            else:
                strategy.run(grid)
    except FedSurrogateError as error:
        # Late replies are still kept, so the error is raised after them.
        failure = error
    if report:
        log.info("Report: %s", folder.path / "report.html")
    if not checks and strategy.receive_late(config.settings.grace):
        folder.update(strategy.outcome)
        if report:
            write_report(folder.path)
    if failure is not None:
        raise failure


def fail_before_start(
    config: Run, flower_run_id: int, error: FedSurrogateError, simulated: bool = True
) -> NoReturn:
    """Leave the run folder of a run that failed before any request to a site.

    Args:
        config: the run.
        flower_run_id: the number of the run in Flower.
        error: why it failed.
        simulated: whether it is a simulation.

    Raises:
        FedSurrogateError: always, the error.
    """
    folder = RunWriter(config, flower_run_id, simulated)
    log.info("Run folder: %s", folder.path)
    with finished(folder, strategy_of(config.plan)(config, folder, pick_device("cpu"))):
        raise error


def _signer(config: Run, flower_run_id: int) -> Callable[[Outcome], SignedModel]:
    """A function that signs the model of an outcome with the coordinator's key."""

    def sign(outcome: Outcome) -> SignedModel:
        assert outcome.model is not None  # the strategy sends a model, so it has one
        private = signing_key(Path(config.settings.output_dir), os.environ)
        used = outcome.count("used")
        return make_signed_model(
            outcome.model, config, outcome.learned, str(flower_run_id), used, private, outcome.units
        )

    return sign


@contextmanager
def finished(folder: RunWriter, strategy: Federation, *, report: bool = True) -> Iterator[None]:
    """Complete the run folder after success and after any error. Errors are raised again.

    Args:
        folder: the run folder.
        strategy: its outcome is what the run has reached.
        report: whether the report is also drawn after success.
    """
    draws = True
    try:
        yield
        folder.finish(strategy.outcome, "ok")
        draws = report
    except FedSurrogateError as error:
        folder.end_early(strategy.outcome, "failed", str(error))
        raise
    except KeyboardInterrupt as error:
        why = f"interrupted by {str(error) or 'Ctrl-C'}"
        folder.end_early(strategy.outcome, "interrupted", why)
        raise
    except BaseException as error:
        # Flower ends an app with SystemExit, which carries only a number.
        why = STOPPED if isinstance(error, SystemExit) else str(error)
        why = f"stopped by {type(error).__name__}: {why}"
        folder.end_early(strategy.outcome, "failed", why)
        raise
    finally:
        try:
            if draws:
                write_report(folder.path)
        except OSError as error:
            log.error("No report: %s", error)
