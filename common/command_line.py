"""Shared parts of the commands `site` and `coordinator`: output, errors, exit codes and common
options.

Imported for each help text and completion, so heavy libraries, and the models of the settings, are
imported in functions.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from .errors import ConfigError, FedSurrogateError
from .escapes import documented, for_terminal
from .renamed import gone
from .version import NAME, own_version

if TYPE_CHECKING:
    from rich.table import Column

    from .run import Run


# A command that printed nothing for this long says what it does: early, for a machine whose cores are
# busy takes longer.
SILENT_SECONDS = 0.5
# While a command of a person works; and once it has printed something.
of_a_command, _spoken = threading.Event(), threading.Event()


class SafeConsole(Console):
    """A console on which no text controls the terminal: names may come from other hospitals.

    No markup: patterns, paths and reasons are shown unchanged, "[a-z]" included.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """As of any console; a command that prints is not silent. Texts are not folded, so that a path
        can be copied whole.
        """
        _spoken.set()
        options.setdefault("soft_wrap", all(isinstance(each, str) for each in objects))
        super().print(*objects, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of what is printed; their texts are safe, line by line."""
        for segment in super().render(renderable, options):
            text = "\n".join(map(for_terminal, segment.text.split("\n")))
            yield segment if segment.control else Segment(text, segment.style)


console = SafeConsole()
# Characters of a summary in a list of commands; a summary is folded, not cut.
LONGEST_SUMMARY = 200
SHOWN_VERSIONS = ("flwr", "torch")


def complete_settings(incomplete: str) -> list[tuple[str, str]]:
    """Keys of a run's settings for shell completion: of the last setting in the text."""
    from .help import descriptions

    before, _, begun = incomplete.rpartition(" ")
    start = f"{before} " if before else ""
    return [(f"{start}{row.key}=", row.text) for row in descriptions() if row.key.startswith(begun)]


RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--run-config",
        "--set",
        metavar="'key=value ...'",
        help="Settings of the run, or a file of them (TOML); may be given several times, later ones "
        "win.",
        autocompletion=complete_settings,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
# Of what serves figures to Prometheus, at a site and at the coordinator.
LISTEN = "127.0.0.1:9464"
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to listen: port 0 takes a free one; without --exposed a loopback address.",
    ),
]
Exposed = Annotated[
    bool,
    typer.Option(
        "--exposed", help="Allow an address that other machines reach. No password protects it."
    ),
]
WatchedCertificates = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A certificate whose end is reported; may be repeated."),
]


def _print_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for package in SHOWN_VERSIONS:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} is not installed")
    click.echo(f"{NAME} {own_version()} ({', '.join(versions)}, Python {sys.version.split()[0]})")
    context.exit()


# One object for all commands: click orders the callbacks of options by identity.
VERSION = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the installed versions, and exit.",
)


class _Shared(click.Command):
    """What commands and groups of commands have in common."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), VERSION]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help(ctx, formatter)
        # Typer escapes brackets for Rich also where Rich does not write the help.
        formatter.buffer = [part.replace("\\[", "[") for part in formatter.buffer]

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(limit=max(limit, LONGEST_SUMMARY))


def _gone_from(ctx: click.Context) -> Mapping[str, str]:
    """Commands, and commands with an option, that the program has no more, and what to use."""
    return getattr(ctx.find_root().command, "gone", {})


@contextmanager
def announced(line: str) -> Iterator[None]:
    """The work of a command. If it has printed nothing after `SILENT_SECONDS`, print this line.

    Args:
        line: the command, and what it does.
    """

    def say() -> None:
        if not _spoken.is_set():
            stderr_console().print(f"{line} ...", style="dim")

    _spoken.clear()
    of_a_command.set()
    timer = threading.Timer(SILENT_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        of_a_command.clear()


@contextmanager
def _answered(ctx: click.Context, command: click.Command) -> Iterator[None]:
    """Questions of a command. Where nobody can answer, as in a script, name the options that do."""
    try:
        yield
    except click.Abort as error:
        # Without, a person has stopped it, or has said no.
        if not isinstance(error.__context__, EOFError):
            raise
        click.echo()
        asked = [
            each.opts[0]
            for each in command.params
            if getattr(each, "prompt", None) and not ctx.get_parameter_source(each.name or "")
        ]
        ctx.fail(f"nobody can answer here; give {' and '.join(asked) or 'an option of --help'}")


class _Command(_Shared, TyperCommand):
    def __init__(
        self, name: str | None, *, help: str | None, params: list[click.Parameter], **more: Any
    ) -> None:
        text, texts = documented(help or "", "Args")
        for each in params:
            if isinstance(each, TyperArgument | TyperOption) and each.name in texts:
                each.help = texts[each.name]
        super().__init__(name, help=text, params=params, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = f" {' '.join(args)} ".replace("=", " ")
        for words, why in _gone_from(ctx).items():
            name, _, option = words.partition(" ")
            if name == ctx.info_name and option and f" {option} " in given:
                ctx.fail(why)
        with _answered(ctx, self):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; what it does is the first line where nothing else is printed soon."""
        # Services have logs.
        if self.hidden and self.name != "features":
            return super().invoke(ctx)
        program, _, name = ctx.command_path.rpartition("main ")
        summary = self.get_short_help_str().rstrip(".")
        line = f"{name or program}: {summary[:1].lower()}{summary[1:]}"
        with announced(line), _answered(ctx, self):
            return super().invoke(ctx)


