"""Solvers of a head in closed form from what sites send by default, with the ratio F that decides
between them.

    python benchmarks/defaults.py

Each row is real payloads: packed, unpacked, screened and capped as at a coordinator. The rule was
chosen on pairs of PACS domains and on CIFAR-10; only the digits are held out.
"""

from typing import Any

from benchmarks.harness.federation import Federation, centralised, load_seed
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import feature_settings
from benchmarks.harness.site_data import make_surrogate
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn

COLUMNS = ("data", "sent", "centralized head %", "F", "lda %", "ridge %", "default %", "default is")
SENT: dict[str, dict[str, Any]] = {
    "gram": {},
    "lowrank r=64, 8 bits": {"fedpft.rank": 64, "fedpft.bits": 8},
}


def sent_by_all(settings: dict[str, Any], data: Federation) -> list[AnySurrogate]:
    """What the coordinator reads of every site."""
    run = parse_run(settings)
    made = [make_surrogate(site, run).surrogate for site in data.given]
    return [unpack_surrogate(pack_surrogate(each, run.settings.fedpft.bits or 8)) for each in made]


def rows_of(name: str, settings: dict[str, Any], sites: int, seed: int) -> list[tuple[Any, ...]]:
    """The rows of one data set."""
    data = load_seed(settings, sites, seed)
    pooled = round(centralised(parse_run(settings), data).accuracy, 2)
    rows = []
    for form, own in SENT.items():
        chosen = settings | own | {"seed": seed}
        surrogates = sent_by_all(chosen, data)
        learned = {
            solver: learn(surrogates, parse_run(chosen | {"head.solver": solver}), "cpu")
            for solver in ("lda", "ridge", "auto")
        }
        accuracies = [round(data.judge(each.model), 2) for each in learned.values()]
        default = learned["auto"]
        ratio = str(default.facts.get("reason", "")).partition("F = ")[2].partition(",")[0]
        rows.append((name, form, pooled, ratio, *accuracies, default.facts["solver"]))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure every data set, and write the table."""
    options = described(__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="pacs,cifar10,digits")
    given = options.parse_args()
    power = {"features.power-transform": 0.5}
    sets: dict[str, tuple[dict[str, Any], int]] = {
        "pacs": (feature_settings("pacs-photo,pacs-sketch") | power, 2),
        "cifar10": (feature_settings("cifar10", alpha=0.1) | power, 10),
        "digits": ({"data": "digits", "alpha": 0.5}, 5),
    }
    rows = kept_rows("defaults", lambda row: row[0] in given.only)
    rows += [
        row
        for name, (settings, sites) in sets.items()
        if name in given.only
        for row in rows_of(name, settings, sites, given.seed)
    ]
    report("defaults", "Solvers from what sites send by default", COLUMNS, rows)


if __name__ == "__main__":
    main()
