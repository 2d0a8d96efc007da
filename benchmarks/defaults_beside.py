"""The default, with nothing set but the data, beside a head on all real features, an ensemble of
heads, and every family; and under privacy beside each family set by hand.

    python benchmarks/defaults_beside.py --parts families private --seeds 3

Each row is real payloads: packed, unpacked, screened and capped as at a coordinator. Written after
every row, and continued with what the file lacks.
"""

import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from benchmarks.harness.federation import (
    Federation,
    LabelledFeatures,
    joined,
    load_seed,
    measure,
    site,
)
from benchmarks.harness.options import described, named, with_backbone
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import BACKBONES, MOBILENET, feature_settings, shared
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.runs.reader import read_run

Given = dict[str, Any]
NOTHING: Given = {}
FAMILIES: Mapping[str, Given | None] = {
    "default": NOTHING,
    "centralized head": None,
    "ensemble": {"method": "ensemble"},
    "gram": {"fedpft.covariance": "gram"},
    "lowrank r=64, 8 bits": {"fedpft.rank": 64, "fedpft.bits": 8},
    "lowrank, as set": {"fedpft.covariance": "lowrank"},
    "diag": {"fedpft.covariance": "diag"},
    "spherical": {"fedpft.covariance": "spherical"},
}
PRIVATE: Mapping[str, Given] = {
    "default": NOTHING,
    "spherical": {"fedpft.covariance": "spherical"},
    "lowrank r=64": {"fedpft.covariance": "lowrank", "fedpft.rank": 64},
    "full": {"fedpft.covariance": "full"},
}
EPSILONS = (1.0, 2.0, 8.0)
# Noise of each site, with and without the mean over a record's own columns. It was found on X-rays.
MEAN_OVER_COLUMNS: Mapping[str, Given] = {
    "default": NOTHING,
    "mean kept": {"features.projection": ""},
}
MEAN_OVER_COLUMNS_SETS = ("CIFAR-10, Dirichlet 0.1", "PACS, photo and sketch", "X-rays", "digits")
# One noise for all sites together: whole runs, with the keys and the masks of secure aggregation.
SECURE: Mapping[str, Given] = {
    "nothing set": {"secure-aggregation": True},
    "one sum": {"secure-aggregation": True, "fedpft.covariance": "gram"},
}
# Noise at each site, whole runs.
AT_SITES: Mapping[str, Given] = {"nothing set": {}, "logistic rounds": {"head.solver": "logistic"}}
SECURE_SETS = (
    "PACS, photo and sketch",
    "CIFAR-10, Dirichlet 0.1",
    "CIFAR-10, Dirichlet 0.01",
    "CIFAR-10, Dirichlet 0.1, 100 sites",
    "CIFAR-10, Dirichlet 0.01, 100 sites",
    "X-rays",
    "digits",
)
BACKBONE: Given = {"features.power-transform": 0.5}
XRAY_CLASSES = ("normal", "pneumonia")
XRAYS: Given = {"data": "imagefolder", "data-dir": ".", "backbone": "pixels", "image-size": 28}
PEER = "scikit-learn LogisticRegression, pooled"


