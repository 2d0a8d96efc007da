"""Reconstruction of images from released component means, and of a generator's members, against
controls.

A hospital releases a class of 1, 2, 5 or 10 CIFAR-10 images of 32 pixels: features of MobileNetV2,
one Gaussian a class, by the site's own code. The attacker has the means, and images of the same
kind: none (smooth noise instead), some, or all of its share. Attacks: the image of its own with the
nearest feature (retrieval); a network from features to images; and optimisation of an image,
through the backbone, until its feature is the mean (inversion). A reconstruction is compared with
the best match among the class's own images, and with that among as many other images of the same
kind (control): only what exceeds the control is leaked.

    python benchmarks/attacks.py            # writes results/attacks.json and results/attacks.png
"""

import io
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.federation import released
from benchmarks.harness.options import described
from benchmarks.harness.plots import draw_images
from benchmarks.harness.results import report
from benchmarks.harness.samples import shared, stored_images
from benchmarks.harness.similarity import best_match
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate, Surrogate

SIDE, ENLARGED, CLASSES = 32, 64, 20
SIZES, FAMILIES = (1, 2, 5, 10), ("spherical", "diag", "lowrank", "gram")
MEAN, DEVIATION = (
    torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)
# Figures of FedPFT's tables 3 and 7 (PSNR, SSIM), of the best 1 % by the true SSIM: CIFAR-10,
# ResNet-50, diffusion model.
PAPER = {
    "raw features": (16.5, 0.535),
    "FedPFT": (14.7, 0.508),
    "FedPFT, epsilon 10": (14.6, 0.483),
    "train set": (14.7, 0.5),
}


@dataclass(frozen=True)
class Images:
    """Images (n, 3, 32, 32) with pixels from 0 to 1, their labels and features (n, d)."""

    pixels: Tensor
    labels: Tensor
    features: Tensor

    def take(self, rows: Tensor) -> "Images":
        return Images(self.pixels[rows], self.labels[rows], self.features[rows])


def backbone() -> nn.Module:
    from safetensors.torch import load_file
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2()
    model.load_state_dict(load_file(shared("weights/mobilenet_v2-imagenet.safetensors")))
    model.classifier = nn.Identity()
    return model.eval().requires_grad_(False)


def through(model: nn.Module, pixels: Tensor) -> Tensor:
    """Features of images, enlarged: of 32 pixels this backbone keeps hardly anything."""
    return model(nn.functional.interpolate((pixels - MEAN) / DEVIATION, ENLARGED, mode="bilinear"))


def features_of(model: nn.Module, pixels: Tensor) -> Tensor:
    return torch.cat([through(model, part) for part in pixels.split(100)])


def read(model: nn.Module, count: int, part: str) -> Images:
    import numpy as np
    from PIL import Image

    files, labels = stored_images(f"data/cifar10/{part}.parquet", count)
    arrays = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255
    return Images(pixels, torch.tensor(labels), features_of(model, pixels))


def smooth_noise(model: nn.Module, count: int, generator: torch.Generator) -> Images:
    """What an attacker without any such image trains on."""
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    pixels = nn.functional.interpolate(coarse, SIDE, mode="bicubic").clamp(0, 1)
    return Images(pixels, torch.zeros(count, dtype=torch.long), features_of(model, pixels))


def released_means(groups: Images, size: int, family: str, epsilon: float) -> Tensor:
    """The means (CLASSES, d) that a site releases, each of `size` records, by the site's code;
    features of norm one.
    """
    names = tuple(f"g{index:03d}" for index in range(CLASSES))
    settings: dict[str, Scalar] = {"fedpft.covariance": family, "fedpft.rank": 4}
    if epsilon:
        settings |= {"epsilon": epsilon, "delta": 1e-5, "classes": ",".join(names)}
    labels = torch.arange(CLASSES).repeat_interleave(size)
    sent = released(parse_run(settings), groups.features, labels, names)
    if isinstance(sent, SumsSurrogate):
        return sent.sums.sums / sent.sums.counts.clamp_min(1)[:, None]
    assert isinstance(sent, Surrogate)
    return sent.mixtures.means[sent.mixtures.labels.argsort()].float()


class Decoder(nn.Sequential):
    """From features to images; small, because attackers here train in a minute."""

    def __init__(self, dimension: int) -> None:
        layers: list[nn.Module] = [
            nn.Linear(dimension, 96 * 16),
            nn.Unflatten(1, (96, 4, 4)),
            nn.ReLU(),
        ]
        for before, after in ((96, 64), (64, 32)):
            layers += [nn.ConvTranspose2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid())


