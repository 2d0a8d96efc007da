"""What an auditor of a hospital reads: the functions that run at a site, from a message to the reply.

A site with its own folder of images, policy and ledger answers the requests of one whole run in this
process, as it would at a hospital. Every function of the project that runs at the site between
message and reply is noted when it is first called. A row is a file, in the order of first calls, with
the lines of its functions; their code lines are counted without docstrings and comments. Each list
begins with `client_app/clientapp.py`, and ends there: every reply passes through its `_answer`.
Claim: at most 3,000 code lines for each method of the three papers.

    python benchmarks/reading_list.py --runs fedpft
"""

import ast
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Context, Message
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.code_lines import line_numbers
from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import ROOT
from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment import local_engine

NAME, SITES, IMAGES = "reading-list", 3, 600
ROOMS = ("client_app", "common")
COLUMNS = ("run", "functions", "code lines", "order", "file", "lines")
POLICY = "without-dp = true\nexact-sums-at-models = true\n"
POLICY += "epsilon-total = 1000.0\nepsilon-per-run = 100.0\ndelta = 1e-5\n"
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
# Settings of each run, beside the data.
RUNS: dict[str, dict[str, Any]] = {
    "fedpft": {"method": "fedpft"},
    "fedpft, epsilon": {"method": "fedpft", **PRIVATE},
    "fedlap": {"method": "fedlap", "fedlap.rounds": 2},
    "fedlap, epsilon": {"method": "fedlap", "fedlap.rounds": 2, **PRIVATE},
    "dpcvae": {"method": "dpcvae", "dpcvae.rounds": 2, **PRIVATE},
}
Place = tuple[str, int]


class Trace:
    """The functions of the site's code that run, in the order of their first calls."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self._seen: dict[CodeType, None] = {}

    def _call(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in self._seen:
            self._seen[code] = None
            file = Path(os.path.realpath(code.co_filename))
            inside = file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ROOMS
            if inside and code.co_name != "<module>":
                self.places[file.relative_to(ROOT).as_posix(), code.co_firstlineno] = None

    def around(self, app: Callable[[Message, Context], Message]) -> Callable[..., Message]:
        """The site's app, whose calls are noted."""

        def traced(message: Message, context: Context) -> Message:
            threading.settrace(self._call)
            sys.settrace(self._call)
            try:
                return app(message, context)
            finally:
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]

        return traced


def ranges(file: str, starts: Iterable[int]) -> list[tuple[int, int]]:
    """First and last line of the outermost functions of a file that begin at some of these lines."""
    wanted, found = set(starts), []
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in wanted:
                found.append((first, node.end_lineno or first))
    return sorted(
        one
        for one in found
        if not any(other != one and other[0] <= one[0] and one[1] <= other[1] for other in found)
    )


def rows_of(name: str, trace: Trace) -> list[tuple[object, ...]]:
    """A row for each file."""
    files: dict[str, list[int]] = {}
    for file, line in trace.places:
        files.setdefault(file, []).append(line)
    rows: list[tuple[object, ...]] = []
    # Of a module whose import alone runs meanwhile, no function is called.
    called = {file: parts for file, starts in files.items() if (parts := ranges(file, starts))}
    for order, (file, parts) in enumerate(called.items(), 1):
        code = line_numbers((ROOT / file).read_text())["code"]
        lines = sum(any(first <= line <= last for first, last in parts) for line in code)
        text = ", ".join(f"{first}-{last}" for first, last in parts)
        rows.append((name, len(parts), lines, order, file, text))
    return rows


def site(folder: Path, index: int) -> dict[str, Any]:
    """The node-config of a site with images of its own in a folder for each class."""
    data = load_digits()
    place = folder / f"site-{index}"
    for number in range(index * IMAGES, (index + 1) * IMAGES):
        if number < len(data.images):
            kept = place / str(data.target[number])
            kept.mkdir(parents=True, exist_ok=True)
            pixels = (data.images[number] * 15.9).astype("uint8")
            Image.fromarray(pixels).resize((16, 16)).save(kept / f"{number}.png")
    (folder / "policy.toml").write_text(POLICY)
    node = {"site": f"site-{index}", "data": "imagefolder", "data-dir": str(place)}
    node |= {"policy": str(folder / "policy.toml")}
    open_ledger(parse_node_config(node))
    return node


def read(name: str, folder: Path) -> list[tuple[object, ...]]:
    """The rows of one run."""
    nodes = [site(folder, index) for index in range(SITES)]
    settings: dict[str, Any] = {"output-dir": str(folder / "runs"), "image-size": 16}
    settings |= {"classes": ",".join(map(str, range(10)))} | RUNS[name]
    if RUNS[name]["method"] != "fedlap":
        settings["backbone"] = "pixels"
    trace = Trace()
    app = trace.around(local_engine._client_app())
    with patch.object(local_engine, "_client_app", lambda: app):
        local_engine.run_here(nodes, parse_run(settings), settings, lambda _: None, report=False)
    return rows_of(name, trace)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [tuple(row) for row in stored(NAME).get("rows", []) if row[0] not in options.runs]
    for name in options.runs:
        with tempfile.TemporaryDirectory() as home:
            os.environ |= {"HOME": home, "XDG_STATE_HOME": f"{home}/s"}
            os.environ["XDG_CONFIG_HOME"] = f"{home}/c"
            Path(home, name).mkdir()
            found = read(name, Path(home, name))
        rows += found
    report(NAME, "what runs at a site, from message to reply", COLUMNS, rows, **totals(rows))


def totals(rows: Iterable[tuple[Any, ...]]) -> dict[str, str]:
    """Files, functions and code lines by run."""
    found: dict[str, list[int]] = {}
    for name, functions, lines, *_ in rows:
        sums = found.setdefault(name, [0, 0, 0])
        found[name] = [sums[0] + 1, sums[1] + functions, sums[2] + lines]
    return {
        name: f"{files} files, {functions} functions, {lines} code lines"
        for name, (files, functions, lines) in found.items()
    }


if __name__ == "__main__":
    main()
