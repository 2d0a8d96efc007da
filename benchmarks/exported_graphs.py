"""Largest difference of a probability between exported graphs, in their own runtimes, and the
product, on 200 photographs.

    python benchmarks/exported_graphs.py [WHICH]

Claim: at most 1e-4. MobileNetV2 trained on ImageNet, with a head learned from PACS photographs; a
residual network of timm and a vision transformer of open_clip, with random weights and random
heads. It runs tests/server_app/export/test_graphs.py, where everything is checked, and needs the
packages of the extra `onnx`. WHICH selects tests as the option -k of pytest does, such as "timm and
onnx"; the results of the others are kept.
"""

import importlib.metadata
import importlib.util
import sys
from typing import Any

import pytest

from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import ROOT, shared

NAME = "exported-graphs"
PACKAGES = ("onnx", "onnxruntime", "onnxscript")


class Collected:
    """A pytest plugin that collects what the tests have measured."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, float]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the measurements of a test that has passed."""
        if report.when == "call" and report.passed:
            self.rows += [value for name, value in report.user_properties if name == "graph"]


def main() -> None:
    parser = described(__doc__)
    parser.add_argument(
        "only",
        nargs="?",
        help="the part of the tests' names that are run; other rows stay as they are",
    )
    only = parser.parse_args().only
    shared("data/pacs/photo-test.parquet")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: needs {', '.join(missing)}")
        return
    collected = Collected()
    test = ROOT / "tests" / "server_app" / "export" / "test_graphs.py"
    some = ["-k", only] if only else []
    code = pytest.main(
        ["-q", "-m", "slow", *some, "--rootdir", str(ROOT), str(test)], plugins=[collected]
    )
    if code:
        sys.exit(int(code))
    rows = {row[:2]: row for row in collected.rows}
    if only:
        rows = {row[:2]: row for row in kept_rows(NAME, lambda row: False)} | rows
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    columns = ("backbone", "graph", "largest difference", "standard deviation of the probabilities")
    report(
        NAME,
        "exported graphs against the product, 200 photographs",
        columns,
        sorted(rows.values()),
        packages=versions,
    )


if __name__ == "__main__":
    main()
