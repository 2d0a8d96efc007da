"""The head of secure aggregation on data that are in no table: dimensions by rule, half and twice as
many, and shrunk class means.

PACS photos and sketches, and images of CIFAR-10 that are not among the sample features. Records are
pooled and the noise is drawn here, as large as in a sum of ten sites with the default trust when
none is lost.

    python benchmarks/secure_aggregation_head.py --draws 8
"""

import io
import statistics
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import shared, stored_features, stored_images
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import dimensions_of, rules_of
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.class_sums import statistics as sums_of
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums
from fedsurrogate.strategies.pooling.class_means import read_map

EPSILONS = (1.0, 2.0, 4.0, 8.0)
SITES = 10
COLUMNS = ("data", "records", "epsilon", "dimensions by rule", "512, means as released")
COLUMNS += ("half", "by rule", "twice")
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def pacs(domain: str) -> Data:
    (x, y), (test_x, test_y) = (
        stored_features(f"pacs-{domain}", part) for part in ("train", "test")
    )
    return x.double(), y, test_x.double(), test_y


def cifar(images: int, apart: float = 8.0) -> Data:
    """Features of the first images that are not among the sample features: no feature lies within
    `apart` of theirs.
    """
    from PIL import Image

    weights = str(shared("weights/mobilenet_v2-imagenet.safetensors"))
    backbone = load_backbone("torchvision:mobilenet_v2", weights, 128, "cpu")
    known, parts = stored_features("cifar10")[0], []
    files, labels = stored_images("data/cifar10/train.parquet", images)
    for start in range(0, len(files), 32):
        opened = [Image.open(io.BytesIO(file)).convert("RGB") for file in files[start : start + 32]]
        parts.append(
            backbone.forward(torch.stack([backbone.preprocess(image) for image in opened]))
        )
    x, y = torch.cat(parts), torch.tensor(labels)
    new = torch.cat([torch.cdist(part, known).min(1).values for part in x.split(1000)]) > apart
    order = torch.randperm(int(new.sum()), generator=torch.Generator().manual_seed(0))
    x, y = x[new][order].double(), y[new][order]
    return x[2500:], y[2500:], x[:2500], y[:2500]


def accuracy(data: Data, settings: dict[str, Any], draws: int) -> float:
    """Mean accuracy in % over draws of the noise."""
    x, y, test_x, test_y = data
    classes = tuple(map(str, range(int(y.max()) + 1)))
    config = parse_run(settings | {"classes": ",".join(classes)})
    claim, public, rules = config.mechanism, read_map(config), rules_of(config.settings, SITES)
    assert claim is not None
    assert public.projection is not None
    assert public.centre is not None

    def mapped(rows: Tensor) -> Tensor:
        assert public.projection is not None
        assert public.centre is not None
        return clip(
            (raised(rows, config.power) - public.centre.double()) @ public.projection.double().T,
            claim.clip,
        )[0]

    exact = {
        each.name: each.value
        for each in sums_of(mapped(x), y, torch.ones(len(y)), len(classes), "distributed")
    }
    sigmas = {
        name: sigma * (SITES / rules.lasting.honest) ** 0.5
        for name, (sigma, _) in claim.noise.items()
    }
    tests, accuracies = mapped(test_x), []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        noisy = {
            name: value
            + sigmas[name] * torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in exact.items()
        }
        sums = Sums(noisy["counts"], noisy["sums"], noisy["squares"], sigmas)
        header = Header("fedpft", "run", "sum", "f" * 16, classes)
        head, _ = learn_from_sums([SumsSurrogate(header, sums, claim)], "distributed", 0)
        names = torch.tensor([int(name) for name in head.header.classes])
        scores = tests @ head.weight.double().T + head.bias.double()
        accuracies.append(100 * float((names[scores.argmax(1)] == test_y).double().mean()))
    return statistics.mean(accuracies)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument(
        "--images",
        type=int,
        default=16_000,
        help="of CIFAR-10, of which those in the samples are left out",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    other = cifar(options.images)
    sets: dict[str, tuple[Data, str]] = {
        "CIFAR-10": (other, "photo"),
        "CIFAR-10, 2,500 records": ((other[0][:2500], other[1][:2500], *other[2:]), "photo"),
        "PACS sketches": (pacs("sketch"), "photo"),
        "PACS photos": (pacs("photo"), "sketch"),
    }
    rows: list[tuple[Any, ...]] = []
    for name, (data, public) in sets.items():
        base: dict[str, Any] = {
            "secure-aggregation": True,
            "fedpft.covariance": "gram",
            "delta": 1e-5,
            "features.power-transform": 0.5,
            "features.projection": str(shared("weights/mobilenet_v2-imagenet.safetensors")),
            "fedpft.public": str(shared(f"features/pacs-{public}-train.safetensors")),
            "features.records": len(data[1]),
        }
        for epsilon in EPSILONS:
            settings = base | {"epsilon": epsilon}
            run = parse_run(settings | {"classes": "a,b"})
            own = run.settings
            chosen = dimensions_of(own.features, own.colluding, run.mechanism)
            with (
                patch(
                    "fedsurrogate.strategies.fedpft.private_head.expected",
                    lambda components, covariance: (components, covariance),
                ),
                patch("fedsurrogate.strategies.closed_form.solvers.RIDGE", 0.2),
            ):
                plain = accuracy(data, settings | {"features.dimensions": 512}, options.draws)
            scaled = [round(chosen * factor) for factor in (0.5, 1, 2)]
            by_rule = [
                accuracy(data, settings | {"features.dimensions": dims}, options.draws)
                for dims in scaled
            ]
            rows.append(
                (
                    name,
                    len(data[1]),
                    epsilon,
                    chosen,
                    *(round(each, 2) for each in (plain, *by_rule)),
                )
            )
            title = "pooled, default trust of ten sites, accuracy %"
            report("secure-aggregation-head", title, COLUMNS, rows, draws=options.draws)


if __name__ == "__main__":
    main()
