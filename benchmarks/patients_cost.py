"""What it costs in accuracy to protect patients in place of images: chest X-rays with 1 to 8 images
a patient.

Five sites share the sample X-rays (28 pixels, no backbone, minus one half). A patient has that many
images of one class, either of other people (unlike), or one image moved by up to two pixels and
exposed otherwise (alike). There are as many images in all rows, so a patient with eight leaves an
eighth of the patients. The second table is one linear model at one place, trained by 20 full steps at
the same noise, and compares ways to shorten what a patient adds:

- "records": each record's gradient is shortened, and weighs one over the patient's records, as here;
- "mean": the mean gradient of a patient is shortened;
- "one": one record of each patient is used.
"""

import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, federate
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import shared
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights
from fedsurrogate.common.run import parse_run

SITES, CLASSES, DELTA = 5, ("normal", "pneumonia"), 1e-5
STEPS, CLIP, RATE = 20, 0.3, 4.0
METHODS: dict[str, dict[str, Any]] = {
    "fedpft": {"method": "fedpft"},
    "dp-fedavg": {"method": "dp-fedavg"},
    "dpcvae": {"method": "dpcvae", "dpcvae.rounds": 5},
}


def xrays(part: str) -> tuple[Tensor, Tensor]:
    """Images (n, 28, 28) from 0 to 1, and labels (n,)."""
    archive = np.load(shared("data/pneumonia/pneumonia-28px.npz"))
    images = torch.from_numpy(archive[f"{part}_images"]).float() / 255
    return images, torch.from_numpy(archive[f"{part}_labels"]).ravel().long()


