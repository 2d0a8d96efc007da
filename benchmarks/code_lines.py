"""Lines of code, of docstrings and of comments by folder, of the working tree or of a commit.

    PYTHONPATH=. python benchmarks/code_lines.py [COMMIT ...]

A blank line counts nowhere, and a line with code and a comment is code. Generated code is left out.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("common", "client_app", "strategies", "server_app", "fedsurrogate", "benchmarks")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of(source: str) -> Counter[str]:
    """Lines of a file by kind: "code", "docstrings" and "comments".

    Example:
        >>> sorted(lines_of('x = 1  # one' + chr(10) + '# two' + chr(10)).items())
        [('code', 1), ('comments', 1)]
    """
    return Counter({kind: len(lines) for kind, lines in line_numbers(source).items() if lines})


def line_numbers(source: str) -> dict[str, set[int]]:
    """The lines of each kind in a file, from one."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code, comments = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines = set(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.COMMENT:
            comments |= lines
        elif token.type not in NO_CODE:
            code |= lines
    code -= docstrings
    return {"code": code, "docstrings": docstrings, "comments": comments - code}


def sources(commit: str) -> Iterator[tuple[str, str]]:
    """Path and content of each Python file of a commit; of the working tree for an empty name."""
    if not commit:
        for folder in FOLDERS:
            for path in sorted((ROOT / folder).rglob("*.py")):
                yield path.relative_to(ROOT).as_posix(), path.read_text()
        return
    packed = subprocess.run(
        ["git", "archive", commit, *FOLDERS], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name, content.read().decode()


def counted(commit: str) -> dict[str, Counter[str]]:
    """Lines by folder and kind."""
    found: dict[str, Counter[str]] = {folder: Counter() for folder in FOLDERS}
    for path, source in sources(commit):
        if not path.endswith("_pb2.py"):
            found[path.partition("/")[0]] += lines_of(source)
    return found


def main() -> None:
    """Print a table for each commit, and for the working tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commits", nargs="*", help="commits to count besides the working tree")
    for commit in [*parser.parse_args().commits, ""]:
        rows = counted(commit)
        rows["all"] = sum(rows.values(), Counter())
        print(f"\n| {commit or 'working tree'} | code | docstrings | comments | share of code |")
        print("|---|---|---|---|---|")
        for folder, lines in rows.items():
            share = lines["code"] / max(1, sum(lines.values()))
            cells = (lines[kind] for kind in ("code", "docstrings", "comments"))
            print(f"| {folder} | {' | '.join(map(str, cells))} | {share:.0%} |")


if __name__ == "__main__":
    main()
