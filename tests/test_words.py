"""Old words stay out of what people type and read: the field's words stand in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Command, Group
from click.testing import CliRunner
from typer.main import get_command

from fedsurrogate.client_app.cli.main import app as site
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.help import descriptions
from fedsurrogate.common.renamed import SETTINGS, VALUES, gone, of_today, renamed_setting
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.cli.main import app as coordinator

ROOT = Path(__file__).parents[1]
# By old word: how it is written, and what stands in its place.
OLD = {
    "secure sum": (r"secure[\s_-]+(sums?|summation)\b", "secure aggregation"),
    "joint noise": (r"joint[\s_-]+noise", "distributed noise"),
    "pooled head": (
        r"pooled[\s_-]+heads?\b|accuracy\.oracle|`oracle`|(compared with|against) oracle",
        "centralized head",
    ),
    "largest class alone": (r"largest class (alone|\|)|giving the largest class", "majority baseline"),
    "target": (r"\btarget\s*=\s*\\?[\"']?(class|labels|number|time)\b", "task"),
    "measure": (r"\b([Aa]|[Ee]ach|[Ee]very) measure\b(?! of privacy)|^Measures of", "metric"),
    "beyond chance": (r"beyond chance", "significant"),
    "remark": (r"\bremarks?\b|\bremarked\b", "warning"),
    "undefended": (r"\bundefended\b", "note"),
    "odd": (r"\b[Oo]dd (in the data|sites?|hospitals?|columns?|machine|records?)\b", "outlier"),
    "power": (r"features\.power\b(?![-_])|--power\b(?!-)", "power-transform"),
    "public centre": (r"public centre", "public mean"),
    "own mean": (r"own_mean|own mean and (length|norm)", "mean over columns"),
    "opening": (r"dpcvae\.opening", "dpcvae.first-round"),
    "introduction": (r"\bintroductions?\b|\bintroduce themselves\b", "identification"),
    "witness": (r"\bwitness(es)?\b|WITNESS", "check log"),
    "relay": (r"\brelay(s|ed)?\b", "chain message"),
    "relearn": (r"\brelearn(s|ed|ing)?\b", "refit"),
    "papers": (r"\bpapers/|sites (certs|key|kit|register|unregister|list) papers\b", "certificates"),
    "carried": (r"carried as files", "offline exchange"),
    "strangeness": (r"strangeness", "out-of-distribution score"),
    "nobody": (r"records? of nobody", "a record without a patient ID"),
}  # fmt: skip
PATTERNS = {word: re.compile(pattern, re.MULTILINE) for word, (pattern, _) in OLD.items()}


def found(text: str) -> dict[str, int]:
    """How often each old word is in a text; nothing of those that are not."""
    counts = {word: len(pattern.findall(text)) for word, pattern in PATTERNS.items()}
    return {word: count for word, count in counts.items() if count}


def helps(name: str, command: Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The help of a program and of all its commands, by the words."""
    done = CliRunner().invoke(COMMANDS[name], [*path, "--help"], prog_name=name)
    yield " ".join((name, *path)), done.output
    if isinstance(command, Group):
        for each, inner in command.commands.items():
            yield from helps(name, inner, (*path, each))


COMMANDS = {"coordinator": get_command(coordinator), "site": get_command(site)}
PAGES = sorted(
    path
    for pattern in ("README.md", "docs/**/*.md", "deploy/**/*.md", "benchmarks/results/*.md")
    for path in ROOT.glob(pattern)
)
REPORTS = sorted(
    path
    for room in ("server_app/report", "client_app/audit")
    for path in (ROOT / room / "templates").glob("*.md")
)
# What people type or read, by place.
TEXTS = {
    **{f"{name} --help": text for app, own in COMMANDS.items() for name, text in helps(app, own)},
    **{f"setting {row.key}": f"{row.key} {row.text} {row.range}" for row in descriptions()},
    **{str(path.relative_to(ROOT)): path.read_text() for path in (*PAGES, *REPORTS)},
}


@pytest.mark.parametrize("place", TEXTS)
def test_no_old_word_is_where_people_read(place: str) -> None:
    assert found(TEXTS[place]) == {}


@pytest.mark.parametrize("program", COMMANDS)
def test_no_page_and_no_message_names_an_old_command(program: str) -> None:
    there = COMMANDS[program]
    assert isinstance(there, Group)
    old = [words for words in gone(program) if words.split()[0] not in there.commands]
    named = re.compile(rf"`{program} ({'|'.join(old)})[ `]")
    rooms = ("client_app", "common", "server_app", "strategies")
    code = (file for room in rooms for file in (ROOT / room).rglob("*.py"))
    files = [*PAGES, *(file for file in code if file.name != "renamed.py")]
    assert len(old) > 5
    assert [
        (file, named.findall(text)) for file in files if named.search(text := file.read_text())
    ] == []


def test_there_is_something_to_read() -> None:
    assert len(PAGES) > 40
    assert len(REPORTS) >= 8
    assert len(TEXTS) > 300


@pytest.mark.parametrize("old", SETTINGS)
def test_the_error_of_an_old_setting_names_the_new_one(old: str) -> None:
    assert SETTINGS[old] in renamed_setting(old, 1)


@pytest.mark.parametrize(
    "old", sorted({"target", "secure-sum", "features.power", "dpcvae.opening"})
)
def test_a_run_refuses_an_old_setting_by_its_new_name(old: str) -> None:
    with pytest.raises(ConfigError, match=f"{old}.* is now {SETTINGS[old]}"):
        parse_run({old: "labels" if old == "target" else 0})


@pytest.mark.parametrize("key", VALUES)
def test_a_run_refuses_an_old_value_by_its_new_name(key: str) -> None:
    for old, new in VALUES[key].items():
        with pytest.raises(ConfigError, match=f"is now {key} = '{new}'"):
            parse_run({key: old})


def test_stored_settings_have_the_words_of_today() -> None:
    stored = {"target": "time", "secure-sum": True, "seed": 3, "fedavg.noise": "joint"}
    today = {
        "task": "survival",
        "secure-aggregation": True,
        "seed": 3,
        "fedavg.noise": "distributed",
    }
    assert of_today(stored) == today
    assert of_today(today) == today
