"""Membership inference on what a site releases, without privacy and at two epsilons: which records
were in the data?

One hospital with RECORDS CIFAR-10 features. Each release is made by the site's own code from half
of them, drawn at random; the attacker knows all records, the settings and all other releases. LiRA
(Carlini et al. 2022) on one-shot releases, RMIA (Zarifzadeh et al. 2024) on heads, the likelihood
under the decoder (white box) and the closest synthetic embedding (black box) on generators.
"allowed" is the largest AUC that the claim permits to any attack. "excess" is the largest TPR -
(e^epsilon FPR + delta) over thresholds, in both directions, with an interval of 99 %: a broken claim
has an interval above 0, and then this script ends with exit code 1.

    python benchmarks/membership.py                    # writes results/membership.json and
    results/membership.png python benchmarks/membership.py --only DP-CGAN     # measures these rows
    anew, and keeps the others
"""

import json
import math
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.options import described
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import kept_rows, report, stored
from benchmarks.harness.samples import shared
from fedsurrogate.client_app.audit.output import claim_broken
from fedsurrogate.client_app.audit.release_audit import audit_release
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar

EPSILONS = (0.0, 1.0, 10.0)
CLASSES = ",".join(map(str, range(10)))
RELEASES: dict[str, dict[str, Scalar]] = {
    "FedPFT spherical": {"fedpft.covariance": "spherical"},
    "FedPFT diag, K = 10": {"fedpft.covariance": "diag", "fedpft.components": 10},
    "FedPFT low rank, r = 16": {"fedpft.covariance": "lowrank", "fedpft.rank": 16},
    "FedPFT Gram": {"fedpft.covariance": "gram"},
    "head (average)": {"method": "average"},
    "DP-CVAE": {"method": "dpcvae"},
    "DP-CGAN": {"method": "dpcgan"},
}
COLUMNS = (
    "release",
    "epsilon",
    "attack",
    "releases",
    "AUC",
    "95 %",
    "found at 1 %",
    "at 0.1 %",
    "allowed AUC",
)
COLUMNS += ("excess", "99 %")
# Of the three papers FedLAP-DP attacks membership, in figures 8 and 9.
PAPER = "FedLAP-DP at epsilon 10.18: AUC of about 0.5, by losses and by norms of gradients"


def settings_of(name: str, epsilon: float) -> dict[str, Scalar] | None:
    """The run's settings, None if this release has no such mechanism."""
    settings = RELEASES[name]
    if not epsilon:
        return settings
    if name.startswith("head"):
        return None
    return settings | {"epsilon": epsilon, "delta": 1e-5, "classes": CLASSES}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument(
        "--records",
        type=int,
        default=1000,
        help="of the hospital; each release has about half of them",
    )
    parser.add_argument(
        "--releases",
        type=int,
        default=64,
        help="of a row; DP-CVAE has half, DP-CGAN a quarter of them",
    )
    parser.add_argument(
        "--only", default="", help="releases whose name contains this text; other rows are kept"
    )
    options = parser.parse_args()
    rows, curves = kept(options.only)
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        given = load_file(shared("features/cifar10-train.safetensors"))
        some = {key: value[: options.records].contiguous() for key, value in given.items()}
        save_file(some, Path(folder) / "rows.safetensors", {"fingerprint": "mobilenet_v2"})
        node = parse_node_config({"data": "safetensors", "data-dir": folder})
        for name, epsilon in product(RELEASES, EPSILONS):
            settings = settings_of(name, epsilon)
            if settings is None or options.only not in name:
                continue
            run = parse_run(settings)
            count = options.releases // {"DP-CVAE": 2, "DP-CGAN": 4}.get(name, 1)
            audit = audit_release(run, node, math.inf, count, seed=0)
            if error := claim_broken(audit):
                broken.append(f"{name}: {error}")
            claim = f"{epsilon:g}" if epsilon else "none"
            for attack, each in audit.attacks.items():
                rates = (each.rate_at_one_percent, each.rate_at_one_in_thousand)
                interval = f"{each.low:.3f} to {each.high:.3f}"
                excess = audit.excess[attack]
                beyond = (
                    (excess.excess, f"{excess.low:.3f} to {excess.high:.3f}")
                    if excess
                    else (None, "")
                )
                cells = (audit.releases, each.auc, interval, *rates, audit.allowed, *beyond)
                rows.append((name, claim, attack, *cells))
            if epsilon in (0.0, 1.0):
                points = [[round(rate, 5) for rate in point] for point in audit.attack.curve]
                curves[f"{name}, epsilon {claim}"] = points
            # After each row: generators take long, and an interrupted run keeps what it has.
            title = (
                f"Membership inference, {options.records} CIFAR-10 features at one hospital, "
                "delta = 1e-05"
            )
            rows.sort(key=lambda row: list(RELEASES).index(row[0]))
            report("membership", title, COLUMNS, rows, paper=PAPER, curves=json.dumps(curves))
            plot(curves)
    print("\n".join(broken))
    sys.exit(bool(broken))


def kept(only: str) -> tuple[list[Any], dict[str, Any]]:
    """Rows and curves of the last run that are not measured anew."""
    if not only:
        return [], {}
    curves = json.loads(stored("membership").get("curves", "{}"))
    others = {name: curve for name, curve in curves.items() if only not in name}
    return kept_rows("membership", lambda row: only in row[0]), others


def plot(curves: dict[str, Any]) -> None:
    """ROC curves with logarithmic axes: what matters is the left end."""
    axes, order = axes_of(9.5, 5), list(RELEASES)
    places = {name: order.index(name.split(", eps")[0]) for name in curves}
    for name, curve in sorted(curves.items(), key=lambda item: places[item[0]]):
        x, y = torch.tensor(curve).clamp_min(1e-4).T
        line = "-" if name.endswith("none") else ":"
        axes.loglog(x, y, line, color=f"C{places[name]}", label=name)
    axes.loglog([1e-4, 1], [1e-4, 1], color="grey", lw=0.8, label="a guess")
    axes.set(
        xlabel="false positive rate", ylabel="true positive rate", xlim=(1e-3, 1), ylim=(1e-3, 1.05)
    )
    draw(axes, "membership")


if __name__ == "__main__":
    main()