def train_decoder(own: Images, generator: torch.Generator, steps: int) -> Decoder:
    """A decoder of features of norm one, trained on an attacker's images."""
    torch.manual_seed(0)
    model, unit = Decoder(own.features.shape[1]), unit_norm(own.features)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(unit), (64,), generator=generator)
        loss = (model(30 * unit[rows]) - own.pixels[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def unit_norm(features: Tensor) -> Tensor:
    return nn.functional.normalize(features, dim=1)


def invert(model: nn.Module, target: Tensor, steps: int) -> Tensor:
    """Images whose features point along the targets: Adam from grey, with a penalty on differences
    of neighbours.
    """
    raw = torch.zeros(len(target), 3, SIDE, SIDE, requires_grad=True)
    optimiser = torch.optim.Adam([raw], lr=0.05)
    for _ in range(steps):
        pixels = raw.sigmoid()
        along = 1 - (unit_norm(through(model, pixels)) * unit_norm(target)).sum(1)
        rough = pixels.diff(dim=2).abs().mean() + pixels.diff(dim=3).abs().mean()
        optimiser.zero_grad()
        (along.sum() + 0.5 * len(target) * rough).backward()
        optimiser.step()
    return raw.detach().sigmoid()


def retrieve(own: Images, target: Tensor) -> Tensor:
    return own.pixels[(unit_norm(target) @ unit_norm(own.features).T).argmax(1)]


def measured(made: Tensor, groups: Images, others: Images, size: int) -> dict[str, float]:
    """PSNR and SSIM with the class's own images and with the control, and how often the own ones
    are more similar.
    """
    shape = (CLASSES, size, 3, SIDE, SIDE)
    own, control = (best_match(made, each.pixels.reshape(shape)) for each in (groups, others))
    gain = own[1] - control[1]
    error = float(gain.std() / len(gain) ** 0.5)
    values = {
        "psnr": own[0],
        "psnr_control": control[0],
        "ssim": own[1],
        "ssim_control": control[1],
    }
    rounded = {key: round(float(value.mean()), 3) for key, value in values.items()}
    nearer = round(float((gain > 0).float().mean()), 2)
    return rounded | {"ssim_error": round(error, 3), "own_is_nearer": nearer}


def nearest(
    means: Tensor, groups: Images, others: Images, size: int, clipped: bool
) -> dict[str, float]:
    """Median over means of the distance to the nearest used record over that to the nearest
    control.
    """
    scale = unit_norm if clipped else (lambda features: features)
    ratio = []
    for index, mean in enumerate(scale(means) if clipped else means):
        rows = slice(index * size, (index + 1) * size)
        used, control = (
            torch.cdist(mean[None], scale(each.features[rows])).min() for each in (groups, others)
        )
        ratio.append(float(used / control))
    return {"distance_ratio": round(float(torch.tensor(ratio).median()), 3)}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--images", type=int, default=1500, help="of the attacker")
    parser.add_argument(
        "--steps", type=int, default=300, help="of training; a quarter as many for an inversion"
    )
    options = parser.parse_args()
    began, generator, model = time.process_time(), torch.Generator().manual_seed(0), backbone()
    own, hospital = read(model, options.images, "train"), read(model, 700, "test")
    noise = smooth_noise(model, options.images, generator)
    decoders = {
        f"{share} %": train_decoder(data, generator, options.steps)
        for share, data in (
            (0, noise),
            (10, own.take(torch.arange(options.images // 10))),
            (100, own),
        )
    }
    rows: list[tuple[Any, ...]] = []
    pictures: list[tuple[str, Tensor]] = []
    for size, (family, epsilon) in product(
        SIZES, [(name, 0.0) for name in FAMILIES] + [("spherical", 1.0)]
    ):
        groups, others = draw(hospital, size)
        means = released_means(groups, size, family, epsilon)
        facts = nearest(means, groups, others, size, bool(epsilon))
        name = f"{family}, epsilon {epsilon:g}" if epsilon else family
        attacks = {"retrieval": retrieve(own, means)}
        with torch.no_grad():
            attacks |= {
                f"decoder, {share}": each(30 * unit_norm(means)) for share, each in decoders.items()
            }
        if family == "spherical" and size in (1, 10):
            attacks["inversion"] = invert(model, means, options.steps // 4)
        if size == 1 and family == "spherical":
            pictures += [
                ("hospital", groups.pixels),
                *((f"{kind} ({name})", made) for kind, made in attacks.items()),
            ]
        for attack, made in attacks.items():
            figures = measured(made, groups, others, size) | facts
            rows.append((size, name, attack, *figures.values()))
    columns = ("records", "family", "attack", *figures)
    seconds = round(time.process_time() - began)
    report(
        "attacks",
        "Reconstruction of CIFAR-10 images",
        columns,
        rows,
        paper=PAPER,
        processor_seconds=seconds,
    )
    draw_images("attacks", pictures)


def draw(hospital: Images, size: int) -> tuple[Images, Images]:
    """Images of CLASSES releases, each of `size` images of one kind, and as many other images of
    the same kinds.
    """
    rows, control = [], []
    for index in range(CLASSES):
        kind = (hospital.labels == index % 10).nonzero()[:, 0]
        start = (index // 10) * 2 * size
        rows.append(kind[start : start + size])
        control.append(kind[start + size : start + 2 * size])
    return hospital.take(torch.cat(rows)), hospital.take(torch.cat(control))


if __name__ == "__main__":
    main()
