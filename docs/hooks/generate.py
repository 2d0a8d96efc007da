"""Pages that are written when the site is built: references from the code, and guides and measured
tables that live elsewhere in the repository.

MkDocs calls `on_files` and `on_page_markdown`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import reference  # noqa: E402  (the two folders above must be on the path first)

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = ROOT / "docs"
# Files outside of docs/ that are pages of the site.
GUIDES = {
    "deploy/README.md": "deployment/guide.md",
    "deploy/kit/README.md": "deployment/kit.md",
    "ARCHITECTURE.md": "development/architecture.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
    "SECURITY.md": "development/security.md",
}
# Measured tables: pages without a place in the navigation and in the search.
MEASURED = {
    f"benchmarks/results/{file.name}": f"measured/{file.name}"
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
}
ELSEWHERE = GUIDES | MEASURED
# Files that a link names in a clone, and the pages that are generated from them.
REFERENCES = {
    "pyproject.toml": "reference/settings.md",
    "client_app/node_config.py": "reference/node-config.md",
    "client_app/governance/policy.py": "reference/policy.md",
    "common/command_line.py": "reference/commands.md",
    "server_app/runs/presets.py": "reference/presets.md",
    "fedsurrogate/__init__.py": "reference/python.md",
}
PAGES = ELSEWHERE | REFERENCES | {"README.md": "index.md"}
FIGURES = "figures"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(```.*?```)", re.DOTALL)
MERMAID = re.compile(r"```mermaid\n.*?```", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, guides, measured tables and figures to the files of the site."""
    from mkdocs.structure.files import File

    for uri, text in reference.pages().items():
        files.append(File.generated(config, uri, content=text))
    for source, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for figure in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"{FIGURES}/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files of the repository work in the site, and show an image in place of a
    Mermaid drawing.

    Mermaid would be loaded from a server on the internet.
    """
    uri = page.file.src_uri
    source = next((name for name, target in ELSEWHERE.items() if target == uri), f"docs/{uri}")
    if source in MEASURED:
        page.meta["search"] = {"exclude": True}
    return relinked(markdown, source, uri)


def relinked(markdown: str, source: str, uri: str) -> str:
    """The text with links for the site. source: the text's file in the repository; uri: its page."""
    picture = (
        f"![The parts]({os.path.relpath('docs/images/parts.svg', PurePosixPath(source).parent)})"
    )
    parts = FENCE.split(MERMAID.sub(picture, markdown))
    parts[::2] = [LINK.sub(lambda found: _link(found, source, uri), part) for part in parts[::2]]
    return "".join(parts)


def _link(found: re.Match[str], source: str, uri: str) -> str:
    bang, label, target, anchor = found[1], found[2], found[3], found[4] or ""
    if re.match(r"[a-z]+:", target):
        return found[0]
    name = os.path.normpath(f"{PurePosixPath(source).parent}/{target}")
    if name.startswith("docs/"):
        inside = name.removeprefix("docs/")
    elif name in PAGES:
        inside = PAGES[name]
    elif name.startswith("benchmarks/results/") and name.endswith(".png"):
        inside = f"{FIGURES}/{PurePosixPath(name).name}"
    elif (ROOT / name).exists():  # Source code is not part of the site: name the file.
        return (
            f"`{name}`"
            if label.strip("`") in (name, PurePosixPath(name).name)
            else f"{label} (`{name}`)"
        )
    else:  # MkDocs reports it as a dead link.
        return found[0]
    return f"{bang}[{label}]({os.path.relpath(inside, PurePosixPath(uri).parent)}{anchor})"
