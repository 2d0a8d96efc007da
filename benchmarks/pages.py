"""Pages of the results: for each file of benchmarks/results a page of Markdown beside it, with the
title, the script's own description, the table and the machine; and a list of all.

The README and a page of the documentation may hold a table of `_two_backbones.py`, or a short one of a
result: the largest value for each row and column. This script writes what is between two marks anew.

    <!-- largest {worst loss} of searched-attacks by {hostile} of {sites} and epsilon {epsilon} -->

    <!-- end -->

The page `papers.md` has what benchmarks/reproduce/papers.toml lists of each paper, with our figures;
`waiting.md` what benchmarks/waiting.toml lists of where people wait, with goals, and was tried without
gain.

    PYTHONPATH=. python benchmarks/pages.py
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._two_backbones import TABLES
from benchmarks.harness.options import described
from benchmarks.harness.results import RESULTS, stored
from benchmarks.harness.samples import ROOT

BENCHMARKS = ROOT / "benchmarks"
# Results whose names do not begin with the name of their script.
SCRIPTS = {
    "cifar10": "accuracy_against_bytes.py",
    "closed_form_": "closed_form_scale.py",
    "defaults-": "defaults_beside.py",
    "fedlap-cifar10": "fedlap_against_fedavg.py",
    "fedlap-digits": "fedlap_against_fedavg.py",
    "mixtures": "mixtures_against_sklearn.py",
    "pacs": "accuracy_against_bytes.py",
    "private-cifar10": "private_surrogates.py",
    "private-pacs": "private_surrogates.py",
    "reproduce-dpcvae": "reproduce/dpcvae_tables.py",
    "reproduce-fedlap": "reproduce/fedlap_tables.py",
    "reproduce-fedlap-figure": "reproduce/fedlap_figures.py",
    "secure-rounds": "secure_defaults.py",
    "statistics-refit": "statistics_runs.py",
}
MARKED = re.compile(
    r"(?P<mark><!-- largest \{(?P<value>.+?)\} of (?P<name>\S+) by (?P<row>.+?) and (?P<column>.+?) -->"
    r"\n\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
NAMED = re.compile(r"(<!-- table (\S+) -->\n(\n?)).*?(<!-- end -->)", re.DOTALL)
PAPERS, WAITING = BENCHMARKS / "reproduce" / "papers.toml", BENCHMARKS / "waiting.toml"
LONGEST = 200  # Characters of a fact beside the table; longer ones are data.


def script_of(name: str) -> Path:
    """The script that writes the result: the one whose name the result's begins with."""
    plain = name.replace("_", "-")
    found = dict(SCRIPTS)
    for script in BENCHMARKS.rglob("[a-z]*.py"):
        path = script.relative_to(BENCHMARKS)
        found.setdefault(path.with_suffix("").as_posix().replace("/", "-"), path.as_posix())
    fitting = [start for start in found if plain.startswith(start.replace("_", "-"))]
    if not fitting:
        raise ValueError(
            f"no script begins like {name!r}; add it to SCRIPTS of benchmarks/pages.py"
        )
    return BENCHMARKS / found[max(fitting, key=len)]


