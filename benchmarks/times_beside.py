"""Whether a row of benchmarks/results that has a time is slower than in an earlier version.

Each script runs in a checkout of the earlier version and in one of this, in turn, with the words of its
result. A row of this table is a row and column of that result: least and median of the turns, and the
median of the ratios within a turn. Scripts that compare with an earlier version themselves, or with an
anchor in the same run, are in `waiting.md`. Claim: no row has a ratio above 1.1, of both median and least.

    git clone . /tmp/before && git -C /tmp/before checkout REV; git clone . /tmp/now
    PYTHONPATH=. python benchmarks/times_beside.py --before /tmp/before --now /tmp/now

Results are written in the two checkouts, not here. --only takes names of results.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.timing import ratio

NAME = "times-beside"
MOST = 1.1
# By result: words of the command line, and the columns with times.
SCRIPTS: dict[str, tuple[str, Sequence[str]]] = {
    "peers-statistics": ("peers_statistics.py", ("median",)),
    "dpcvae-step": ("dpcvae_step.py", ("ms",)),
    # Over FedAvg in the same run: a round takes half a minute, in which a machine drifts.
    "fedlap-cost-digits": ("fedlap_cost.py digits", ("ratio",)),
    "fedlap-cost-paper": ("fedlap_cost.py paper", ("ratio",)),
    "secure-aggregation-cost": (
        "secure_aggregation.py --parts cost",
        ("site s", "coordinator s"),
    ),
    "closed_form_sites": (
        "closed_form_scale.py --part sites --dimension 128 --sites 100 1000 10000",
        ("coordinator CPU s",),
    ),
    "closed_form_sites_harm": (
        "closed_form_scale.py --part sites --dimension 128 --defence harm --sites 100 1000",
        ("coordinator CPU s",),
    ),
    "closed_form_sizes": ("closed_form_scale.py --part sizes", ("pool s", "solve s")),
    "large_site": ("large_site.py", ("CPU s",)),
    "many_sites": ("many_sites.py --sites 100 1000", ("CPU s",)),
    "many_sites_labels": ("many_sites.py --target labels --sites 100 1000", ("CPU s",)),
    "many_sites_time": ("many_sites.py --target time --sites 100 1000", ("CPU s",)),
    "many-senders": ("many_senders.py", ("seconds to collect",)),
}
Times = dict[tuple[str, str], float]


def run(tree: Path, name: str) -> Times:
    """Times of a result, measured anew with a checkout's scripts, by row and column."""
    words, columns = SCRIPTS[name]
    script, *options = words.split()
    environment = dict(os.environ) | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # Else each process compiles the checkout's modules again, which no user's does.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    file = tree / "benchmarks/results" / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(tree / "benchmarks" / script), *options]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not file.is_file():
        raise SystemExit(f"{tree}, {words}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    result = json.loads(file.read_text())
    found: Times = {}
    for row in result["rows"]:
        # What a row is of stands before what was measured.
        named = list(map(str, takewhile(lambda cell: not isinstance(cell, float), row)))
        for column in columns:
            value = row[result["columns"].index(column)]
            found[" | ".join(named), column] = float(value)
    return found


def commit(tree: Path) -> str:
    """The short name of a checkout's commit."""
    words = ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def compared(name: str, before: Path, now: Path, turns: int) -> list[tuple[object, ...]]:
    """Rows of one result, in both checkouts."""
    first, second = list[Times](), list[Times]()
    for turn in range(turns):
        # Who comes first changes, so that neither has the warmer machine.
        for tree, times in ((before, first), (now, second))[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            times.append(run(tree, name))
            print(
                f"{name}: turn {turn + 1}, {tree}: {time.perf_counter() - began:.0f} s", flush=True
            )
    rows = list[tuple[object, ...]]()
    for key in first[0]:
        # Rows of both versions; another number of columns may have changed a name.
        if key in second[0]:
            old, new = [each[key] for each in first], [each[key] for each in second]
            medians = statistics.median(old), statistics.median(new)
            times = (min(old), medians[0], min(new), medians[1], ratio(new, old))
            rows.append((name, *key, f"{commit(before)}, {commit(now)}", turns, *times))
    if not rows:
        raise SystemExit(f"{name}: no row is in both: {list(first[0])} and {list(second[0])}")
    return rows


def is_slower(row: Sequence[object]) -> bool:
    """Whether the median and the least times say so; either alone may be chance."""
    old, _, new, _, median = map(float, row[-5:])  # type: ignore[arg-type]
    return min(median, new / old) > MOST


def main() -> None:
    parser = described(__doc__)
    for which in ("before", "now"):
        parser.add_argument(f"--{which}", type=Path, required=True, help="a checkout")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    options = parser.parse_args()
    rows = kept_rows(NAME, lambda row: row[0] in options.only)
    columns = ("result", "row", "column", "commits", "turns", "before, least", "before, median")
    columns = (*columns, "now, least", "now, median", "ratio")
    for name in options.only:
        rows += compared(name, options.before.resolve(), options.now.resolve(), options.turns)
        order = list(SCRIPTS)
        rows.sort(key=lambda row: order.index(row[0]))
        slower = [f"{row[0]}: {row[1]}, {row[2]}" for row in rows if is_slower(row)]
        title = "Times of results, in an earlier version and in this"
        report(NAME, title, columns, rows, slower=slower)


if __name__ == "__main__":
    main()
