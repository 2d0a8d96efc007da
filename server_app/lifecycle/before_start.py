"""Checks before a run starts any process or writes any file, each error one line in well under two
seconds; and what a simulation needs first: memory, folders, Ray.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import psutil

from fedsurrogate.common.backbones.backbone_names import (
    OWN_BACKBONE,
    check_backbone_name,
    check_weights_file,
    with_absolute_place,
)
from fedsurrogate.common.command_line import handling
from fedsurrogate.common.costs import check_payload, known_dimension
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.extras import (
    OF_FEATURES,
    check_installed,
    check_packages,
    install_command,
    is_installed,
    packages_for,
)
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import RAY_PATIENCE
from fedsurrogate.common.machine import (
    CACHE,
    MIB,
    NAME,
    STATE,
    address_limit,
    available_memory,
    usable_cores,
    user_folder,
    why_not_writable,
)
from fedsurrogate.common.run import Run, parse_run, stored_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import Scalar, settings_text
from fedsurrogate.common.settings.settings import DataSettings

from ..deployment.addresses import is_here
from ..runs.state import MANIFEST, METRICS, Json, as_number, at, read_object

# What a run leaves to continue from, by the kind of its method.
CHECKPOINTS = {"rounds": "checkpoint.safetensors", "chain": "chain.json"}
# Settings that decide in a simulation which records a site has, besides those of the document.
OF_RECORDS = ("data", "dataset", "label-column", "patient-column", "bag-column")
MOST_SHOWN = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "the loss of its terminal",
}


class Interrupted(KeyboardInterrupt):
    """A signal ended the run.

    Args:
        number: of the signal.

    Attributes:
        number: of the signal.
        folder: the run folder; None until that is known.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(NAMES[number])
        self.number = number
        self.folder: Path | None = None

    @property
    def exit_code(self) -> int:
        """The exit code by which shells report a signal."""
        return 128 + self.number

    @property
    def terminal_is_lost(self) -> bool:
        """Whether only the terminal is gone; no person has asked to end the run."""
        return self.number == signal.SIGHUP


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or loss of the terminal raises Interrupted. Later ones are ignored:
    the run is ending.
    """

    def interrupt(number: int, _: object) -> None:
        for each in SIGNALS:
            # A function, not SIG_IGN: processes started from here must not inherit it.
            signal.signal(each, lambda *_: None)
        raise Interrupted(signal.Signals(number))

    with handling(SIGNALS, interrupt):
        yield


def goodbye(stop: Interrupted, words: Sequence[str], overrides: Mapping[str, Scalar]) -> list[str]:
    """What a person reads after an interruption: where the run is, and how to go on.

    Args:
        stop: the interruption, with the run folder if there is one.
        words: the command without its settings.
        overrides: the settings of the run, flat.

    Returns:
        Two lines.
    """
    where = f"run folder: {stop.folder}" if stop.folder else "it had no run folder yet"
    return [f"interrupted by {stop}; {where}", go_on(words, overrides, stop.folder)]


def check_resume(config: Run, simulated: bool) -> None:
    """Check that the folder that `resume` names is of a run that these settings continue.

    Args:
        config: the run; without `resume` there is nothing to check.
        simulated: whether this run is a simulation, whose settings also distribute the records.

    Raises:
        RunError: it is not; names the keys that differ.
    """
    if not config.settings.resume:
        return
    folder, shown = (
        Path(config.settings.resume).expanduser(),
        f"resume = {config.settings.resume!r}",
    )
    checkpoint = CHECKPOINTS[config.plan.kind]
    if not (folder / checkpoint).is_file():
        what = "has" if folder.is_dir() else "is no folder, so it has"
        raise RunError(
            f"{shown}: {what} no {checkpoint}, which the first round writes; name the folder of an "
            "earlier run"
        )
    manifest = _content(folder / MANIFEST)
    was = manifest.get("simulated")
    if isinstance(was, bool) and was != simulated:
        kinds = ("a run with connected sites", "a simulation")
        raise RunError(
            f"{shown} is {kinds[was]}, and this is {kinds[simulated]}, whose sites have other "
            "records"
        )
    try:
        before = stored_run(manifest["config"])
    except (ConfigError, KeyError, TypeError, AttributeError):
        # The digest in the checkpoint decides.
        return
    if manifest.get("run") not in (None, before.digest):
        version = at(manifest, "versions", "fedsurrogate") or "the one that began it"
        raise RunError(
            f"{shown} is of another version, which has another digest for its settings, and sites "
            f"continue what they know by its digest; continue it with version {version}"
        )
    if differing := _differing(before, config, simulated):
        more = f"; and {len(differing) - MOST_SHOWN} more" if len(differing) > MOST_SHOWN else ""
        raise RunError(
            f"{shown} has other settings: {'; '.join(differing[:MOST_SHOWN])}{more}; give the same "
            "ones"
        )


def _content(file: Path) -> Json:
    """The content of one of a run's files; empty if there is none, as in a folder of copied
    checkpoints.
    """
    with suppress(OSError):
        return read_object(file)[0]
    return {}


def _differing(before: Run, config: Run, simulated: bool) -> list[str]:
    """The settings that the earlier run had otherwise, as texts."""
    old, new = (
        {key: each.settings.flat()[key] for key in OF_RECORDS if simulated}
        | {key: value for part in each.document.values() for key, value in part.items()}
        for each in (before, config)
    )
    keys = [key for key in (*old, *new) if old.get(key) != new.get(key)]
    return [f"{key} = {old.get(key)!r}, here {new.get(key)!r}" for key in dict.fromkeys(keys)]


def continuation(folder: Path, link: Sequence[str] = ()) -> str:
    """What to do with a run that has not finished, for a reader of its folder.

    Args:
        folder: a run folder.
        link: options that name the SuperLink, where they are known.

    Returns:
        A command, which gives the settings that differ from the defaults; empty if the settings of
        the run are unknown.
    """
    manifest = _content(folder / MANIFEST)
    try:
        config = stored_run(manifest["config"])
    except (ConfigError, KeyError, TypeError, AttributeError):
        return ""
    defaults = Settings().flat()
    here = config.settings.flat()
    changed = {
        key: value for key, value in here.items() if value != defaults.get(key) and key != "resume"
    }
    words, typed, there = ["coordinator", "run", *link], folder, Path(config.settings.output_dir)
    if manifest.get("simulated"):
        sites = int(as_number(at(_content(folder / METRICS), "sites", "invited")) or 0)
        words = ["coordinator", "simulate", *(["--sites", str(sites)] if sites else [])]
    elif there.is_absolute() and not there.is_dir():
        # Read outside the container: the command is typed inside, where the folder has this path.
        typed = there / folder.name
    return go_on(words, changed, folder, typed)


def can_continue(folder: Path) -> bool:
    """Whether a run that has ended has completed rounds, or chain steps, from which it can continue."""
    return any((folder / checkpoint).is_file() for checkpoint in CHECKPOINTS.values())


def go_on(
    words: Sequence[str],
    overrides: Mapping[str, Scalar],
    folder: Path | None,
    typed: Path | None = None,
) -> str:
    """How to continue the run in `folder`; or, when it left nothing to continue from, how to learn
    from what has arrived, where the method stores that, and how to begin again.

    Args:
        words: the command without its settings.
        overrides: the settings of the run, flat.
        folder: the run folder; None without one.
        typed: its path where the command is typed, if that is another machine or container.

    Returns:
        A sentence that ends with the command, as a text for a shell.

    Example:
        >>> print(go_on(["coordinator", "run"], {"method": "fedavg"}, None))
        nothing is left to continue from; start it again: coordinator run -c 'method="fedavg"'
    """
    plan, settings, how = parse_run(overrides).plan, dict(overrides), "continue it"
    if folder is not None and (folder / CHECKPOINTS.get(plan.kind, "no checkpoint")).is_file():
        settings["resume"] = str((typed or folder).absolute())
    else:
        how = "nothing is left to continue from; start it again"
        stored = folder if plan.combination.stored else None
        arrived = len([*(stored / "surrogates").glob("*.pb")]) if stored else 0
        if arrived:
            again = shlex.join(["coordinator", "refit", str(folder)])
            # Sites pay for each release from their budget.
            costs = f"learn from what {arrived} sites have sent, which costs them nothing more"
            how = f"{costs}: {again}; or start it again"
    text = settings_text(settings)
    return f"{how}: {shlex.join([*words, *(['-c', text] if text else [])])}"


# Measured with the digits: proportional set sizes at their highest, rounded up.
# Flower's and Ray's processes (1.1 GiB) and this one; each site; all sites in this process.
FLOWER_MIB, SITE_MIB, LOCAL_MIB = 1450, 550, 550
# Share of the free memory that Ray reserves, as addresses only, for what its processes share.
RAY_STORE = 0.3


def fitting_sites(wanted: int) -> tuple[int, str]:
    """How many simulated sites may run at the same time under Flower's engine.

    Args:
        wanted: As many as cores and settings allow.

    Returns:
        At most `wanted`; and a warning, empty if it is `wanted`.

    Raises:
        RunError: Not even one site fits, counting the swap.
    """
    free = available_memory() / MIB
    if (fit := math.floor((free - FLOWER_MIB) / SITE_MIB)) >= wanted:
        return wanted, ""
    have = available_memory(swap=True) / MIB
    if have < FLOWER_MIB + SITE_MIB:
        raise RunError(
            f"not enough memory: {have:.0f} MiB are available, and a simulation by Flower's engine "
            f"needs about {FLOWER_MIB + SITE_MIB} MiB ({FLOWER_MIB} for its processes, {SITE_MIB} "
            "for each site at the same time); end other programs, raise the container's limit, or "
            f"use --engine local, which needs about {LOCAL_MIB} MiB"
        )
    fit = max(1, fit)
    return fit, (
        f"{free:.0f} MiB of memory are available, so {fit} of {wanted} sites run at the same time: "
        f"each needs about {SITE_MIB} MiB, beside {FLOWER_MIB} for the processes of Flower's engine"
    )


def check_local() -> None:
    """Raise RunError unless all sites fit into this process, one after the other. Memory that it
    has already counts.
    """
    have = available_memory(swap=True) / MIB + psutil.Process().memory_info().rss / MIB
    if have < LOCAL_MIB:
        raise RunError(
            f"not enough memory: {have:.0f} MiB are available, and a simulation with --engine "
            f"local needs about {LOCAL_MIB} MiB; end other programs, or raise the container's limit"
        )


def check_addresses() -> None:
    """Raise RunError if `ulimit -v` leaves Flower's engine too few addresses. Call it when torch is
    loaded.

    A process of the simulation has torch's addresses, as this one, and Ray's shared memory.
    """
    limit = address_limit()
    if limit is None:
        return
    needed = psutil.Process().memory_info().vms + RAY_STORE * available_memory() + 2**30
    if limit < needed:
        raise RunError(
            f"this shell limits the addresses of a process to {limit // MIB} MiB (`ulimit -v` = "
            f"{limit // 1024}), and Flower's engine needs about {needed / MIB:.0f} MiB here; lift "
            "it with `ulimit -v unlimited`, or use --engine local"
        )


DID_NOT_START = "Ray, which runs the simulated sites, did not start"
REMEDY = (
    "the machine may be busy or short of memory: try again later, with fewer sites at the same "
    "time (`coordinator simulate --parallel 1`), or without Ray (`coordinator simulate --engine "
    "local`)"
)
LONGEST_CAUSE = 300
# How long Flower's end of this process waits until the app has written why.
RECORD_SECONDS = 120.0


@contextmanager
def ray_start(seconds: float = 2 * RAY_PATIENCE) -> Iterator[str]:
    """Wait until Flower has started Ray. While the block runs, Flower does not end this process.

    Until then no run folder is needed, and no process forks while torch's libraries are loaded.

    Args:
        seconds: How long to wait. Ray's own waits are shorter, so that it names its reason.

    Yields:
        Why Ray did not start, and what to do; empty if it has started.
    """
    errors, ended, recorded = _Errors(), threading.Event(), threading.Event()

    def end() -> None:
        ended.set()
        recorded.wait(RECORD_SECONDS)

    # Flower calls this in the main thread when the simulation has failed, and then ends the
    # process.
    flower().at_exit(end)
    logging.getLogger("flwr").addFilter(errors)
    flower().prepare_ray(RAY_PATIENCE)
    try:
        started = _wait(ended, seconds)
        yield "" if started else _problem(errors.cause, seconds, over=ended.is_set())
    finally:
        recorded.set()
        logging.getLogger("flwr").removeFilter(errors)


def _wait(ended: threading.Event, seconds: float) -> bool:
    """Whether Ray starts before the process ends, and in this time."""
    end = time.monotonic() + seconds
    while not flower().ray_has_started():
        if ended.wait(0.05) or time.monotonic() > end:
            return False
    return True


def _problem(cause: str, seconds: float, over: bool) -> str:
    if not over:
        cause = f"it has not begun to work within {seconds:.0f} s"
    return f"{DID_NOT_START}: {cause or 'Flower has ended the simulation'}; {REMEDY}"


class _Errors(logging.Filter):
    """Keeps the first exception that Flower logs: the cause of those that follow. A filter of the
    logger sees a record before handlers make a text of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cause = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the exception among the arguments of an error; every record passes."""
        error = record.levelno >= logging.ERROR and isinstance(record.args, tuple)
        for each in record.args or () if error else ():
            if isinstance(each, BaseException) and not self.cause:
                text = " ".join(str(each).split())[:LONGEST_CAUSE].rstrip(".;")
                self.cause = f"{type(each).__name__}: {text}" if text else type(each).__name__
        return True


WHAT = {STATE: "log and state", CACHE: "computed features"}


@contextmanager
def site_folders() -> Iterator[list[str]]:
    """Let simulated sites write, whatever the home folder is. Only for sites without data of their
    own.

    What a simulated site keeps is worth nothing after its run. So a private temporary folder serves
    where the user's cannot be written; it is removed at the end. The variables hold for this
    process and for those that it starts.

    Yields:
        Warnings for the user, none if the user's folders can be written.
    """
    bad = {name: why for name in (STATE, CACHE) if (why := why_not_writable(user_folder(name)))}
    if not bad:
        yield []
        return
    warnings = [
        f"{str(user_folder(name))!r} cannot be written ({why}); {WHAT[name]} of the simulated "
        f"sites go to a temporary folder; set {name} to a folder that you may write to keep them"
        for name, why in bad.items()
    ]
    before = {name: os.environ.get(name) for name in bad}
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        # The folders exist, so that they count although there may be older ones.
        for name in bad:
            (Path(folder) / name.lower() / NAME).mkdir(parents=True)
            os.environ[name] = str(Path(folder) / name.lower())
        try:
            yield warnings
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


# By name: the coordinator's code does not import the site's. In a simulation, this machine is every
# site.
RECORD_CHECKS = "fedsurrogate.client_app.diagnostics.first_look"
PATHS = ("data-dir", "weights-path")


def check_start(config: Run, simulated: bool) -> None:
    """Check what the coordinator's own process needs: noise, device, resume, output folder.

    Args:
        config: the run.
        simulated: whether it is a simulation.

    Raises:
        ConfigError: the budget cannot be kept, the device or the output folder cannot be used, or
            settings name data of another kind than `data`.
        RunError: the folder of `resume` cannot be continued with these settings.
    """
    check_data_named(config.settings)
    if config.settings.noise_seed and not simulated:
        raise ConfigError(
            f"noise-seed = {config.settings.noise_seed} is for simulations: it makes privacy noise that "
            "anybody can repeat, and sites refuse it; leave it out"
        )
    # Every site computes the same noise, and would refuse a budget that it cannot keep.
    config.mechanism_for("record")
    if config.settings.device.startswith("cuda"):
        # Only then: counting GPUs imports torch.
        from fedsurrogate.common.models.devices import pick_device

        pick_device(config.settings.device)
    check_resume(config, simulated)
    check_output(config.settings.output_dir)


def check_output(output_dir: str) -> None:
    """Raise ConfigError unless the output folder exists or can be created, and can be written.
    Creates nothing.
    """
    folder = Path(output_dir).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    shown = f"output-dir = {output_dir!r}"
    if not there.is_dir():
        raise ConfigError(f"{shown}: {there} is a file; name a folder")
    if why := why_not_writable(there):
        raise ConfigError(f"{shown}: {there} cannot be written ({why}); name another folder")


def check_simulation(
    overrides: Mapping[str, Scalar], own_backbones: bool = False
) -> tuple[Run, dict[str, Scalar]]:
    """Check a simulation as far as no data is needed.

    Args:
        overrides: settings of the run, flat.
        own_backbones: whether the node-configs of the sites name a backbone.

    Returns:
        The run, and its settings flat with absolute paths.

    Raises:
        ConfigError, PackageError, RunError or BackboneError: the simulation could not start; one
            line says why.
    """
    config, settings = parse_run(overrides), dict(overrides)
    # This machine is every site.
    check_packages(packages_for(config.settings, config.plan, config.settings.data, judges=True))
    for key in PATHS:
        if settings.get(key):
            # The processes of the run have another working folder.
            path = Path(str(settings[key])).expanduser().absolute()
            if not path.exists():
                raise ConfigError(f"{key} = {settings[key]!r}: {path} does not exist")
            settings[key] = str(path)
    if config.settings.data != "digits" and not config.settings.data_dir:
        raise ConfigError(
            f"data = {config.settings.data!r} needs data-dir, the folder that holds the data"
        )
    if config.settings.data != "digits" and not Path(str(settings["data-dir"])).is_dir():
        raise ConfigError(
            f"data-dir = {config.settings.data_dir!r} is a file; name the folder that holds the "
            "data"
        )
    if config.settings.data not in OF_FEATURES:
        if config.settings.backbone == OWN_BACKBONE and not own_backbones:
            raise ConfigError(
                f"backbone = {OWN_BACKBONE!r}: simulated sites have no node-config that names one; "
                "write the features with `site features`, or use fedsurrogate.simulate(..., "
                "backbone=module) in Python"
            )
        check_backbone_name(config.settings.backbone)
        settings["backbone"] = with_absolute_place(config.settings.backbone)
        if config.settings.weights_path and ":" in config.settings.backbone:
            check_weights_file(Path(str(settings["weights-path"])))
    check_start(config, simulated=True)
    return config, settings | own_folders(config.settings.output_dir, config.settings.resume)


def with_map_digest(settings: Mapping[str, Scalar], chosen: bool = False) -> dict[str, Scalar]:
    """Settings of a run with the digest of its public map, if files here name it.

    Args:
        settings: flat.
        chosen: whether also of one that the run itself chooses, for a backbone of a known dimension.

    Raises:
        ConfigError: for settings that do not agree, or a file that cannot be read.
    """
    run = parse_run(settings)
    named = run.settings.fedpft.public or run.settings.features.given_projection
    if not (named or (chosen and run.maps)):
        return dict(settings)
    # It needs torch, which other runs begin without.
    from fedsurrogate.strategies.pooling.class_means import with_digest

    return with_digest(settings)


def own_folders(output_dir: str, resume: str) -> dict[str, Scalar]:
    """The coordinator's folders of a run as absolute paths: its app runs in another folder.

    Args:
        output_dir: for run folders.
        resume: the run folder that is continued; empty for none.

    Returns:
        Settings: output-dir, and resume if there is one.

    Example:
        >>> own_folders("/runs", "")
        {'output-dir': '/runs'}
    """
    named = {"output-dir": output_dir, "resume": resume}
    return {key: str(Path(name).expanduser().absolute()) for key, name in named.items() if name}


def check_data_named(own: DataSettings) -> None:
    """Raise ConfigError for settings that name data, where the run would read the bundled digits."""
    given = {"data-dir": own.data_dir, "dataset": ",".join(own.dataset)}
    if own.data == "digits" and (named := [key for key, value in given.items() if value]):
        raise ConfigError(
            f"{named[0]} = {given[named[0]]!r}, but data = 'digits', the default, is bundled and read "
            "from no folder; set data to the kind of your data, such as data = 'imagefolder' for "
            f"one folder of images per class, or remove {' and '.join(named)}"
        )


# Flower's simulation takes half a minute of processor time to start. Sites in parallel win it back
# from so many trainings, on so many cores.
MANY_TRAININGS, SOME_CORES = 500, 4


def flower_engine(wanted: bool | None, sites: int, rounds: int) -> tuple[bool, str]:
    """Whether Flower's simulation runs the sites, which needs Ray, and not this process. Both give
    the same results.

    Args:
        wanted: The user's choice; None to decide by the work.
        sites: their number.
        rounds: in which each of them trains; 0 without.

    Returns:
        Whether, and a line for the user where the work is large; else empty.

    Raises:
        PackageError: It is wanted, and Ray is not installed.
    """
    if wanted:
        check_installed(
            "ray", "--engine flower", "use --engine local, which runs the sites one after another"
        )
    trainings = sites * rounds
    if wanted is not None or trainings < MANY_TRAININGS or usable_cores() < SOME_CORES:
        return bool(wanted), ""
    large = f"{sites} sites times {rounds} rounds are {trainings:,} trainings"
    if is_installed("ray"):
        return True, f"{large}: Flower's engine runs sites in parallel; --engine local does not"
    return False, (
        f"{large}, one after another in this process, because Ray is not installed; for sites in "
        f"parallel run {install_command('simulation')}"
    )


def check_records(overrides: Mapping[str, Scalar], sites: int) -> Sequence[str]:
    """Check the records of a simulation and their distribution to sites.

    Args:
        overrides: settings of the run.
        sites: number of sites.

    Returns:
        Warnings about sites with records of one class only.

    Raises:
        FedSurrogateError: some site would have no usable records.
    """
    check: Callable[[Run, int, int], Sequence[str]] = import_module(RECORD_CHECKS).check_records
    config = parse_run(overrides)
    return check(config, sites, known_dimension(config.settings))


def check_submission(config: Run, control: str) -> None:
    """Check a run on a SuperLink. Its device and its folders are checked only if the SuperLink is
    on this machine. Otherwise the coordinator's app checks them when it starts, before any request
    to a site.

    Args:
        config: the run.
        control: address of the SuperLink's Control API, host:port.

    Raises:
        ConfigError: for settings that name data of another kind than `data`; and as `check_start`.
    """
    check_data_named(config.settings)
    check_backbone_name(config.settings.backbone, required=False)
    if dimension := known_dimension(config.settings):
        check_payload(config, dimension, max(2, len(config.settings.classes)), 1)
    if is_here(control):
        check_start(config, simulated=False)
