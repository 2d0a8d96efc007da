"""Processor time of a site's answer to a request, beside the mathematics in it alone.

The answer has everything between the message and the reply: it reads the message and the stored
features, asks the policy, computes, charges the ledger on the disk, packs the reply. The mathematics
is `make_surrogate` on the same features in memory: the sums and, with a budget, exact noise from the
operating system; without one, the fit. Claim: an answer takes at most 1.2 times its mathematics.

Two sites with 1,000 records of ten classes in 1,280 columns, nothing set but the budget. Each site
answers in this process, through its own app, nine times after a first one that loads libraries. A
second table has the parts of an answer.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Context, Message
from safetensors.torch import save_file

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.client_app.governance import release
from fedsurrogate.client_app.governance.gate import Gate, open_ledger
from fedsurrogate.client_app.methods.fedpft import surrogate
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment import local_engine

RECORDS, DIMENSION, CLASSES, SITES, TIMES = 1000, 1280, 10, 2, 9
NAMES = tuple(map(str, range(CLASSES)))
EPSILONS = (0.0, 2.0)
POLICY = "epsilon-per-run = 4.0\nepsilon-total = 1000.0\ndelta = 1e-5\nwithout-dp = true\n"
COLUMNS = (
    *("epsilon", "request, least s", "request, median s", "request, most s"),
    *("mathematics, median s", "ratio"),
)


# Where a part of an answer is done.
PARTS: dict[str, tuple[Any, str]] = {
    "reading of stored features": (release, "load_site"),
    "check of each column": (Job, "own_frame"),
    "mathematics": (surrogate, "make_surrogate"),
    "packing": (surrogate, "pack_surrogate"),
    "ledger": (Gate, "let_out"),
}


@contextmanager
def timed_parts(spent: dict[str, list[float]]) -> Iterator[None]:
    """Note the processor seconds of each part of an answer."""

    def timed(name: str, before: Any) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return before(*values, **named)
            finally:
                spent.setdefault(name, []).append(time.process_time() - begin)

        return call

    with ExitStack() as stack:
        for name, (holder, key) in PARTS.items():
            stack.enter_context(patch.object(holder, key, timed(name, getattr(holder, key))))
        yield


def features(seed: int) -> dict[str, torch.Tensor]:
    """Records of Gaussian classes: x (n, d), y (n,)."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(RECORDS) % CLASSES
    means = torch.randn(CLASSES, DIMENSION, generator=torch.Generator().manual_seed(9))
    return {"x": means[labels] + torch.randn(RECORDS, DIMENSION, generator=drawn), "y": labels}


def answered(nodes: Sequence[dict[str, Any]], settings: dict[str, Any]) -> list[float]:
    """Processor seconds of each site's answer to a request for its surrogate."""
    spent: list[float] = []
    app = local_engine._client_app()

    def timed(message: Message, context: Context) -> Message:
        begin = time.process_time()
        reply = app(message, context)
        if message.metadata.message_type == "train":
            spent.append(time.process_time() - begin)
        return reply

    local_engine._client_app, before = lambda: timed, local_engine._client_app
    try:
        local_engine.run_here(nodes, parse_run(settings), settings, lambda _: None, report=False)
    except RunError as error:
        # Of so few records the coordinator may learn nothing; the sites have answered.
        if "stands out" not in str(error):
            raise
    finally:
        local_engine._client_app = before
    return spent


def measured(folder: Path, epsilon: float) -> tuple[tuple[object, ...], dict[str, float]]:
    """One row, and the seconds of each part."""
    (folder / "policy.toml").write_text(POLICY)
    nodes = []
    for index in range(SITES):
        place = folder / f"site-{index}"
        place.mkdir(exist_ok=True)
        save_file(features(index), place / "all.safetensors", {"classes": ",".join(NAMES)})
        nodes.append(
            {
                "site": f"site-{index}",
                "data": "safetensors",
                "data-dir": str(place),
                "policy": str(folder / "policy.toml"),
            }
        )
        open_ledger(parse_node_config(nodes[-1]))
    settings: dict[str, Any] = {"output-dir": str(folder / "runs"), "classes": ",".join(NAMES)}
    settings |= {"epsilon": epsilon, "delta": 1e-5} if epsilon else {}
    requests: list[float] = []
    spent: dict[str, list[float]] = {}
    answered(nodes, settings)
    for _ in range(TIMES):
        with timed_parts(spent):
            requests += answered(nodes, settings)
    run = parse_run(settings)
    own = features(0)
    mathematics = []
    for _ in range(TIMES * SITES):
        begin = time.process_time()
        make_surrogate(SiteData(own["x"], own["y"], NAMES, "f", "site-0"), run)
        mathematics.append(time.process_time() - begin)
    ratio = round(median(requests) / median(mathematics), 2)
    row = (min(requests), median(requests), max(requests), median(mathematics))
    parts = {name: median(spent.get(name, [0.0])) for name in PARTS}
    parts["everything else"] = median(requests) - sum(parts.values())
    return (epsilon or "none", *(round(each, 4) for each in row), ratio), parts


def main() -> None:
    described(__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "XDG_STATE_HOME": f"{home}/s", "XDG_CONFIG_HOME": f"{home}/c"}
        rows, parts = [], []
        for epsilon in EPSILONS:
            folder = Path(home, str(epsilon))
            folder.mkdir()
            row, spent = measured(folder, epsilon)
            rows.append(row)
            parts.append(spent)
    report(
        "request-seconds",
        f"a request for {RECORDS} records of {DIMENSION} columns, {CLASSES} classes",
        COLUMNS,
        rows,
    )
    report(
        "request-seconds-parts",
        "where the processor time of a request goes",
        ("part", "without noise, s", "epsilon 2, s"),
        [(name, *(round(each[name], 4) for each in parts)) for name in parts[0]],
    )


if __name__ == "__main__":
    main()
