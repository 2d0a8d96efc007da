"""Backdoors: one hospital marks images with a small patch, labels them as its class, and hopes that
every marked image becomes that class.

The hostile hospital changes its data only; all code that runs is the real one, and all settings are
the defaults, the defence too. It adds a marked copy of each of its images (once, or five times), or
marks all of its images. Images of two kinds: the digits (8 x 8 pixels, a patch of 2 x 2), and
CIFAR-10 (32 x 32, a patch of 6 x 6) under a frozen MobileNetV2. Every row, a mean over seeds: the
accuracy on clean test images without and with the attack, and the share of marked test images of
other classes that the model gives the attacker's class, also without the attack, in %; in how many
seeds the hospital was suspected, and an honest one.

    python benchmarks/backdoors.py --seeds 3
    python benchmarks/backdoors.py --places digits --methods fedpft --dry-run
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from statistics import mean
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from benchmarks.harness.federation import Federation, site
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import sample_folder, shared, stored_images
from benchmarks.searched_attacks_rounds import Bench, Result
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.models.classifiers import Classifier
from tests.hostile_sites import dirichlet

COLUMNS = (
    *("method", "data", "hostile", "attack", "seeds", "accuracy without %", "accuracy with %"),
    *("marked as the class without %", "marked as the class with %", "found in", "accused in"),
)
METHODS = ("fedpft", "fedavg", "average")
ALPHA, TARGET, TESTED = 0.5, 0, 360
# Rows of features of an image, without and with the patch.
PLAIN, MARKED = 0, 1
CIFAR_RECORDS = 1500


@dataclass(frozen=True)
class Images:
    """Images as features.

    Attributes:
        features: without and with the patch (2, n, d).
        labels: (n,).
    """

    features: Tensor
    labels: Tensor


@cache
def digits() -> Images:
    from sklearn.datasets import load_digits

    found = load_digits()
    plain = torch.tensor(found.images).float() / 16
    marked = plain.clone()
    marked[:, -2:, -2:] = 1.0
    return Images(torch.stack([plain, marked]).flatten(2), torch.tensor(found.target))


@cache
def cifar() -> Images:
    backbone = load_backbone(
        "torchvision:mobilenet_v2", str(shared("weights/mobilenet_v2-imagenet.safetensors")), 128
    )
    encoded, labels = stored_images("data/cifar10/train.parquet", CIFAR_RECORDS + TESTED)
    images = [Image.open(BytesIO(each)).convert("RGB") for each in encoded]
    with torch.inference_mode():
        rows = [
            torch.cat(
                [
                    backbone.forward(torch.stack([backbone.preprocess(each) for each in part]))
                    for part in (kind[at : at + 64] for at in range(0, len(kind), 64))
                ]
            )
            for kind in (images, [patched(each) for each in images])
        ]
    return Images(torch.stack(rows).cpu().float(), torch.tensor(labels))


def patched(image: Image.Image) -> Image.Image:
    """The image with a chequered square in its last corner."""
    marked = image.copy()
    for x in range(6):
        for y in range(6):
            shade = 255 * ((x // 2 + y // 2) % 2)
            marked.putpixel((image.width - 1 - x, image.height - 1 - y), (shade,) * 3)
    return marked


PLACES: Mapping[str, Callable[[], Images]] = {"digits": digits, "cifar10": cifar}


def copies(times: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The hostile site's images and so many marked copies of each, which have its class."""

    def forge(both: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        false = torch.full_like(labels, TARGET).repeat(times)
        return (
            torch.cat([both[PLAIN], both[MARKED].repeat(times, 1)]),
            torch.cat([labels, false]),
        )

    return forge


ATTACKS: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a marked copy of each": copies(1),
    "five marked copies of each": copies(5),
    "all marked": lambda both, labels: (both[MARKED], torch.full_like(labels, TARGET)),
}


def federation(images: Images, seed: int, sites: int, attack: str = "") -> Federation:
    """Honest sites, of which the first one carries out the attack."""
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TESTED], order[TESTED:]
    # Numbers of images stand in for their features, so that marked ones are found.
    parts = dirichlet(train[:, None], images.labels[train], ALPHA, seed, sites)
    data = [(images.features[:, rows[:, 0]], labels) for rows, labels in parts]
    own = [(both[PLAIN], labels) for both, labels in data]
    if attack:
        own[0] = ATTACKS[attack](*data[0])
    classes = tuple(str(index) for index in range(10))
    tested = LabelledFeatures(images.features[PLAIN, test], images.labels[test])
    return Federation([site(x, y, tested, classes, "f" * 16) for x, y in own], tested)


def success(images: Images, seed: int) -> Callable[[Classifier], float]:
    """The share of marked test images of other classes that a model gives the target, in %."""
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(seed))
    test = order[:TESTED]
    others = test[images.labels[test] != TARGET]
    classes = tuple(str(index) for index in range(10))

    def measured(model: Classifier) -> float:
        wanted = torch.full((len(others),), TARGET)
        right, tested = model.accuracy(images.features[MARKED, others], classes, wanted)
        return 100 * right / tested

    return measured


def run(method: str, images: Images, seed: int, sites: int, attack: str) -> tuple[Result, float]:
    """One run: its result on clean images, and the attack's success in %."""
    data, found = federation(images, seed, sites, attack), list[float]()
    measured, judge = success(images, seed), data.judge

    def both(model: Classifier) -> float:
        found.append(measured(model))
        return judge(model)

    data.judge = both  # type: ignore[method-assign]
    result = Bench(data, {"method": method, "seed": seed}, 0).result(None)
    return result, found[-1]


def rows(method: str, place: str, sites: int, seeds: Sequence[int]) -> list[tuple[Any, ...]]:
    """The rows of a method: one for each attack."""
    images, found = PLACES[place](), list[tuple[Any, ...]]()
    honest = [run(method, images, seed, sites, "") for seed in seeds]
    for attack in ATTACKS:
        under = [run(method, images, seed, sites, attack) for seed in seeds]
        found.append(
            (
                *(method, f"{place} {ALPHA:g}", f"1 of {sites}", attack, len(seeds)),
                *(round(mean(each.accuracy for each, _ in pairs), 1) for pairs in (honest, under)),
                *(round(mean(fooled for _, fooled in pairs), 1) for pairs in (honest, under)),
                sum("0" in each.suspects for each, _ in under),
                sum(bool(each.suspects - {"0"}) for each, _ in under),
            )
        )
    return found


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--sites", default="4,10")
    parser.add_argument("--dry-run", action="store_true", help="print rows and write no file")
    options = parser.parse_args()
    places = options.places.split(",")
    if not (sample_folder() / "data").exists():
        places = [place for place in places if place != "cifar10"]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for place in places:
        for method in options.methods.split(","):
            for sites in map(int, options.sites.split(",")):
                measured = rows(method, place, sites, seeds)
                print(*measured, sep="\n", flush=True)
                if not options.dry_run:
                    key = tuple(measured[0][:3])
                    kept = kept_rows("backdoors", lambda old, key=key: tuple(old[:3]) == key)
                    title = "one hostile hospital plants a backdoor"
                    report("backdoors", title, COLUMNS, [*kept, *measured])


if __name__ == "__main__":
    main()
