"""Properties of all commands: what they load, help, --version, completion, 80 columns, and no
traceback on wrong usage.
"""

import json
import os
import sys
from pathlib import Path

import click
import pytest
from click import Command, Group
from typer.main import get_command
from typer.testing import CliRunner

import fedsurrogate.client_app.cli.main
import fedsurrogate.server_app.cli.main
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.renamed import RENAMED, gone
from fedsurrogate.common.settings import kebab
from tests import commands
from tests.children import imported_by, ran

ROOT = Path(__file__).parents[1]
APPS = {
    "site": fedsurrogate.client_app.cli.main.app,
    "coordinator": fedsurrogate.server_app.cli.main.app,
}
PROGRAMS = {
    "site": "fedsurrogate.client_app.cli.main",
    "coordinator": "fedsurrogate.server_app.cli.main",
}
RUNNERS = {"site": commands.site, "coordinator": commands.coordinator}
LIBRARIES = (
    "flwr", "torch", "ray", "numpy", "scipy", "sklearn", "matplotlib", "cryptography", "grpc",
    "psutil", "jinja2",
)  # fmt: skip
MODELS = (
    "pydantic",
    "fedsurrogate.common.run",
    "fedsurrogate.common.settings",
    "fedsurrogate.client_app.node_config",
)
Captured = pytest.CaptureFixture[str]


def leaves(found: Command, *path: str) -> list[tuple[tuple[str, ...], Command]]:
    """Every command with its words."""
    if not isinstance(found, Group):
        return [(path, found)]
    return [
        each for name, command in found.commands.items() for each in leaves(command, *path, name)
    ]


LEAVES = [
    (app, path, command)
    for app, typed in APPS.items()
    for path, command in leaves(get_command(typed))
]
NAMES = [" ".join((app, *path)) for app, path, _ in LEAVES]


def loaded(program: str, lines: list[list[str]], modules: tuple[str, ...]) -> list[str]:
    """The `modules` that are loaded after these command lines, in one new process."""
    calls = f"""
import contextlib, io, sys
from {PROGRAMS[program]} import main
for line in {lines!r}:
    sys.argv = [{program!r}, *line]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
"""
    return imported_by(calls, modules)


@pytest.mark.parametrize("program", APPS)
def test_help_and_version_load_no_heavy_library_and_no_model_of_settings(program: str) -> None:
    lines = [
        ["--help"],
        ["--version"],
        *([*path, "--help"] for app, path, _ in LEAVES if app == program),
    ]
    lines += (
        [["settings", "--preset", each] for each in ("all", "fedlap")]
        if program == "coordinator"
        else []
    )
    assert loaded(program, lines, LIBRARIES + MODELS) == []


def test_a_small_simulation_loads_no_library_that_takes_longer_than_it(tmp_path: Path) -> None:
    line = ["simulate", "--engine", "local", "-c", f"output-dir={str(tmp_path)!r}"]
    slow = ("sklearn", "scipy.stats", "pandas", "torchvision", "ray")
    assert loaded("coordinator", [line], slow) == []
    assert [*tmp_path.glob("*/report.html")]


