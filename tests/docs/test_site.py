"""The documentation builds strictly, loads nothing from elsewhere, and its references hold every
setting and command.
"""

import os
import re
import sys
import tomllib
from html import unescape
from pathlib import Path

import pytest

from fedsurrogate.client_app.governance.policy import DEFAULT, Policy, load_policy
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import PUBLIC_SENTENCES, FedSurrogateError
from tests.children import ok, ran
from tests.documents import DOCS, PAGES, ROOT, blocks, name_of

# What a browser loads by itself; other links are for people.
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*?\b(?:src|href|data)=\"?([^\" >]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    ok(ran(command, cwd=ROOT, env=environment))
    return folder


def words_of(page: Path) -> str:
    """The text of a built page, without tags."""
    article = page.read_text().partition("<article")[2].partition("</article>")[0]
    return unescape(re.sub(r"<[^>]+>", "", article))


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = LOADED.findall(page.read_text())
        assert loaded, page
        elsewhere = [each for each in loaded if re.match(r"([a-z]+:)?//", each)]
        assert not elsewhere, f"{page.name} loads {elsewhere}"
        assert 'class="mermaid"' not in page.read_text(), (
            f"{page.name}: the browser would load Mermaid from the internet"
        )
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


def test_every_source_page_is_built(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    assert not list(site.rglob("*.py"))


def test_the_reference_of_settings_has_every_key_with_its_section(site: Path) -> None:
    shown = words_of(site / "reference" / "settings.html")
    # A dot in a key of TOML makes a table: fedpft.rank is {"fedpft": {"rank": ...}}.
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    keys = [name for name, value in tables.items() if not isinstance(value, dict)]
    keys += [
        f"{section}.{name}"
        for section, value in tables.items()
        if isinstance(value, dict)
        for name in value
    ]
    missing = [key for key in keys if not re.search(rf"(?m)^\s*{re.escape(key)}\s*$", shown)]
    assert len(keys) > 80
    assert not missing


@pytest.mark.parametrize(("page", "model"), [("node-config", NodeConfig), ("policy", Policy)])
def test_the_references_of_a_site_have_every_key(
    site: Path, page: str, model: type[NodeConfig | Policy]
) -> None:
    shown = words_of(site / "reference" / f"{page}.html")
    for name in model.model_fields:
        assert re.search(rf"(?m)^\s*{name.replace('_', '-')}\s*$", shown), name


def test_troubleshooting_has_every_code_with_the_sentence_that_the_coordinator_reads() -> None:
    rows = dict(
        re.findall(r"(?m)^\| `([a-z]+)` \| ([^|]+?) \|", (DOCS / "troubleshooting.md").read_text())
    )
    assert {code: rows.get(code) for code in PUBLIC_SENTENCES} == PUBLIC_SENTENCES
    assert {kind.code for kind in FedSurrogateError.__subclasses__()} <= set(rows)


def test_the_policy_in_the_documentation_is_the_default(tmp_path: Path) -> None:
    (text,) = blocks(DOCS / "privacy" / "gate-and-ledger.md", "toml")
    file = tmp_path / "policy.toml"
    file.write_text(text)
    assert load_policy(str(file)) == DEFAULT


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_row_of_a_table_belongs_to_a_header(page: Path) -> None:
    lines = page.read_text().split("\n")
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        starts = line.startswith("|") and not before.startswith("|")
        assert not starts or set(after) <= set("|-: "), (
            f"{line[:60]!r} starts a table without a header"
        )
