"""The documentation of the archive for machines without internet: every link leads to a file in it."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)


def complete(folder: Path, root: Path = ROOT) -> None:
    """Add the pages that `make docs` writes, and files of the checkout to which pages of a folder link.

    Args:
        folder: with copied pages, at the same places as in the checkout.
        root: the checkout.

    Raises:
        SystemExit: a link leads to nothing; names page and link.
    """
    for name, text in generated(root).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    while missing := dict(dead_links(folder)):
        for target, page in missing.items():
            there, source = folder / target, root / target
            there.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and ".." not in target:
                shutil.copytree(source, there, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file() and ".." not in target:
                shutil.copy(source, there)
            else:
                sys.exit(f"{page} has a link to {target}, which is not there; mend the link")


def dead_links(folder: Path) -> Iterator[tuple[str, Path]]:
    """Links of pages that lead to nothing in the folder: the path from the folder, and the page."""
    top = folder.resolve()
    for page in sorted(top.rglob("*.md")):
        for found in LINK.finditer(FENCE.sub("", page.read_text())):
            if re.match(r"[a-z]+:", found[1]):
                continue
            target = (page.parent / found[1]).resolve()
            inside = target.is_relative_to(top)
            if not (inside and target.exists()):
                yield str(target.relative_to(top) if inside else f"../{target.name}"), page


def generated(root: Path = ROOT) -> dict[str, str]:
    """Pages that are written from the code, by their place in the checkout."""
    pages = runpy.run_path(str(root / "docs" / "hooks" / "reference.py"))["pages"]
    return {f"docs/{name}": text for name, text in pages().items()}