def test_the_end_of_a_command_prints_nothing_of_a_library() -> None:
    pytest.importorskip("triton")
    script = f"import sys, torch, triton; from {PROGRAMS['site']} import main; "
    script += "sys.argv = ['site', '--version']; main()"
    done = ran([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")


LISTS = {
    "coordinator": [["settings"], ["settings", "fedpft.rank"]],
    "site": [["settings"], ["policy"]],
}


@pytest.mark.parametrize("program", APPS)
def test_lists_load_no_heavy_library(program: str) -> None:
    assert loaded(program, LISTS[program], (*LIBRARIES, "pydantic")) == ["pydantic"]


@pytest.mark.parametrize(("app", "path", "command"), LEAVES, ids=NAMES)
def test_every_command_explains_itself_and_all_it_takes_and_has_short_help_and_version(
    app: str, path: tuple[str, ...], command: Command
) -> None:
    def run(option: str, columns: str = "80") -> str:
        wide = {"COLUMNS": columns, "TERMINAL_WIDTH": columns}
        done = CliRunner().invoke(APPS[app], [*path, option], env=wide)
        assert done.exit_code == 0
        return done.output

    assert run("-h") == run("--help")
    assert run("--version").startswith("fedsurrogate ")
    assert command.help
    shown = " ".join(run("--help", "400").split())
    for parameter in command.get_params(click.Context(command)):
        message = getattr(parameter, "help", None)
        assert message, parameter.name
        assert " ".join(message.split())[:40] in shown, parameter.name


# Words of a command that is no more, and what is said of them.
GONE = [(app, words, why) for app in APPS for words, why in gone(app).items()]


@pytest.mark.parametrize(("app", "words", "why"), GONE, ids=[f"{a} {w}" for a, w, _ in GONE])
def test_a_command_that_is_no_more_says_what_to_use_instead(app: str, words: str, why: str) -> None:
    done = CliRunner().invoke(APPS[app], [*words.split(), "more"])
    assert done.exit_code == 2
    assert why in done.output


@pytest.mark.parametrize("app", APPS)
def test_what_a_renamed_command_is_named_now_is_there(app: str) -> None:
    there = {path: command for program, path, command in LEAVES if program == app}
    for new in RENAMED[app].values():
        words, _, option = new.partition(" --")
        command = there[tuple(words.split())]
        assert not option or f"--{option.split()[0]}" in {n for p in command.params for n in p.opts}


# What a shell asks for, and a part of the answer.
COMPLETED = {
    "coordinator settings fedpft.r": "fedpft.rank",
    "coordinator settings --method fedl": "fedlap",
    "coordinator simulate -c fedlap-m": "fedlap-mnist",
    "coordinator simulate -c alp": "alpha=",
    "coordinator settings --preset fedlap-f": "fedlap-fashion-mnist",
    "coordinator report one/": "one/20250101T000000Z-fedpft-abc",
    "coordinator watch runs/2": "runs/20250102T000000Z-fedavg-def",
    "coordinator simu": "simulate",
    "site join --node-config data-d": "data-dir=",
    "site settings check": "check-log-dir",
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_shells_complete_keys_methods_presets_and_runs(typed: str, tmp_path: Path) -> None:
    for folder in ("one/20250101T000000Z-fedpft-abc", "runs/20250102T000000Z-fedavg-def"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "manifest.json").write_text("{}")
    program = typed.split()[0]
    asked = {
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    script = f"import sys; sys.argv = [{program!r}]; from {PROGRAMS[program]} import main; main()"
    environment = os.environ | asked | {"PYTHONPATH": str(ROOT)}
    done = ran([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    assert COMPLETED[typed] in done.stdout.split()


@pytest.mark.parametrize("app", APPS)
def test_completion_can_be_installed(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, the answer depends on the shell that runs the tests.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(APPS[app], ["--show-completion", "bash"], prog_name=app)
    assert done.exit_code == 0
    assert f"_{app.upper()}_COMPLETE" in done.output


# Wrong arguments of commands that would start a server, or wait.
STARTS = {"superlink", "app", "metrics", "log"}
# Commands that do their whole work without arguments.
COMPLETE = {"simulate", "plan", "watch", "check", "settings", "policy", "run", "sweep"}


def filled(command: Command, value: str) -> list[str]:
    """A command line that gives `value` for everything that is required."""
    words = []
    for parameter in command.params:
        if not parameter.required:
            continue
        text = "1" if isinstance(parameter.type, click.FloatRange | click.IntRange) else value
        words += [parameter.opts[0], text] if isinstance(parameter, click.Option) else [text]
    return [*words, "--timeout", "0.1"] if command.name == "watch" else words


@pytest.mark.parametrize(("app", "path", "command"), LEAVES, ids=NAMES)
def test_wrong_usage_is_no_traceback(
    app: str,
    path: tuple[str, ...],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "plain.txt").write_text("no settings")
    lines = [["--nonsense"], [*["one"] * 9, "--nonsense"]]
    if command.name not in STARTS:
        values = ("plain.txt", "nothing/at/all", "plain.txt/below", 'a="b"', "data=")
        lines += [
            [*filled(command, value), *extra] for value in values for extra in (["--nonsense"], [])
        ]
        options = [
            each for each in command.params if isinstance(each, click.Option) and not each.is_flag
        ]
        lines += [
            [*filled(command, "plain.txt"), each.opts[0], "plain.txt/below"] for each in options
        ]
        lines += [[*filled(command, "plain.txt"), each.opts[0]] for each in options]
    for line in lines:
        if not line and command.name in COMPLETE:
            continue
        code = RUNNERS[app](monkeypatch, *path, *line)
        out, error = capsys.readouterr()
        assert "Traceback" not in out + error, line
        assert code in (1, 2) or (code == 0 and out), (line, error)
        if code:
            # What the doctor finds is what it prints.
            assert error.strip() or "FAIL" in out, line


def test_every_setting_of_a_site_has_a_meaning_and_a_range() -> None:
    rows = json.loads(
        CliRunner().invoke(fedsurrogate.client_app.cli.main.app, ["settings", "--json"]).output
    )
    assert [row["key"] for row in rows] == [kebab(name) for name in NodeConfig.model_fields]
    for row in rows:
        assert row["text"].endswith(".")
        assert row["range"]
    (one,) = json.loads(
        CliRunner()
        .invoke(fedsurrogate.client_app.cli.main.app, ["settings", "num-partitions", "--json"])
        .output
    )
    assert (one["default"], one["range"], one["unit"]) == (1, "at least 1", "shares")


def test_an_unknown_setting_of_a_site_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert commands.site(monkeypatch, "settings", "datadir") == 1
    assert capsys.readouterr().err == "error: unknown key 'datadir'; did you mean 'data-dir'?\n"


ASKING = [
    (app, path, [each.opts[0] for each in command.params if getattr(each, "prompt", None)])
    for app, path, command in LEAVES
    if any(getattr(each, "prompt", None) for each in command.params)
]


@pytest.mark.parametrize(("app", "path", "options"), ASKING, ids=lambda each: str(each))
def test_where_nobody_can_answer_the_options_are_named_that_do(
    app: str, path: tuple[str, ...], options: list[str]
) -> None:
    """As in a script, with an input that ends."""
    known = ["north", "--node-config", "data=digits"]
    words = [*path, *(known[:1] if path == ("enrol",) else known[1:])]
    found = CliRunner().invoke(APPS[app], words, input="")
    assert found.exit_code == 2
    assert f"nobody can answer here; give {' and '.join(options)}" in found.output
    # One answer alone is not enough, and is not asked for again.
    for one in options[1:]:
        found = CliRunner().invoke(APPS[app], [*words, one, "1"], input="")
        left = [each for each in options if each != one]
        assert f"nobody can answer here; give {' and '.join(left)}" in found.output
