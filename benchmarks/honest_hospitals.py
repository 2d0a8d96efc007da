"""Honest hospitals that differ, none of them hostile: what the default defence costs them.

    python benchmarks/honest_hospitals.py --parts pacs --splits 1

PACS: a sites with photos and b with sketches, every a and b from one to nine, at most ten together.
`pacs64`: 3, 5 and 10 sites, of which one or two have the other style, in 64 columns of a random
projection. CIFAR-10 and digits: Dirichlet 0.5, 0.1 and 0.01 among 4, 5, 10 and 50 sites. X-rays: four
hospitals, of which one or three have brighter images, more contrast, or another scanner (half the
pixels, resized by another filter). `devices`: the digits among 3, 5 and 10 sites, of which one or two
have another device. Surrogates are made by the sites' own code, once for all partitions with the same
site, and for both defences. A row has, over partitions and splits, the sites that are lowered or left
out, and how many points the default is below `defence="none"`, with all that is measured in
`accuracies`. The file is written after every split, and continued with what it lacks.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.nn.functional import avg_pool2d

from benchmarks.harness.federation import load
from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import shared, stored_features
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.backbones.power_transform import raised, with_power
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.outcome import Learned
from fedsurrogate.strategies.fedpft.strategy import learn
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from tests.hostile_sites import dirichlet, uneven_digits

Data = tuple[Tensor, Tensor]
NAME = "honest-hospitals"
COLUMNS = ("data", "epsilon", "covariance", "partitions", "splits", "sites", "lowered", "left out")
COLUMNS += ("loss, worst", "where", "loss, mean", "partitions above 1 point")
PARTS = ("pacs", "digits", "cifar10", "xrays", "devices", "pacs64")
COVARIANCES = ("auto", "spherical", "lowrank", "diag", "full")
EPSILONS = ("none", "8")
MOST, BACKBONE = 10, "torchvision:mobilenet_v2"
ALPHAS, SITES = (0.5, 0.1, 0.01), (4, 5, 10, 50)
# Records of a hospital with X-rays, and of each kind in the test.
XRAYS, TESTED = 150, 60
KINDS = {"plain": (0, 1, 2, 3), "bright": (1, 3), "contrast": (2, 3), "scanner": (3,)}
HOSPITALS = {
    **{f"3 plain + 1 {kind}": ("plain",) * 3 + (kind,) for kind in list(KINDS)[1:]},
    "plain, bright, contrast, scanner": tuple(KINDS),
}


# Sites of which some have another device or style.
ODD, FEW_COLUMNS = ((3, 1), (5, 1), (10, 2)), 64
DEVICES: dict[str, Callable[[Tensor], Tensor]] = {
    "half as bright": lambda images: images / 2,
    "brighter": lambda images: (1.5 * images).clamp_max(1),
    "gamma": lambda images: images.sqrt(),
    "blurred": lambda images: avg_pool2d(images, 3, 1, padding=1),
    "moved": lambda images: images.roll(1, 3),
    "inverted": lambda images: 1 - images,
    "mirrored": lambda images: images.flip(3),
    "turned": lambda images: images.rot90(1, (2, 3)),
}


@dataclass(frozen=True)
class Group:
    """A kind of data under one budget and one covariance."""

    data: str
    epsilon: str
    covariance: str

    def run(self, rule: str, seed: int, classes: Sequence[str]) -> Run:
        """The run of a defence and a split."""
        given: dict[str, Any] = {
            "seed": seed,
            "defence": rule,
            "fedpft.covariance": self.covariance,
        }
        if self.data in ("pacs", "cifar10", "xrays"):
            given["backbone"] = BACKBONE
        if self.epsilon != "none":
            given |= {"epsilon": float(self.epsilon), "delta": 1e-5, "classes": ",".join(classes)}
        return parse_run(given)


class Learning:
    """Sends what sites with features before the public power have, and learns with both defences."""

    def __init__(self, group: Group, seed: int, classes: int) -> None:
        self.classes = tuple(f"class {index}" for index in range(classes))
        self.none, self.auto = (group.run(rule, seed, self.classes) for rule in ("none", "auto"))
        self.strategy = stored_strategy(self.none)(self.none, Unrecorded())

    def sent(self, data: Data, name: str) -> AnySurrogate:
        """The surrogate of a site, as it arrives."""
        records = LabelledFeatures(raised(data[0], self.none.power), data[1])
        fingerprint = with_power("a" * 16, self.none.power)
        own = SiteFeatures(records, records, self.classes, fingerprint, 0.0, True)
        with tempfile.TemporaryDirectory() as folder:
            job = Job(self.none, NodeConfig(state_dir=folder), name, own)
            payload = site_function(self.none.plan.combination)(job).payload
        return self.strategy.unpack(payload)

    def measured(self, sent: Sequence[AnySurrogate], test: Data) -> tuple[float, float, int, int]:
        """Accuracy in % with `none` and by default, and the sites that are lowered and left out."""
        names = [f"site-{index}" for index in range(len(sent))]
        named = [
            replace(s, header=replace(s.header, site=n)) for s, n in zip(sent, names, strict=True)
        ]
        named = list(self.strategy.in_one_frame(named))
        features = raised(test[0], self.none.power)

        def learned(run: Run) -> tuple[Learned, float]:
            made = learn(named, run, "cpu", self.classes)
            right, tested = made.model.accuracy(features, self.classes, test[1])
            return made, round(100 * right / tested, 2)

        made, auto = learned(self.auto)
        out = len(made.defended.suspects)
        lowered = sum(each.kept < 1 for each in made.defended.effects.values()) - out
        none = auto if self._same(named, made) else learned(self.none)[1]
        return none, auto, lowered, out

    def _same(self, sent: Sequence[AnySurrogate], made: Learned) -> bool:
        """Whether the head is that of `none`: the same mixtures, and the same solver."""
        if made.defended.alike or isinstance(sent[0], SumsSurrogate):
            return False
        kept = defend_surrogates(sent, "none", self.none.settings.max_share, self.classes).kept
        pairs = zip(kept, made.defended.kept, strict=False)
        return len(kept) == len(made.defended.kept) and all(
            isinstance(a, Surrogate)
            and isinstance(b, Surrogate)
            and a.counts == b.counts
            and a.mixtures.means.equal(b.mixtures.means)
            for a, b in pairs
        )


def federations(group: Group, split: int) -> Iterator[tuple[str, tuple[float, float, int, int]]]:
    """The name of every partition, and what is measured of it."""
    if group.data == "pacs":
        yield from _pacs(group, split)
    elif group.data == "xrays":
        yield from _xrays(group, split)
    elif group.data == "devices":
        yield from _devices(group, split)
    elif group.data == "pacs64":
        yield from _pacs64(group, split)
    else:
        yield from _dirichlet(group, split)


def _pacs(group: Group, split: int) -> Iterator[tuple[str, tuple[float, float, int, int]]]:
    learning = Learning(group, split, 7)
    tests = [stored_features(f"pacs-{style}", "test") for style in ("photo", "sketch")]
    test = (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))

    @lru_cache(None)
    def of_style(style: str, count: int) -> list[AnySurrogate]:
        x, y = stored_features(f"pacs-{style}")
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
        rows = [order[index::count] for index in range(count)]
        return [learning.sent((x[r], y[r]), f"{style}-{i}-of-{count}") for i, r in enumerate(rows)]

    for together in range(2, MOST + 1):
        for a in range(1, together):
            sent = [*of_style("photo", a), *of_style("sketch", together - a)]
            yield f"{a} photo + {together - a} sketch", learning.measured(sent, test)


def _devices(group: Group, split: int) -> Iterator[tuple[str, tuple[float, float, int, int]]]:
    learning = Learning(group, split, 10)
    for name, seen in DEVICES.items():

        def through(data: Data, seen: Callable[[Tensor], Tensor] = seen) -> Data:
            return seen(data[0].reshape(-1, 1, 8, 8)).flatten(1), data[1]

        for count, odd in ODD:
            parts, (x, y) = uneven_digits(100.0, split, count)
            parts = [*parts[odd:], *map(through, parts[:odd])]
            # Each hospital has its part of the test.
            few = odd * len(y) // count
            test = (
                torch.cat([x[few:], through((x[:few], y[:few]))[0]]),
                torch.cat([y[few:], y[:few]]),
            )
            sent = [learning.sent(part, f"site-{index}") for index, part in enumerate(parts)]
            yield f"{count - odd} sites + {odd} {name}", learning.measured(sent, test)


def _pacs64(group: Group, split: int) -> Iterator[tuple[str, tuple[float, float, int, int]]]:
    learning = Learning(group, split, 7)
    styles = ("photo", "sketch")
    stored = [(stored_features(f"pacs-{s}"), stored_features(f"pacs-{s}", "test")) for s in styles]
    d = stored[0][0][0].shape[1]
    generator = torch.Generator().manual_seed(17)
    columns = torch.randn(d, FEW_COLUMNS, generator=generator) / FEW_COLUMNS**0.5
    test = (
        torch.cat([t[0].float() @ columns for _, t in stored]),
        torch.cat([t[1] for _, t in stored]),
    )
    for (one, other), (count, odd) in product(((0, 1), (1, 0)), ODD):
        parts = list[Data]()
        for style, sites in ((one, count - odd), (other, odd)):
            (x, y), _ = stored[style]
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
            parts += [
                (x[r].float() @ columns, y[r]) for r in (order[at::sites] for at in range(sites))
            ]
        sent = [learning.sent(part, f"site-{index}") for index, part in enumerate(parts)]
        name = f"{count - odd} {styles[one]} + {odd} {styles[other]}"
        yield name, learning.measured(sent, test)


def _dirichlet(group: Group, split: int) -> Iterator[tuple[str, tuple[float, float, int, int]]]:
    learning = Learning(group, split, 10)
    for alpha in ALPHAS:
        for count in SITES:
            if group.data == "digits":
                parts, test = uneven_digits(alpha, split, count)
            else:
                parts = dirichlet(*stored_features("cifar10"), alpha, split, count)
                test = stored_features("cifar10", "test")
            sent = [learning.sent(part, f"site-{index}") for index, part in enumerate(parts)]
            yield f"{count} sites, Dirichlet {alpha}", learning.measured(sent, test)


def _changed(image: Image.Image, kind: str) -> Image.Image:
    match kind:
        case "bright":
            return ImageEnhance.Brightness(image).enhance(1.5)
        case "contrast":
            return ImageEnhance.Contrast(image).enhance(1.7)
        case "scanner":
            small = image.resize((14, 14), Image.Resampling.BOX)
            return small.resize((28, 28), Image.Resampling.BICUBIC)
        case _:
            return image


@lru_cache(1)
def xray_sites() -> tuple[dict[tuple[int, str], Data], dict[str, Data]]:
    """Features of the records of each hospital as each kind of image, and of the test."""
    archive = np.load(shared("data/pneumonia/pneumonia-28px.npz"))
    draw, lines, owners = np.random.default_rng(0), ["path,label,site,split"], list[str]()
    with tempfile.TemporaryDirectory() as folder:

        def add(part: str, rows: Any, kind: str, owner: str) -> None:
            for row in rows:
                image = Image.fromarray(archive[f"{part}_images"][row].astype(np.uint8))
                file = f"{len(lines):05}.png"
                _changed(image, kind).save(Path(folder) / file)
                label = int(archive[f"{part}_labels"].ravel()[row])
                lines.append(f"{file},{label},{owner},train")

        order = draw.permutation(len(archive["train_labels"]))
        tested = draw.permutation(len(archive["test_labels"]))[:TESTED]
        for kind, hospitals in KINDS.items():
            for hospital in hospitals:
                owners.append(f"{hospital} {kind}")
                add("train", order[hospital * XRAYS :][:XRAYS], kind, owners[-1])
            owners.append(f"test {kind}")
            add("test", tested, kind, owners[-1])
        (Path(folder) / "table.csv").write_text("\n".join(lines) + "\n")
        settings: dict[str, Any] = {"data": "imagefolder", "data-dir": folder}
        settings |= {
            "partition": "column",
            "site-column": "site",
            "backbone": BACKBONE,
            "features.power-transform": 1.0,
        }
        weights = str(shared("weights/mobilenet_v2-imagenet.safetensors"))
        made = load(parse_run(settings | {"weights-path": weights}), len(owners))
    found = {
        owner: (each.train.features, each.train.labels)
        for owner, each in zip(sorted(owners), made.sites, strict=True)
    }
    tests = {kind: found[f"test {kind}"] for kind in KINDS}
    sites = {(h, kind): found[f"{h} {kind}"] for kind, own in KINDS.items() for h in own}
    return sites, tests


def _xrays(group: Group, split: int) -> Iterator[tuple[str, tuple[float, float, int, int]]]:
    sites, tests = xray_sites()
    learning = Learning(group, split, 2)
    for name, kinds in HOSPITALS.items():
        # Of every split other records are at the outlier hospital: a hospital has 300 of its 400.
        draw = torch.Generator().manual_seed(split)
        sent = list[AnySurrogate]()
        for hospital, kind in enumerate(kinds):
            x, y = sites[hospital, kind]
            rows = torch.randperm(len(y), generator=draw)[: 3 * XRAYS // 4]
            sent.append(learning.sent((x[rows], y[rows]), f"site-{hospital}"))
        chosen = [tests[kind] for kind in dict.fromkeys(kinds)]
        test = (torch.cat([x for x, _ in chosen]), torch.cat([y for _, y in chosen]))
        yield name, learning.measured(sent, test)


def row_of(group: Group, found: dict[str, list[list[float]]]) -> tuple[Any, ...]:
    """The row of a group, from what is measured of each partition."""
    values = [(name, *each) for name, splits in found.items() for each in splits]
    losses = {name: max(each[0] - each[1] for each in splits) for name, splits in found.items()}
    all_losses = [none - auto for _, none, auto, *_ in values]
    worst = max(losses, key=lambda name: losses[name])
    sites = sum(_sites_in(name) for name, *_ in values)
    lowered, out = (int(sum(each[at] for each in values)) for at in (3, 4))
    head = (group.data, group.epsilon, group.covariance, len(found), max(map(len, found.values())))
    mean = round(sum(all_losses) / len(all_losses), 2)
    above = sum(loss > 1 for loss in losses.values())
    return (*head, sites, lowered, out, round(losses[worst], 1), worst, mean, above)


def _sites_in(name: str) -> int:
    numbers = [int(word) for word in name.replace(",", "").split() if word.isdigit()]
    return sum(numbers) or len(KINDS)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--epsilons", nargs="*", choices=EPSILONS, default=EPSILONS)
    parser.add_argument("--covariances", nargs="*", choices=COVARIANCES, default=COVARIANCES)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--name", default=NAME, help="of the file of results")
    options = parser.parse_args()
    kept: dict[str, dict[str, list[list[float]]]] = stored(options.name).get("accuracies", {})
    for split in range(options.splits):
        for data in options.parts:
            for epsilon in options.epsilons:
                for covariance in options.covariances:
                    key = f"{data}, {epsilon}, {covariance}"
                    found = kept.setdefault(key, {})
                    if any(len(each) > split for each in found.values()):
                        continue
                    for name, values in federations(Group(data, epsilon, covariance), split):
                        found.setdefault(name, []).append(list(values))
                        print(key, name, split, *values, sep="\t", flush=True)
                    rows = [
                        row_of(Group(*key.split(", ")), own) for key, own in kept.items() if own
                    ]
                    title = "honest hospitals: the default beside no defence, points of accuracy"
                    report(options.name, title, COLUMNS, rows, accuracies=kept)


if __name__ == "__main__":
    main()