def xray_pixels(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (n, 784) of chest X-rays, from 0 to 1, and labels (n,)."""
    import numpy as np

    archive = np.load(shared("data/pneumonia/pneumonia-28px.npz"))
    images = torch.from_numpy(archive[f"{part}_images"]).float().flatten(1) / 255
    return images, torch.from_numpy(archive[f"{part}_labels"]).flatten().long()


def xrays(sites: int, seed: int) -> Federation:
    """Chest X-rays of 28 x 28 pixels, the same number at every site."""
    features, labels = xray_pixels("train")
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    test = LabelledFeatures(*xray_pixels("test"))
    return Federation(
        [
            site(features[rows], labels[rows], test, XRAY_CLASSES, "a" * 16)
            for rows in order.chunk(sites)
        ],
        test,
    )


def xray_files(folder: str) -> Given:
    """Settings of the X-rays as files of features, which are written to a folder."""
    for part in ("train", "test"):
        x, y = xray_pixels(part)
        file = Path(folder) / f"xrays-{part}.safetensors"
        save_file({"x": x, "y": y}, file, {"classes": ",".join(XRAY_CLASSES)})
    return {"data": "safetensors", "data-dir": folder, "dataset": "xrays", "partition": "iid"}


def sets(backbone: str = MOBILENET) -> dict[str, tuple[Given, int]]:
    """Settings of each data set, and its sites: with features of a backbone, but pixels of digits,
    and of X-rays where the samples have no features.
    """
    cifar = feature_settings("cifar10", backbone) | BACKBONE
    rays: Given = XRAYS
    if not BACKBONES[backbone].stored:
        rays = feature_settings("xrays", backbone, partition="iid") | BACKBONE
    return {
        "PACS, photo and sketch": (
            feature_settings("pacs-photo,pacs-sketch", backbone) | BACKBONE,
            2,
        ),
        "CIFAR-10, Dirichlet 0.1": (cifar | {"alpha": 0.1}, 10),
        "CIFAR-10, Dirichlet 0.01": (cifar | {"alpha": 0.01}, 10),
        "CIFAR-10, Dirichlet 0.1, 100 sites": (cifar | {"alpha": 0.1}, 100),
        "CIFAR-10, Dirichlet 0.01, 100 sites": (cifar | {"alpha": 0.01}, 100),
        "X-rays": (rays, 4),
        "digits": ({"data": "digits", "alpha": 0.5}, 5),
    }


@lru_cache(1)
def federation(name: str, seed: int, power: float, backbone: str = MOBILENET) -> Federation:
    """The sites of a data set, whose last one stays in memory."""
    settings, sites = sets(backbone)[name]
    if settings is XRAYS:
        return xrays(sites, seed)
    changed = {"features.power-transform": power} if "features.power-transform" in settings else {}
    return load_seed(settings | changed, sites, seed)


def cell(name: str, seed: int, own: Given | None, backbone: str = MOBILENET) -> float:
    """The accuracy in % of a data set's row at a seed."""
    settings, _ = sets(backbone)[name]
    private = own is not None and "epsilon" in own
    # Where each site adds noise, the power is 1 for every backbone.
    changed = (
        {"features.power-transform": 1.0}
        if private and "features.power-transform" in settings
        else {}
    )
    data = federation(name, seed, 1.0 if private else 0.5, backbone)
    chosen = settings | changed | {"seed": seed}
    return measure(chosen, None if own is None else data.named(own), data).accuracy


def whole_run(name: str, seed: int, own: Given | None, backbone: str = MOBILENET) -> float:
    """The accuracy in % of a whole simulation, with the classes named."""
    settings, sites = sets(backbone)[name]
    usual = {key: value for key, value in settings.items() if key != "features.power-transform"}
    classes = ",".join(federation(name, 0, 1.0, backbone).classes)
    with tempfile.TemporaryDirectory() as folder:
        usual = xray_files(folder) if settings is XRAYS else usual
        run = (
            usual | (own or {}) | {"classes": classes, "seed": seed, "output-dir": f"{folder}/runs"}
        )
        ended = read_run(simulate_here(sites, run, lambda event: None, report=False))
        right = ended.number("accuracy", "model")
    assert right is not None
    return 100 * right


def measured(
    file: str,
    title: str,
    rows: Mapping[str, Given | None],
    seeds: int,
    names: Sequence[str] = (),
    metric_cell: Callable[[str, int, Given | None, str], float] = cell,
    backbone: str = MOBILENET,
    only: str = "",
) -> None:
    """Measure what the file lacks, one seed of all rows (whose name matches `only`) after the other,
    and write it.
    """
    file = named(file, backbone)
    kept: dict[str, list[float]] = dict(stored(file).get("accuracy", {}))
    names = names or list(sets(backbone))
    for seed in range(seeds):
        for name in names:
            for row, own in rows.items():
                values = kept.setdefault(f"{name}: {row}", [])
                if len(values) <= seed and re.search(only, row):
                    values.append(round(metric_cell(name, seed, own, backbone), 2))
                    print(name, row, seed, values[-1], flush=True)
                    write(file, title, rows, kept, list(sets(backbone)))


def write(
    file: str,
    title: str,
    rows: Mapping[str, Given | None],
    kept: dict[str, list[float]],
    names: Sequence[str],
) -> None:
    """Write the means over the seeds that are there."""
    table = []
    for name in names:
        values = [kept.get(f"{name}: {row}", []) for row in rows]
        if any(values):
            means = [round(statistics.mean(each), 2) if each else None for each in values]
            table.append((name, max(map(len, values)), *means))
    report(file, title, ("data", "seeds", *rows), table, accuracy=kept)


def ranked(seeds: int) -> None:
    """What the shares of the classes are worth on the X-rays, whose test records have other shares:
    the area under the ROC curve does not know them, and a hospital that knows its own can say so.
    """
    values: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(seeds):
        data = federation("X-rays", seed, 0.5)
        train = joined([each.train for each in data.sites])
        change = torch.bincount(data.test.labels) / torch.bincount(train.labels)
        scores = {}
        names = ("default", "lowrank r=64, 8 bits", "centralized head", "ensemble")
        private = {name: PRIVATE[name] for name in ("default", "spherical")}
        rows_of = {each: FAMILIES[each] for each in names} | at_budgets(private, (8,))
        for name, own in rows_of.items():
            given = None if own is None else data.named(own)
            model = measure(XRAYS | {"seed": seed}, given, data).model
            assert model is not None
            scores[name] = model.scores(data.test.features).double().log_softmax(1)
        peer = LogisticRegression(C=1.0, max_iter=500).fit(train.features, train.labels)
        scores[PEER] = torch.from_numpy(peer.predict_log_proba(data.test.features)).double()
        for name, each in scores.items():
            right = [
                float((kind.argmax(1) == data.test.labels).double().mean())
                for kind in (each, each + change.double().log())
            ]
            area = roc_auc_score(data.test.labels, each[:, 1] - each[:, 0])
            values.setdefault(name, []).append((100 * right[0], float(area), 100 * right[1]))
    rows = [
        (name, *(round(statistics.mean(each), 4) for each in zip(*found, strict=True)))
        for name, found in values.items()
    ]
    columns = ("X-rays", "accuracy %", "AUROC", "accuracy with the test's shares %")
    report("defaults-ranking", "The X-rays' test records have other shares", columns, rows)


def at_budgets(rows: Mapping[str, Given], budgets: Sequence[float]) -> dict[str, Given]:
    """The rows at each epsilon."""
    return {
        f"epsilon {epsilon:g}, {row}": own | {"epsilon": epsilon, "delta": 1e-5}
        for epsilon in budgets
        for row, own in rows.items()
    }


def main() -> None:
    """Measure the parts that were asked for."""
    options = with_backbone(described(__doc__))
    options.add_argument("--parts", nargs="+", default=["families", "private"])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", nargs="+", default=[], help="names of data sets")
    options.add_argument("--rows", default="", help="those whose name matches this")
    given = options.parse_args()
    which = given.backbone, given.rows
    made_by = "" if given.backbone == MOBILENET else f"{BACKBONES[given.backbone].title}, "
    torch.set_num_threads(1)
    if "families" in given.parts:
        title = f"Nothing set but the data, {made_by}accuracy %"
        measured("defaults-families", title, FAMILIES, given.seeds, given.only, cell, *which)
    if "private" in given.parts:
        rows = at_budgets(PRIVATE, (1.0, 2.0, 4.0, 8.0))
        title = f"Budget and classes alone, {made_by}accuracy %"
        measured("defaults-private", title, rows, given.seeds, given.only, cell, *which)
    if "secure" in given.parts:
        rows, title = (
            at_budgets(SECURE, EPSILONS),
            "Secure aggregation, budget and classes, accuracy %",
        )
        names = given.only or SECURE_SETS
        measured("defaults-secure", title, rows, given.seeds, names, whole_run, *which)
    if "rounds" in given.parts:
        rows = at_budgets(AT_SITES, EPSILONS)
        title = "Noise at each site, whole runs, accuracy %"
        names = given.only or SECURE_SETS
        measured("defaults-private-rounds", title, rows, given.seeds, names, whole_run, *which)
    if "ranking" in given.parts:
        ranked(given.seeds)
    if "own-mean" in given.parts:
        rows = at_budgets(MEAN_OVER_COLUMNS, (1.0, 2.0, 4.0, 8.0))
        names = given.only or MEAN_OVER_COLUMNS_SETS
        title = "With and without the mean of a record's columns, accuracy %"
        measured("defaults-mean-over-columns", title, rows, given.seeds, names, cell, *which)


if __name__ == "__main__":
    main()
