"""Secure aggregation on CIFAR-10 features: accuracy against epsilon, cost by number of sites, hostile
sites.

Every accuracy is that of a whole run, with all messages. `--parts table cost hostile`; `--continue`
after a stop.

    python benchmarks/secure_aggregation.py --parts table --seeds 3
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsurrogate.client_app.datasets.partition as partition
import fedsurrogate.strategies.base.collection as collection
from benchmarks.harness.options import described
from benchmarks.harness.results import machine, report, stored
from benchmarks.harness.samples import feature_settings, sample_folder, shared
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import (
    agree,
    begin,
    mask,
    reveal,
    share,
    unmask,
)
from fedsurrogate.common.secure_aggregation.rules import (
    dimensions_of,
    numbers_of,
    rules_of,
    shapes_of,
)
from fedsurrogate.common.secure_aggregation.secrets import pack_words
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.wire.surrogate_proto import (
    pack_dealt,
    pack_member,
    pack_members,
    pack_revealed,
)
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.runs.reader import read_run

CLASSES = ",".join(map(str, range(10)))
EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
GRAM: dict[str, Any] = {"fedpft.covariance": "gram"}
SECURE = GRAM | {"secure-aggregation": True, "secure-aggregation-records": 5000}
SHARED = sample_folder()
HEAD = {"features.projection": str(SHARED / "weights" / "mobilenet_v2-imagenet.safetensors")}
IMAGES = {"fedpft.public": str(SHARED / "features" / "pacs-photo-train.safetensors")}
PUBLIC = SECURE | HEAD | IMAGES
LOWRANK = IMAGES | {"fedpft.covariance": "lowrank", "fedpft.rank": 64}
SPHERICAL = {"fedpft.covariance": "spherical"}
DISTRIBUTED_STEPS = {
    "method": "dp-fedavg",
    "secure-aggregation": True,
    "secure-aggregation-records": 5000,
}


@dataclass(frozen=True, eq=False)
class Row:
    """One row of the table. trust: what a hospital must believe about others for the row's epsilon
    to hold.
    """

    name: str
    trust: str
    settings: dict[str, Any]
    private: bool = True


ROWS = (
    Row(
        "secure aggregation, a third may collude",
        "at most a third of the sites collude, at most a tenth are lost",
        PUBLIC,
    ),
    Row(
        "secure aggregation, none colludes",
        "no site colludes, none is lost",
        PUBLIC | {"colluding": 0.0, "dropouts": 0.0},
    ),
    Row("noise at every site, spherical", "none", SPHERICAL),
    Row("noise at every site, low rank, public mean", "none", LOWRANK),
    Row(
        "theorem 4.1, spherical",
        "none; class sizes are public",
        SPHERICAL | {"fedpft.privacy": "theorem-4.1"},
    ),
    Row(
        "secure aggregation without noise",
        "no privacy of a record; no single site is visible",
        SECURE,
        private=False,
    ),
    Row("DP-FedAvg", "none", {"method": "dp-fedavg"}),
    Row(
        "DP-FedAvg, distributed noise",
        "at most a third of the sites collude, at most a tenth are lost",
        DISTRIBUTED_STEPS,
    ),
)


def accuracy(folder: Path, sites: int, seed: int, settings: dict[str, Any]) -> float:
    run = feature_settings("cifar10", classes=CLASSES, partition="dirichlet", alpha=0.1, seed=seed)
    run |= {"features.power-transform": 0.5, "output-dir": str(folder)} | settings
    ended = read_run(simulate_here(sites, run, lambda event: None, report=False))
    right = ended.number("accuracy", "model")
    assert right is not None
    return 100 * right


def table(
    seeds: int, sizes: list[int], minutes: float, again: bool, forgotten: list[str], only: list[str]
) -> None:
    """All rows by the same code, the joint ones among the fewest sites first, until `minutes` of
    CPU are used.

    Written after every run. again: continue with what the file of an earlier call lacks; the file
    lists all calls. forgotten: rows, by their names, whose earlier cells are measured again; those
    of other sizes than `sizes` stay. only: the rows to measure.
    """
    distributed, first = ROWS[:2], sizes[0]
    work = [(row, first, seed) for seed in range(seeds) for row in distributed]
    # What takes longest comes last.
    work += [(row, size, 0) for rows in (ROWS[:-2], ROWS[-2:]) for size in sizes for row in rows]
    work += [(row, size, seed) for seed in range(1, seeds) for size in sizes for row in ROWS]
    before = stored("secure-aggregation") if again else {}
    cells, calls = dict(before.get("accuracy", {})), list(before.get("calls", []))
    for row, size in ((row, size) for row in ROWS if row.name in forgotten for size in sizes):
        for epsilon in EPSILONS:
            cells.pop(key(row, size, epsilon), None)
    if again:
        write(cells, sizes, calls)
    with tempfile.TemporaryDirectory() as folder:
        for row, size, seed in dict.fromkeys(each for each in work if each[0].name in only):
            for epsilon in EPSILONS if row.private else (0.0,):
                cell = cells.setdefault(key(row, size, epsilon), [])
                if len(cell) > seed:
                    continue
                if time.process_time() > 60 * minutes:
                    print(
                        f"stopped after {minutes:g} minutes of CPU; --continue does the rest",
                        flush=True,
                    )
                    return
                budget = {"epsilon": epsilon, "delta": DELTA} if row.private else {}
                cell.append(accuracy(Path(folder), size, seed, row.settings | budget))
                call = machine() | {"cpu_seconds": round(time.process_time())}
                write(
                    {name: values for name, values in cells.items() if values},
                    sizes,
                    [*calls, call],
                )


def key(row: Row, size: int, epsilon: float) -> str:
    """The name of a cell in the file."""
    return f"{row.name}, {size} sites" + (f", epsilon {epsilon:g}" if row.private else "")


def write(accuracy: dict[str, list[float]], sizes: list[int], calls: list[dict[str, Any]]) -> None:
    """The table as it is so far: the mean over the seeds that were reached. The file has every
    single accuracy.
    """
    rows = []
    for size in sizes:
        for row in ROWS:
            cells = [accuracy.get(key(row, size, epsilon), []) for epsilon in EPSILONS]
            if any(cells):
                means = [round(statistics.mean(values), 2) if values else None for values in cells]
                rows.append((row.name, size, max(map(len, cells)), *means, row.trust))
    columns = (
        "row",
        "sites",
        "seeds",
        *(f"epsilon {epsilon:g}" for epsilon in EPSILONS),
        "trust in others",
    )
    title = f"CIFAR-10 features, accuracy %, Dirichlet 0.1, delta {DELTA:g}"
    report("secure-aggregation", title, columns, rows, accuracy=accuracy, calls=calls)


def cost(sizes: tuple[int, ...] = (5, 20, 50, 100)) -> None:
    """Bytes and processor seconds of the protocol for one site and for the coordinator; one site in
    ten is lost.
    """
    rows = []
    for what, count in (
        ("with second moment", 10 + 10 * 1280 + 1280 * 1281 // 2),
        ("without", 10 + 10 * 1280),
    ):
        for sites in sizes:
            rows.append((what, sites, *protocol(sites, count)))
            print(*rows[-1], flush=True)
    columns = (
        "sums",
        "sites",
        "site s",
        "coordinator s",
        "vector MB",
        "other kB up",
        "other kB down",
        "bytes over 16 bit",
    )
    report(
        "secure-aggregation-cost",
        "one site's work and traffic in secure aggregation, 1280 dimensions",
        columns,
        rows,
    )


def protocol(sites: int, count: int) -> tuple[float, ...]:
    """One sum; only one site masks a whole vector at a time, and all lost sites are unmasked."""
    config = parse_run(
        {"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "a,b", "dropouts": 0.1}
    )
    rules, context = rules_of(config.settings, sites), b"benchmark"
    names = [f"{index:03d}" for index in range(sites)]
    private = {name: new_key() for name in names}
    begun = {name: begin(name, private[name], context) for name in names}
    members = [member for _, member in begun.values()]
    states, dealt = {}, {}
    started = time.perf_counter()
    for name in names:
        states[name], dealt[name] = share(
            begun[name][0], members, rules, public_key(private[name]), 3
        )
    sharing = (time.perf_counter() - started) / sites
    summed = names[: rules.least]
    values, masked = np.ones(count, dtype=np.int64), {}
    started = time.perf_counter()
    for name in summed:
        states[name], masked[name] = mask(states[name], list(dealt.values()), rules, values)
    masking = (time.perf_counter() - started) / len(summed)
    signatures, revealed = {}, {}
    for name in summed:
        states[name], signatures[name] = agree(states[name], summed, rules, private[name])
    started = time.perf_counter()
    for name in summed:
        states[name], revealed[name] = reveal(states[name], signatures, rules)
    revealing = (time.perf_counter() - started) / len(summed)
    started = time.perf_counter()
    total = unmask(masked, dealt, {member.site: member for member in members}, revealed, rules)
    unmasking = time.perf_counter() - started
    assert (total == len(summed)).all()
    vector = len(pack_words(masked[summed[0]]))
    up = (
        len(pack_member(members[0]))
        + len(pack_dealt(dealt[names[0]]))
        + 64
        + len(pack_revealed(revealed[summed[0]]))
    )
    down = len(pack_members(members)) + len(pack_dealt(dealt[names[0]])) + 80 * sites
    return (
        sharing + masking + revealing,
        unmasking,
        vector / 1e6,
        up / 1e3,
        down / 1e3,
        vector / (2 * count),
    )


def hostile(sites: int, again: bool, forgotten: list[str]) -> None:
    """One and two of ten sites add false numbers: what the head loses, by how large these are.
    Written after every run.

    end: the end of the range in every sum of one class. flipped: their own class sums of the next
    class, which no range and no clip can tell from honest ones. again: continue with the rows that
    the file of an earlier call lacks. forgotten: runs, by their names, that are measured anew.
    """
    import fedsurrogate.common.secure_aggregation.protocol as module

    before = stored("secure-aggregation-hostile") if again else {}
    real, rows = (
        module.mask,
        [tuple(row) for row in before.get("rows", []) if row[0] not in forgotten],
    )
    calls = before.get("calls", [before["machine"]] if before else [])
    columns = ("run", "liars", "how", "accuracy")
    right: float | str
    with tempfile.TemporaryDirectory() as folder:
        private = PUBLIC | {"epsilon": 4.0, "delta": DELTA}
        for name, settings in (("epsilon 4", private), ("without privacy", SECURE)):
            config = parse_run(settings | {"classes": CLASSES})
            own, dimension = config.settings, 1280
            if "features.projection" in settings:
                dimension = dimensions_of(own.features, own.colluding, config.mechanism)
            shapes = shapes_of(config.plan, len(CLASSES.split(",")), dimension)
            largest = numbers_of(config.plan, own, sites)["sums"].largest
            for liars, how in ((0, "-"), (1, "end"), (2, "end"), (1, "flipped"), (2, "flipped")):
                if (name, liars, how) in [row[:3] for row in rows]:
                    continue

                def lie(
                    state: Any,
                    delivered: Any,
                    rules: Any,
                    values: Any,
                    liars: int = liars,
                    how: str = how,
                    shape: tuple[int, ...] = shapes["sums"],
                    largest: int = largest,
                ) -> Any:
                    if int(state.site) < liars:
                        values = values.copy()
                        classes, d = shape
                        sums = values[classes : classes + classes * d].reshape(classes, d)
                        if how == "end":
                            sums[0] = largest
                        else:
                            sums[:] = np.roll(sums, 1, 0)
                            values[:classes] = np.roll(values[:classes], 1)
                    return real(state, delivered, rules, values)

                module.mask = lie
                try:
                    right = accuracy(Path(folder), sites, 0, settings)
                except FedSurrogateError as error:
                    right = f"the run ends: {error}"
                rows.append((name, liars, how, right))
                title = "sites of ten that add false numbers to secure aggregation; one run each"
                report(
                    "secure-aggregation-hostile", title, columns, rows, calls=[*calls, machine()]
                )
    module.mask = real


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--parts", nargs="+", default=["table", "cost", "hostile"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 50])
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="of CPU, after which the table is as it is"
    )
    parser.add_argument(
        "--continue",
        dest="keep",
        action="store_true",
        help="with what the files of table and hostile lack",
    )
    again = "with --continue: rows of the table, or runs of hostile, that are measured anew"
    parser.add_argument("--again", nargs="+", default=[], help=again)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    for file in (HEAD["features.projection"], IMAGES["fedpft.public"]):
        shared(file)
    torch.set_num_threads(1)
    collection.POLL_SECONDS = 0.05
    # A simulation reads its files for every message. Here all sites and rounds share what was read
    # once.
    partition.load_all = lru_cache(2)(partition.load_all)  # type: ignore[attr-defined]
    if "cost" in options.parts:
        cost()
    if "hostile" in options.parts:
        hostile(options.sites[0], options.keep, options.again)
    if "table" in options.parts:
        table(
            options.seeds, options.sites, options.minutes, options.keep, options.again, options.rows
        )


if __name__ == "__main__":
    main()
