"""Data of the benchmarks of targets: sizes, attributes and bags that are made up from the classes of
CIFAR-10, and survival data inside packages.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.harness.samples import stored_features
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.privacy.gaussian_mechanism import clip

# Typical length of an object of each class in metres, made up.
METRES = (30.0, 4.0, 0.3, 0.5, 1.5, 0.5, 0.1, 2.0, 100.0, 10.0)
# Attributes of the classes airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck.
ATTRIBUTES = {
    "animal": (2, 3, 4, 5, 6, 7),
    "wheels": (0, 1, 9),
    "flies": (0, 2),
    "road": (1, 9),
    "water": (6, 8),
    "pet": (3, 5),
    "hooves": (4, 7),
    "fur": (3, 4, 5, 7),
    "metal": (0, 1, 8, 9),
    "small": (2, 3, 6),
    "cargo": (8, 9),
    "wings": (0, 2),
}
# Rare ones: some of the records of one class, by a direction of the features of other photos.
RARE = {"rare deer": 4, "rare ship": 8, "rare frog": 6, "rare dog": 5}
RARE_SHARE, MISSED, FALSE, UNCERTAIN = 0.4, 0.1, 0.01, 0.1
SURVIVAL_SETS = ("veterans", "rossi", "whas500", "gbsg2", "aids", "flchain")


@dataclass(frozen=True)
class Labelled:
    """Records with labels of which each site annotates some.

    Attributes:
        features: (n, d).
        labels: (n, L), NaN where not annotated.
        site: of each record, (n,).
        members: which labels each site annotates, (S, L), bool.
        test: features of other records.
        truth: their labels.
        names: of the labels.
    """

    features: Tensor
    labels: Tensor
    site: Tensor
    members: Tensor
    test: Tensor
    truth: Tensor
    names: list[str]


@dataclass(frozen=True)
class Timed:
    """Records with standardised features (n, d), times (n,) and events (n,)."""

    features: Tensor
    times: Tensor
    events: Tensor


@cache
def _public(d: int) -> tuple[Tensor, Tensor]:
    """Mean and leading principal directions (D, d) of photos that are not in the data."""
    photos = raised(stored_features("pacs-photo")[0].double(), 0.5)
    mean = photos.mean(0)
    _, _, vectors = torch.linalg.svd(photos - mean, full_matrices=False)
    return mean, vectors[:d].T


@cache
def projected(part: str, d: int) -> tuple[Tensor, Tensor]:
    """Features of CIFAR-10 in public directions, of norm at most one (n, d), and classes (n,)."""
    x, y = stored_features("cifar10", part)
    mean, directions = _public(d)
    return clip((raised(x.double(), 0.5) - mean) @ directions, 0.0)[0].double(), y


def log_sizes(records: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and logarithms of sizes of training and of test records."""
    (x, y), (test, true) = (projected(part, d) for part in ("train", "test"))
    sizes = torch.tensor(METRES, dtype=torch.float64).log10()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:records]
    return x[order], sizes[y[order]], test, sizes[true]


def _clean(x: Tensor, y: Tensor) -> Tensor:
    """All attributes of records, (n, L)."""
    columns = [torch.isin(y, torch.tensor(classes)) for classes in ATTRIBUTES.values()]
    for direction, class_ in enumerate(RARE.values()):
        own = y == class_
        value = x[:, direction]
        columns.append(own & (value >= value[own].quantile(1 - RARE_SHARE)))
    return torch.stack(columns, 1).double()


