"""One hostile site where numbers or labels are learned: what the defence by harm costs honest sites, and
what a lie costs with it and without it.

    python benchmarks/hostile_targets.py --seeds 8

Claim: honest federations, also of two styles, lose at most 0.01 of R² or AUROC to the default. Features are
those of CIFAR-10 and PACS (MobileNetV2); sizes and attributes of the classes are MADE UP. Sites are fitted and
learned from with `fedsurrogate.fit` and `learn`.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import r2_score, roc_auc_score

import fedsurrogate as fs
from benchmarks._target_data import ATTRIBUTES, METRES, projected
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import stored_features

Array = NDArray[Any]
Site = tuple[Array, Array]
NAME, D = "hostile-targets", 128
COLUMNS = ("target", "data", "sites", "federations", "lie", "worst loss, none", "worst loss, harm")
# PACS: sizes of a dog, elephant, giraffe, guitar, horse, house and person; animal, large, has legs, is a tool.
PACS_SIZES = (0.5, 4.0, 5.0, 1.0, 2.5, 10.0, 1.7)
PACS_ATTRIBUTES = ((0, 1, 2, 4), (1, 2, 5), (0, 1, 2, 4, 6), (3,))
SETTINGS: dict[str, dict[str, Any]] = {
    "number": {"task": "regression", "target_range": (-2.0, 2.5)},
    "labels": {"task": "multilabel"},
}


def values(target: str, classes: Array, pacs: bool) -> Array:
    """Made-up numbers (n,) or labels (n, L) of records of classes (n,)."""
    if target == "number":
        found: Array = np.log10(np.array(PACS_SIZES if pacs else METRES))[classes]
        return found
    groups = PACS_ATTRIBUTES if pacs else tuple(ATTRIBUTES.values())
    return np.stack([np.isin(classes, each) for each in groups], 1).astype(float)


def federations(target: str, seeds: int) -> Iterator[tuple[str, int, list[Site], Site, int]]:
    """Data, number of sites, sites, test records, and a number of each honest federation."""
    (x, y), (test, true) = (projected(part, D) for part in ("train", "test"))
    x, y, test, true = (np.asarray(each) for each in (x, y, test, true))
    for count in (4, 5, 10):
        for alpha in (0.5, 0.1):
            for seed in range(seeds):
                draw = np.random.default_rng(seed)
                shares = draw.dirichlet(np.full(count, alpha), 10)
                site = np.array([draw.choice(count, p=shares[each]) for each in y])
                rows = [np.flatnonzero(site == each) for each in range(count)]
                sites = [(x[own], values(target, y[own], False)) for own in rows if len(own) > 30]
                yield f"CIFAR-10 {alpha}", count, sites, (test, values(target, true, False)), seed
    styles = {
        style: [stored_features(f"pacs-{style}", part) for part in ("train", "test")]
        for style in ("photo", "sketch")
    }
    tests = [np.concatenate([np.asarray(own[1][at]) for own in styles.values()]) for at in (0, 1)]
    for usual, odd in (("photo", "sketch"), ("sketch", "photo")):
        for seed in range(seeds):
            draw = np.random.default_rng(seed)
            features, classes = (np.asarray(each) for each in styles[usual][0])
            parts = np.array_split(draw.permutation(len(features)), 4)
            sites = [(features[own], values(target, classes[own], True)) for own in parts]
            features, classes = (np.asarray(each) for each in styles[odd][0])
            sites.append((features, values(target, classes, True)))
            name = f"PACS, 4 {usual} + 1 {odd}"
            yield name, 5, sites, (tests[0], values(target, tests[1], True)), seed


def lies(target: str, site: Site, seed: int) -> dict[str, Site]:
    """What a hostile site may send in place of its records."""
    x, y = site
    mixed = np.random.default_rng(seed).permutation(len(y))
    turned = -y if target == "number" else 1 - y
    found = {
        "turned": (x, turned),
        "mixed": (x, y[mixed]),
        "mixed, 30 times as long": (30 * x, y[mixed]),
        "turned, 3 times as long": (3 * x, turned),
        "turned, 10 times as many": (np.concatenate([x] * 10), np.concatenate([turned] * 10)),
    }
    if target == "number":
        found["one value"] = (x, np.full_like(y, 2.5))
    return found


def fitted(target: str, site: Site, name: str) -> fs.Surrogate:
    """What a site sends."""
    settings = dict(SETTINGS[target])
    if target == "labels":
        settings["label_columns"] = ",".join(f"l{at}" for at in range(site[1].shape[1]))
    return fs.fit(*site, site=name, **settings)


def score(sent: list[fs.Surrogate], target: str, test: Site, defence: str) -> float:
    """R², or mean AUROC, of the model on test records."""
    model = fs.learn(sent, defence=defence)
    if target == "number":
        return float(r2_score(test[1], np.asarray(model.predict(test[0])).ravel()))
    answers = model.answers(test[0])
    found = [(at, answers[f"l{at}"]) for at in range(test[1].shape[1]) if f"l{at}" in answers]
    return float(np.mean([roc_auc_score(test[1][:, at], each) for at, each in found]))


def main(seeds: int) -> None:
    found: dict[tuple[str, str, int, str], list[tuple[float, float]]] = {}
    for target in SETTINGS:
        for data, count, sites, test, seed in federations(target, seeds):
            sent = [fitted(target, each, f"site-{at}") for at, each in enumerate(sites)]
            key = (target, data, count)
            without = score(sent, target, test, "none")
            found.setdefault((*key, "none"), []).append(
                (0.0, without - score(sent, target, test, "harm"))
            )
            at = seed % len(sites)
            others = [each for place, each in enumerate(sent) if place != at]
            best = score(others, target, test, "none")
            for name, false in lies(target, sites[at], seed).items():
                all_ = [*others, fitted(target, false, f"site-{at}")]
                lost = [best - score(all_, target, test, rule) for rule in ("none", "harm")]
                found.setdefault((*key, name), []).append((lost[0], lost[1]))
    rows = [
        (*key[:3], len(own), key[3], *(round(max(each), 3) for each in zip(*own, strict=True)))
        for key, own in found.items()
    ]
    report(NAME, "one hostile site, numbers and labels", COLUMNS, rows)


if __name__ == "__main__":
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="federations of each kind")
    warnings.simplefilter("ignore")
    main(parser.parse_args().seeds)
