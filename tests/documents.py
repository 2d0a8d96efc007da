"""The pages that users read, and the commands in them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# Every page: front page, site, and the guides outside of docs/.
PAGES = [
    README,
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / "deploy" / name for name in ("README.md", "kit/README.md")),
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")),
]
# The two ways to deploy without containers: all on one machine, and between machines with
# certificates and keys.
ONE_MACHINE, BETWEEN_MACHINES = (
    DOCS / "tutorials" / "one-machine.md",
    DOCS / "deployment" / "connections.md",
)


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str = "sh") -> list[str]:
    """The code blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """The command lines of every block, as typed: continued lines joined, lines that are comments
    left out.
    """
    lines = [block.replace("\\\n", " ").splitlines() for block in blocks(page)]
    return [
        [line for line in block if line.strip() and not line.startswith("#")] for block in lines
    ]


def shown_after(page: Path) -> list[tuple[list[str], str]]:
    """The command lines of each block of commands, with the output that stands right after it; empty
    where none does.
    """
    pattern = r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    found = re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        ([line for line in block.replace("\\\n", " ").splitlines() if line.strip()], text)
        for block, text in found
    ]


def masked(text: str) -> list[str]:
    """The lines of an output without what differs from one machine or hour to another: numbers, paths,
    digests, and how wide a table is.
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    plain = re.sub(r"\S*/\S+|\b(?=\d*[a-f])[0-9a-f]{6,}\b", "PATH", plain)
    plain = re.sub(r"[-+]?\d[\d.,]*", "#", plain)
    plain = re.sub(r"[\u2500-\u257f]+", "|", plain)
    plain = re.sub(r"# (?:s|ms|min)\b", "#", plain)
    return [" ".join(line.split()) for line in plain.splitlines() if line.strip()]


def check_shown(expected: str, printed: str) -> int:
    """Each line that a page shows is printed, in this order, up to its numbers; returns how many."""
    left, lines = masked(printed), masked(expected)
    for line in lines:
        assert line in left, f"{line!r} is not printed:\n{printed}"
        left = left[left.index(line) + 1 :]
    return len(lines)


NOT_COMPARED = (
    r"\S*/\S+|\b(?=\d*[a-f])[0-9a-f]{6,}\b|\b\d{8}-\S+|[\d.]+ (?:s|ms|min)\b|[\d.]+ a second"
)
NUMBERS = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
# A private run's metrics move by a few points, as a share and as a percentage.
BY_NOISE = {"%": 8.0, "": 0.08}


def check_numbers(expected: str, printed: str, noisy: bool) -> int:
    """The numbers that a page shows are printed: to the last digit but one, or with noise to the points
    by which a metric moves. Paths, times and rates are not compared. Returns how many were.
    """
    compared = 0
    left = [line for line in printed.splitlines() if line.strip()]
    for line in (line for line in expected.splitlines() if line.strip()):
        alike = [at for at, other in enumerate(left) if masked(other) == masked(line)]
        # Of rows that differ by their numbers alone, such as those of sites, the most alike.
        shown = line.split()
        place = max(alike, key=lambda at: sum(map(str.__eq__, left[at].split(), shown)))
        plain = [re.sub(NOT_COMPARED, "", each) for each in (line, left[place])]
        for one, other in zip(*(NUMBERS.finditer(each) for each in plain), strict=True):
            near = abs(float(one[0].replace(",", "")) - float(other[0].replace(",", "")))
            if not noisy:
                # Sums of a processor's own order move the last digit of a share.
                decimals = len(one[0].partition(".")[2])
                same = near <= (1.01 * 10.0**-decimals if decimals else 0)
            else:
                sign = "%" if plain[0][one.end() :].startswith("%") else ""
                same = near <= BY_NOISE[sign] or (not sign and "." not in one[0])
            assert same, f"{line!r} is shown, {left[place]!r} printed"
            compared += 1
        left = left[place + 1 :]
    return compared


def words(line: str) -> list[str]:
    """The words of a command line, without a comment behind it."""
    return shlex.split(line, comments=True)