def attributes(sites: int, d: int, seed: int, uncertain: bool) -> Labelled:
    """Attributes at sites that annotate half of them, with missed and false positives.

    Args:
        sites: their number; classes are split by Dirichlet 0.5.
        d: dimensions of the features.
        seed: of the split and of the annotations.
        uncertain: whether a tenth of the annotations is left out.
    """
    import numpy as np

    (x, y), (test, true) = (projected(part, d) for part in ("train", "test"))
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.full(sites, 0.5), 10)
    site = torch.tensor([random.choice(sites, p=shares[int(c)]) for c in y])
    clean = _clean(x, y)
    labels = clean.clone()
    chance = torch.from_numpy(random.random(labels.shape))
    labels[(clean == 1) & (chance < MISSED)] = 0
    labels[(clean == 0) & (chance < FALSE)] = 1
    count = labels.shape[1]
    members = torch.zeros(sites, count, dtype=torch.bool)
    # Site s annotates half of the labels; every label is annotated at two sites or more.
    for each in range(sites):
        members[each, random.permutation(count)[: count // 2]] = True
    for label in range(count):
        for each in random.permutation(sites):
            members[each, label] |= int(members[:, label].sum()) < 2
    labels[~members[site]] = torch.nan
    if uncertain:
        labels[torch.from_numpy(random.random(labels.shape)) < UNCERTAIN] = torch.nan
    return Labelled(x, labels, site, members, test, _clean(test, true), [*ATTRIBUTES, *RARE])


@dataclass(frozen=True)
class Bags:
    """Images in bags.

    Attributes:
        features: of the images, in public directions, (m, d), float64.
        bag: of each image, (m,).
        labels: of each bag, (n,), 0 or 1.
    """

    features: Tensor
    bag: Tensor
    labels: Tensor

    @property
    def means(self) -> Tensor:
        """Mean of the features of each bag, (n, d)."""
        total = torch.zeros(len(self.labels), self.features.shape[1], dtype=torch.float64)
        total.index_add_(0, self.bag, self.features)
        return total / self.bag.bincount(minlength=len(self.labels))[:, None]


def bag_images(task: str, images: tuple[int, int], d: int, seed: int) -> tuple[Bags, Bags]:
    """Bags of images for training and test, 1,000 of each.

    Args:
        task: "share": 65 against 35 % animals; "one cat": one cat in the bag, or none; "half
            alike": half of the images of one class, whichever, or any images.
        images: fewest and most of a bag.
        d: dimensions.
        seed: of the bags.
    """
    parts: list[Bags] = []
    for index, part in enumerate(("train", "test")):
        x, y = stored_features("cifar10", part)
        mean, directions = _public(d)
        z = (raised(x.double(), 0.5) - mean) @ directions
        draw = torch.Generator().manual_seed(2 * seed + index)
        chosen, labels = [], []
        animal = torch.isin(y, torch.tensor(ATTRIBUTES["animal"]))
        first = (animal if task == "share" else y == 3).nonzero().flatten()
        other = ((~animal) if task == "share" else y != 3).nonzero().flatten()
        for number in range(1000):
            size = int(torch.randint(images[0], images[1] + 1, (1,), generator=draw))
            label = number % 2
            if task == "share":
                chance = 0.65 if label else 0.35
                of_first = int((torch.rand(size, generator=draw) < chance).sum())
            elif task == "one cat":
                of_first = label
            else:
                of_first = size // 2 if label else 0
                own = int(torch.randint(10, (1,), generator=draw))
                first, other = (y == own).nonzero().flatten(), torch.arange(len(y))
            pools = ((first, of_first), (other, size - of_first))
            chosen += [
                torch.cat(
                    [
                        pool[torch.randint(len(pool), (count,), generator=draw)]
                        for pool, count in pools
                    ]
                )
            ]
            labels.append(float(label))
        sizes = torch.tensor([len(own) for own in chosen])
        bag = torch.arange(len(sizes)).repeat_interleave(sizes)
        parts.append(Bags(z[torch.cat(chosen)], bag, torch.tensor(labels).double()))
    return parts[0], parts[1]


def bags(
    task: str, images: tuple[int, int], d: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means of the features of bags of images, clipped, and their labels; for training and test.

    Args:
        task: as in `bag_images`.
        images: fewest and most of a bag.
        d: dimensions.
        seed: of the bags.
    """
    train, test = bag_images(task, images, d, seed)
    x, other = (clip(part.means, 0.0)[0].double() for part in (train, test))
    return x, train.labels, other, test.labels


@cache
def timed(name: str) -> Timed:
    """A survival data set; categories as columns of ones and zeros, all standardised."""
    import pandas as pd

    if name == "rossi":
        from lifelines.datasets import load_rossi

        table = load_rossi()
        x, times, events = table.drop(columns=["week", "arrest"]), table["week"], table["arrest"]
    else:
        import sksurv.datasets

        loads = {"veterans": "load_veterans_lung_cancer"}
        x, y = getattr(sksurv.datasets, loads.get(name, f"load_{name}"))()
        event, time = y.dtype.names
        times, events = y[time].astype(float), y[event].astype(float)
        if name == "flchain":
            # The chapter of the cause of death is known only after it.
            x = x.drop(columns=["chapter"])
            x["creatinine"] = x["creatinine"].fillna(1.0)
            x["flc.grp"] = x["flc.grp"].astype(float)
            x["sample.yr"] = x["sample.yr"].astype(str)
    x = pd.get_dummies(x, drop_first=True).astype(float)
    features = torch.tensor(x.to_numpy(), dtype=torch.float64)
    features = (features - features.mean(0)) / features.std(0).clamp_min(1e-9)
    return Timed(
        features,
        torch.tensor(list(times), dtype=torch.float64),
        torch.tensor(list(events), dtype=torch.float64),
    )


def in_ball(features: Tensor) -> Tensor:
    """Features (n, d) in [-1, 1] / sqrt(d), by ranges from the data that are widened by 5 %."""
    low, high = features.min(0).values, features.max(0).values
    middle, half = (low + high) / 2, 1.05 * (high - low) / 2
    return (features - middle) / half / features.shape[1] ** 0.5