def patients_of(
    images: Tensor, labels: Tensor, each: int, alike: bool, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Features (n, 784), labels (n,) and patients (n,): as many images, so many of each patient."""
    chosen, owners = [], []
    for label in range(len(CLASSES)):
        own = (labels == label).nonzero().flatten()
        own = own[torch.randperm(len(own), generator=random)]
        count = len(own) // each
        rows = own[:count].repeat_interleave(each) if alike else own[: count * each]
        chosen.append(rows)
        owners.append(torch.arange(count).repeat_interleave(each) + 100_000 * label)
    rows, whose = torch.cat(chosen), torch.cat(owners)
    made = images[rows]
    if alike and each > 1:
        moves = torch.randint(-2, 3, (len(rows), 2), generator=random).tolist()
        made = torch.stack(
            [torch.roll(image, move, (0, 1)) for image, move in zip(made, moves, strict=True)]
        )
        exposure = 0.8 + 0.4 * torch.rand(len(rows), 1, 1, generator=random)
        made = (made * exposure).clamp_max(1)
    return made.flatten(1) - 0.5, labels[rows], whose


def sites_of(
    x: Tensor, y: Tensor, whose: Tensor, test: LabelledFeatures, protects: bool
) -> Federation:
    """Five sites, each with whole patients, dealt in turn."""
    _, order = torch.unique(whose, return_inverse=True)
    sites = []
    for index in range(SITES):
        rows = (order % SITES == index).nonzero().flatten()
        names = tuple(map(str, whose[rows].tolist())) if protects else None
        train = LabelledFeatures(x[rows], y[rows], names)
        sites.append(SiteFeatures(train, test, CLASSES, "xrays", 0.0, simulated=False))
    return Federation(sites, test)


def trained(x: Tensor, y: Tensor, whose: Tensor, way: str, epsilon: float, seed: int) -> Tensor:
    """A linear model (2, 785) after full noisy steps."""
    clip, random = CLIP, torch.Generator().manual_seed(seed)
    multiplier = gaussian_noise_multiplier(epsilon, DELTA) * STEPS**0.5
    _, order = torch.unique(whose, return_inverse=True)
    units = int(order.max()) + 1
    if way == "one":
        firsts = torch.full((units,), len(order)).scatter_reduce(
            0, order, torch.arange(len(order)), "amin"
        )
        x, y, order = x[firsts], y[firsts], order[firsts]
    weights = unit_weights([str(each) for each in order.tolist()], len(order)).float()
    inputs = torch.cat([torch.nn.functional.normalize(x), torch.ones(len(x), 1)], 1)
    model = torch.zeros(2, inputs.shape[1])
    for _ in range(STEPS):
        residual = (inputs @ model.T).softmax(1) - torch.nn.functional.one_hot(y, 2)
        if way == "mean":
            each = torch.zeros(units, *model.shape)
            each.index_add_(0, order, (weights[:, None] * residual)[:, :, None] * inputs[:, None])
            norms = each.flatten(1).norm(dim=1)
            total = torch.einsum("u,uab->ab", (clip / norms).clamp_max(1), each)
        else:
            norms = residual.norm(dim=1) * inputs.norm(dim=1)
            total = ((weights * (clip / norms).clamp_max(1))[:, None] * residual).T @ inputs
        noise = torch.randn(model.shape, generator=random) * multiplier * clip
        model = model - RATE * (total + noise) / (units * clip)
    return model


def ways(epsilons: list[float], seeds: int) -> list[tuple[Any, ...]]:
    """Rows of the second table."""
    (images, labels), (unseen, truth) = xrays("train"), xrays("test")
    hidden = torch.cat(
        [torch.nn.functional.normalize(unseen.flatten(1) - 0.5), torch.ones(len(unseen), 1)], 1
    )
    rows = []
    for alike in (False, True):
        for each in (2, 4, 8):
            for epsilon in epsilons:
                cells = []
                for way in ("records", "mean", "one"):
                    right = []
                    for seed in range(seeds):
                        made = patients_of(
                            images, labels, each, alike, torch.Generator().manual_seed(seed)
                        )
                        model = trained(*made, way, epsilon, seed)
                        right.append(float(((hidden @ model.T).argmax(1) == truth).float().mean()))
                    cells.append(100 * statistics.mean(right))
                rows.append(("alike" if alike else "unlike", each, epsilon, *cells))
    return rows


def costs(epsilons: list[float], seeds: int, methods: list[str]) -> None:
    """The first table: accuracy where records, and where patients are protected. It is written after
    each row, and rows of other methods stay.
    """
    columns = ("method", "images of a patient", "each", "epsilon", "records protected", "patients")
    title = f"X-rays of {SITES} sites: accuracy in %, delta {DELTA:g}"
    (images, labels), (unseen, truth) = xrays("train"), xrays("test")
    test = LabelledFeatures(unseen.flatten(1) - 0.5, truth)
    rows = kept_rows("patients-cost", lambda row: row[0] in methods)
    for method in methods:
        for alike in (False, True):
            for each in (1, 2, 4, 8):
                if alike and each == 1:
                    continue
                for epsilon in epsilons:
                    cells = []
                    for protects in (False, True):
                        right = []
                        for seed in range(seeds):
                            made = patients_of(
                                images, labels, each, alike, torch.Generator().manual_seed(seed)
                            )
                            run = parse_run(
                                METHODS[method]
                                | {"epsilon": epsilon, "delta": DELTA, "seed": seed}
                                | {"classes": ",".join(CLASSES)}
                            )
                            right.append(federate(run, sites_of(*made, test, protects)).accuracy)
                        cells.append(
                            f"{statistics.mean(right):.1f} ± {statistics.pstdev(right):.1f}"
                        )
                    rows.append((method, "alike" if alike else "unlike", each, epsilon, *cells))
                    report("patients-cost", title, columns, rows)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--epsilons", type=float, nargs="*", default=[1.0, 4.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--ways", action="store_true", help="the second table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs(options.epsilons, options.seeds, options.methods)
    if options.ways:
        compared = ways(options.epsilons, options.seeds)
        kinds = ("images of a patient", "each", "epsilon", "records", "mean", "one")
        title = f"A linear model at clip {CLIP:g}: accuracy in %"
        report("patients-cost-ways", title, kinds, compared)


if __name__ == "__main__":
    main()