def records(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result, each with its cells by column."""
    rows = content["rows"]
    return [
        row if isinstance(row, dict) else dict(zip(content["columns"], row, strict=True))
        for row in rows
    ]


def shown(cell: Any) -> str:
    """A cell as Markdown: decimal numbers with four digits or more, nothing for None."""
    text = "" if cell is None else str(cell)
    if isinstance(cell, float):
        text = f"{cell or 0:.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    first, *lines = [f"| {' | '.join(map(shown, line))} |\n" for line in (header, *rows)]
    return "".join((first, f"|{'---|' * len(header)}\n", *lines))


def description(script: Path) -> str:
    """What a script says of itself."""
    return ast.get_docstring(ast.parse(script.read_text())) or ""


def index(names: Sequence[str]) -> str:
    """The page that lists all results, by script with the first sentence about it."""
    rows = dict[Path, list[str]]()
    for name in names:
        rows.setdefault(script_of(name), []).append(f"[{name}]({name}.md)")
    lines = [
        (" ".join(description(script).split("\n\n")[0].split()), ", ".join(links))
        for script, links in sorted(rows.items())
    ]
    return f"# Measured tables\n\n{table(('what is measured', 'tables'), lines)}"


def page(name: str) -> str:
    """The page of a result.

    Args:
        name: of the file, without its ending.
    """
    content, script = stored(name), script_of(name)
    rows = records(content)
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "facts"]
    facts = {
        key: value
        for key, value in (content | content.get("machine", {})).items()
        if key not in ("title", "machine", "columns", "rows") and len(str(value)) <= LONGEST
    }
    return "\n".join(
        (
            f"# {shown(content.get('title', name))}\n",
            f"{description(script)}\n",
            table(columns, [[row.get(key) for key in columns] for row in rows]),
            f"[The numbers]({name}.json) are by `{script.relative_to(ROOT).as_posix()}`. This page is"
            " written by `benchmarks/pages.py`.\n",
            *(f"![{name}]({each.name})\n" for each in RESULTS.glob(f"{name}.png")),
            *(f"- {key}: {shown(value)}" for key, value in facts.items() if value is not None),
            "",
        )
    )


def largest(name: str, value: str, row: str, column: str) -> str:
    """A table with the largest value of a result for each row and column.

    Args:
        name: of the result.
        value: the column whose largest value is shown.
        row: text of a row's first cell; names of columns stand in braces.
        column: text of the header of a column; names of columns stand in braces.
    """
    cells = dict[tuple[str, str], list[float]]()
    for record in records(stored(name)):
        place = row.format_map(record), column.format_map(record)
        cells.setdefault(place, []).append(record[value])
    below, beside = (sorted({place[at] for place in cells}, key=_order) for at in (0, 1))
    return table(
        (re.sub("[{}]", "", row), *beside),
        [
            (one, *(max(cells.get((one, other), []), default=None) for other in beside))
            for one in below
        ],
    )


def _order(text: str) -> list[str | int]:
    """Texts by the numbers in them."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def papers() -> dict[str, Any]:
    """What papers.toml lists, by paper."""
    return tomllib.loads(PAPERS.read_text())


def paper(name: str) -> str:
    """The table of a paper: what it prints, and what stands here."""
    header = ("in the paper", "status", "ours (the paper's)", "how it differs, what is missing")
    rows = []
    for row in papers()[name]["rows"]:
        figures = "; ".join(map(measured, row.get("measured", ())))
        rows.append((f"{row['id']}: {row['what']}", row["status"], figures, row.get("why")))
    return table(header, rows)


def papers_page() -> str:
    """The tables of all papers."""
    return "\n".join(
        (
            "# Item by item: the three papers\n",
            "What each status means, and what the papers leave open: [the three "
            "papers](../../docs/papers.md). This page is written by `benchmarks/pages.py`.\n",
            *(f"## {name}\n\n{paper(name)}" for name in papers()),
        )
    )


def waiting_page() -> str:
    """Where people wait: figures of several results, each with its goal."""
    header = ("where", "least", "median", "most", "goal", "measured by")
    rows, listed = [], tomllib.loads(WAITING.read_text())
    for row in listed["rows"]:
        found, result = row_named(row["result"], row["row"]), row["result"]
        figures = [found.get(row.get(name, "")) for name in ("least", "median", "most")]
        script = script_of(result).relative_to(BENCHMARKS).as_posix()
        rows.append((row["where"], *figures, row.get("goal"), f"[{script}]({result}.md)"))
    return (
        f"# Where people wait\n\n{table(header, rows)}\nProcessor seconds and ratios; what is "
        "beside each in the same run stands on its page. This page is written by `benchmarks/pages.py`.\n"
        "\n## Tried without gain\n\n" + "".join(f"- {each}\n" for each in listed["tried"])
    )


def row_named(result: str, name: str) -> dict[str, Any]:
    """The row of a result that has this cell, or these cells with " | " between them.

    Args:
        result: its name.
        name: of the row.

    Raises:
        ValueError: for a row that is not in the result, or is there twice.
    """
    cells = set(name.split(" | "))
    found = [row for row in records(stored(result)) if cells <= {*map(str, row.values())}]
    if len(found) != 1:
        raise ValueError(f"{result}.json has {len(found)} rows with {name!r}; name one")
    return found[0]


def measured(part: dict[str, Any]) -> str:
    """Figures of a result, each with the paper's in brackets, and a link to its page.

    Args:
        part: `result`, `column`, and the paper's `figures` by row; perhaps the `name` that is shown
            for the row.

    Raises:
        ValueError: as `row_named`.
        KeyError: for a column that is not in the result.
    """
    result, texts = part["result"], []
    for name, printed in part["figures"].items():
        own = shown(row_named(result, name)[part["column"]]).partition(" ±")[0]
        beside = f" ({shown(printed)})" if printed != "" else ""
        texts.append(f"{part.get('name', name.replace(' | ', ', '))}: {own}{beside}")
    script = script_of(result).relative_to(BENCHMARKS).as_posix()
    return f"{'; '.join(texts)} ([{script}]({result}.md))"


def filled(text: str) -> str:
    """A page of the documentation with the tables between its marks."""

    def written(found: re.Match[str]) -> str:
        words = found.groupdict()
        made = largest(words["name"], words["value"], words["row"], words["column"])
        return f"{words['mark']}{made}\n{words['end']}"

    def table(found: re.Match[str]) -> str:
        mark, name, space, end = found.groups()
        return f"{mark}{TABLES[name]()}{space}{end}"

    return NAMED.sub(table, MARKED.sub(written, text))


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that this script writes, with its text."""
    names = [result.stem for result in sorted(RESULTS.glob("*.json"))]
    yield RESULTS / "README.md", index(names)
    yield RESULTS / "papers.md", papers_page()
    yield RESULTS / "waiting.md", waiting_page()
    for name in names:
        yield RESULTS / f"{name}.md", page(name)
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = document.read_text()
        if MARKED.search(text) or NAMED.search(text):
            yield document, filled(text)


if __name__ == "__main__":
    described(__doc__).parse_args()
    for file, text in pages():
        file.write_text(text)