class _Group(_Shared, TyperGroup):
    gone: Mapping[str, str] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        # Groups last.
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: isinstance(self.commands[name], click.Group))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The usage names the options: the list of commands then fits a screen.
        self.format_commands(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *(name for each in self.get_params(ctx) for name in each.opts)}
        if args and args[0].partition("=")[0] not in known:
            # The program: a command that is no more. A group: the command of that name that was.
            before, own = _gone_from(ctx), args[0] if ctx.parent is None else str(ctx.info_name)
            if why := before.get(f"{own} {args[0]}", before.get(own)):
                ctx.fail(why)
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """A command with subcommands. All of them take -h, --help and --version."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Register a function as a subcommand."""
        usual: dict[str, Any] = {"cls": _Command, "options_metavar": "[OPTIONS]"}
        return super().command(name, **usual | options)


def new_app(text: str, program: str = "") -> App:
    """A command with subcommands.

    Args:
        text: its help.
        program: its name if it is a program, which can install shell completion, and knows which
            commands it had before.
    """
    return App(
        cls=type("_Program", (_Group,), {"gone": gone(program)}) if program else _Group,
        no_args_is_help=True,
        # click suggests a similar one by itself; typer would say it again.
        suggest_commands=False,
        add_completion=bool(program),
        pretty_exceptions_enable=False,
        # Rich would cut long names of options and variables at 80 columns, which a reader then
        # cannot type.
        rich_markup_mode=None,
        help=text,
        options_metavar="[-h | --version]",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[..., None]) -> Iterator[None]:
    """These signals call `handler`, and afterwards what they called before. Ignored ones, as under
    nohup, stay ignored.
    """
    before = {number: signal.getsignal(number) for number in signals}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            # None, for a handler that was not set in Python, cannot be set again.
            with suppress(TypeError):
                signal.signal(number, old)


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of `--listen`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"--listen {address[:80]!r}: must be HOST:PORT, such as {LISTEN}")
    return host.strip("[]"), int(port)


def wait_for_interrupt() -> None:
    """Return after Ctrl-C or SIGTERM."""
    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    over.wait()


@cache
def stderr_console() -> Console:
    """The console for progress, warnings and errors, so that stdout contains only the result."""
    return SafeConsole(stderr=True)


def print_table(
    columns: Iterable[str | Column], rows: Iterable[Iterable[str]], **options: Any
) -> None:
    """Print a table on stdout, whose cells are folded, not cut.

    Args:
        columns: names, or columns that are shown in another way.
        rows: of texts.
        options: of the table.
    """
    from rich.table import Column, Table

    shown = (Column(each, overflow="fold") if isinstance(each, str) else each for each in columns)
    table = Table(*shown, **options)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_error(text: str) -> None:
    """Print one line on stderr, in red on a terminal."""
    stderr_console().print(text, style="red")


def run_config_of(settings: Sequence[str] | None) -> Run:
    """The run configuration from `--run-config`. Raises ConfigError."""
    from .run import parse_run
    from .settings.base import parse_overrides

    return parse_run(parse_overrides(settings or []))


def _read_as_utf8() -> None:
    """Start again with UTF-8 where Python knows ASCII only, as with LC_ALL=C and PYTHONUTF8=0: a
    path may hold an umlaut.
    """
    if sys.getfilesystemencoding().lower() in ("ascii", "us-ascii"):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _keep_objects() -> None:
    """Leave all objects as they are at the end; Triton would report those that stay as leaked."""
    if "triton" not in sys.modules:
        gc.freeze()


# A write names no file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_command(app: Callable[[], object]) -> None:
    """Run a command. An expected error becomes one line on stderr and exit code 1.

    So does a file that cannot be read or written: a wrong path is a wrong argument, not a fault of
    the program.
    """
    _read_as_utf8()
    # The libraries make a million objects that stay: looking for garbage among them, also at the end
    # of the process, would take a quarter of a short command.
    gc.set_threshold(10_000)
    atexit.register(_keep_objects)
    try:
        app()
    except FedSurrogateError as error:
        print_error(f"error: {error}")
        sys.exit(1)
    except (ImportError, MemoryError, OSError) as error:
        from .machine import no_room

        if why := no_room(error):
            print_error(f"error: {why}")
            sys.exit(1)
        if isinstance(error, OSError) and error.errno in FULL:
            print_error(f"error: {error.strerror}; make room on the disk, or choose another folder")
            sys.exit(1)
        if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
            raise
        print_error(f"error: {error.filename}: {error.strerror}")
        sys.exit(1)
