"""Every command that the guides print for containers: its service exists, and its program takes it
as printed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides
from tests.deploy.test_compose import DEPLOY, OURS, check_ours, interpolated, settings_of_a_kit
from tests.documents import DOCS, blocks, name_of, words

GUIDES = [
    DEPLOY / "README.md",
    DEPLOY / "kit" / "README.md",
    *sorted((DOCS / "deployment").glob("*.md")),
]
IN_A_SERVICE = re.compile(r"docker compose (?:run --rm|exec)(?: -T)? ([\w-]+)(.*)")
# `in_folder` is a function that the guide defines: `coordinator` in a container without a network.
IN_A_CONTAINER = re.compile(r"in_folder((?: [^()=].*)?)")


def printed(page: Path) -> Iterator[str]:
    """Every command of a page: the lines of its shell blocks, and what stands between backticks in
    its text.
    """
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block, "")
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.split(r"&&", line.split("  #")[0])
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        yield from re.split(r"&&", " ".join(span.split()))


def calls() -> Iterator[tuple[str, str, list[str]]]:
    """Page, service (empty for the function `in_folder`) and words of every command of ours in a
    container.
    """
    for page in GUIDES:
        for line in map(str.strip, printed(page)):
            if found := IN_A_SERVICE.fullmatch(line):
                yield name_of(page), found[1], words(found[2])
            elif (
                (found := IN_A_CONTAINER.fullmatch(line))
                and found[1].split()[:1]
                and "..." not in line
            ):
                yield name_of(page), "", ["coordinator", *words(found[1])]


def test_a_hospital_reads_one_page() -> None:
    assert len((DEPLOY / "kit" / "README.md").read_text().split()) <= 400


def test_the_guides_print_the_commands_that_this_test_reads() -> None:
    found = {(service, *line[:3]) for _, service, line in calls()}
    assert {
        ("site", "site", "ledger", "open"),
        ("node", "site", "doctor", "--link-only"),
        ("site",),
    } <= found
    assert {
        ("superlink", "coordinator", "run", "-c"),
        ("", "coordinator", "sites", "certs"),
        ("register",),
    } <= found


@pytest.mark.parametrize(
    ("page", "service", "line"),
    calls(),
    ids=lambda each: " ".join(each) if isinstance(each, list) else each,
)
def test_a_command_runs_in_its_service_as_printed(
    page: str, service: str, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("compose.hospital.yml", "compose.coordinator.yml")
    settings = settings_of_a_kit(tmp_path)
    services: dict[str, dict[str, dict[str, str]]] = {}
    for file in files:
        services |= yaml.safe_load(interpolated(DEPLOY / file, settings))["services"]
    if service:
        assert service in services, f"{page}: no service {service}"
        for name, value in services[service].get("environment", {}).items():
            monkeypatch.setenv(name, value)
    filled = [word.replace("{coordinator}", "fl.example.org:9092") for word in line]
    if not filled:
        return
    program = filled[0]
    assert program in OURS, f"{page}: {program}"
    # What a command asks for when it is typed.
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "1")
    check_ours(filled)
    if "-c" in filled and "..." not in (text := filled[filled.index("-c") + 1]):
        parse_run(parse_overrides([text]))
