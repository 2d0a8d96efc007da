"""Interrupting and continuing a run: the signals that end it in order, whether a folder can be
continued with some settings, and the command that does it.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsurrogate.common.command_line import handling
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import Scalar, settings_text

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
        before = parse_run(manifest["config"])
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


def continuation(folder: Path) -> str:
    """What to do with a run that has not finished, for a reader of its folder.

    Args:
        folder: a run folder.

    Returns:
        A command, which gives the settings that differ from the defaults; empty if the settings of
        the run are unknown.
    """
    manifest = _content(folder / MANIFEST)
    try:
        config = parse_run(manifest["config"])
    except (ConfigError, KeyError, TypeError, AttributeError):
        return ""
    defaults = Settings().flat()
    here = config.settings.flat()
    changed = {
        key: value for key, value in here.items() if value != defaults.get(key) and key != "resume"
    }
    words, typed, there = ["coordinator", "run"], folder, Path(config.settings.output_dir)
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
