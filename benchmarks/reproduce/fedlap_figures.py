"""FedLAP-DP, figures 5, 11, 12 and 16, on the digits; figures 13 to 15 are of benchmarks/fedlap_radius.py.

    python benchmarks/reproduce/fedlap_figures.py
    python benchmarks/reproduce/fedlap_figures.py --figure 12 --seeds 1

Figure 5: accuracy by round and number of images of a class, at five sites of two classes, with a hidden
layer on 8 x 8 pixels. Figure 16: the standard deviation of the pixels of the images that sites send, by
round, of the same runs. Figures 11 and 12: one site with all records. In each iteration it sends images
that imitate the gradient of one batch, and the coordinator makes one step; a ConvNet of width 32 on 16 x
16 pixels. The images match the direction (vanilla), the direction and the squared error (equation 9), or
the squared error alone (equation 21); calibration gives the gradient of the vanilla images the lengths of
the real one, layer by layer (equation 20). Figure 11 is the length of the images' gradient over the real
one's, the geometric mean of the layers in the last fifty iterations.
"""

import math
from collections.abc import Callable, Sequence
from statistics import geometric_mean, mean

import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, federate, learn, load_seed
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.seeds import mean_and_deviation, over_seeds
from fedsurrogate.client_app.methods.fedlap.approximation import matching_slope
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, gradient, mismatch
from fedsurrogate.common.models.networks import fresh, parameters_of, split_input
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.strategies.base.training import Training

SITES, ROUNDS, IMAGES = 5, 10, (1, 5, 10, 20, 50)
TWO: dict[str, Scalar] = {"partition": "classes", "classes-per-site": 2}
# Of figure 12: iterations, records of a batch, images of a class, steps of the images, their rate and
# momentum, and the model's rate. The rate of the squared error alone was the best of 10, 100 and 1000.
STEPS, BATCH, OF_CLASS, IMAGE_STEPS, IMAGE_RATE, MOMENTUM, RATE = 60, 256, 5, 5, 100.0, 0.5, 0.1
SHOWN = (20, 40, 60)
Criterion = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def squared_error(mine: Sequence[Tensor], real: Sequence[Tensor]) -> Tensor:
    """Equation 21, of all layers."""
    return torch.stack([(a - b).square().sum() for a, b in zip(mine, real, strict=True)]).sum()


def direction(mine: Sequence[Tensor], real: Sequence[Tensor]) -> Tensor:
    """Equation 10."""
    return mismatch(mine, real, 0.0)


def regularised(mine: Sequence[Tensor], real: Sequence[Tensor]) -> Tensor:
    """Equation 9 with the paper's weight."""
    return mismatch(mine, real, 0.1)


# The criterion of the images, and whether the coordinator calibrates; None: the real gradient.
ROWS: dict[str, tuple[Criterion, bool] | None] = {
    "baseline, the real gradient": None,
    "vanilla, direction": (direction, False),
    "calibration (equation 20)": (direction, True),
    "regularisation (equation 9)": (regularised, False),
    "squared error (equation 21)": (squared_error, False),
}


def calibrated(mine: dict[str, Tensor], real: dict[str, Tensor]) -> dict[str, Tensor]:
    """Equation 20: the gradient of images with the lengths of the real one, layer by layer.

    Args:
        mine: of the images, by parameter.
        real: of the records, by parameter.

    Example:
        >>> made = {"w": torch.tensor([3.0, 4.0])}
        >>> calibrated(made, {"w": torch.tensor([0.0, 10.0])})["w"].tolist()
        [6.0, 8.0]
    """
    return {
        name: part * (real[name].norm() / part.norm().clamp_min(1e-30))
        for name, part in mine.items()
    }


def one_batch(
    seed: int, data: Federation, row: tuple[Criterion, bool] | None
) -> tuple[list[float], float]:
    """Accuracy after each of the iterations in SHOWN, in %, and the ratio of the gradients' lengths."""
    train, test = data.sites[0].train, data.test
    module = fresh("convnet", train.features.shape[1], len(data.classes), 32, seed)
    body, values = split_input(module, train.features)
    _, tests = split_input(module, test.features)
    here = {name: tensor.detach() for name, tensor in parameters_of(module).items()}
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(data.classes)).repeat_interleave(OF_CLASS)
    images = torch.randn((len(labels), *values.shape[1:]), generator=drawn).requires_grad_()
    optimiser = torch.optim.SGD([images], lr=IMAGE_RATE, momentum=MOMENTUM)
    accuracies, ratios = [], []
    for step in range(1, STEPS + 1):
        rows = torch.randperm(len(train.labels), generator=drawn)[:BATCH]
        real = gradient(body, here, LandscapeRecords.evenly(values[rows], train.labels[rows]))
        used = real
        if row is not None:
            criterion, calibrates = row
            target = list(real.values())
            for _ in range(IMAGE_STEPS):
                now = LandscapeRecords.evenly(images, labels)
                _, images.grad = matching_slope(
                    body,
                    here,
                    [now],
                    lambda same: same,
                    lambda mine, to=target, by=criterion: by(mine, to),
                )
                if images.grad.isfinite().all():
                    optimiser.step()
            used = gradient(body, here, LandscapeRecords.evenly(images.detach(), labels))
            if step > STEPS - 50:
                ratios += [
                    float(used[name].norm() / part.norm())
                    for name, part in real.items()
                    # The bias of a convolution before GroupNorm has no gradient.
                    if part.norm() > 1e-5 and used[name].norm() > 0
                ]
            used = calibrated(used, real) if calibrates else used
        here = {name: tensor - RATE * used[name] for name, tensor in here.items()}
        if step in SHOWN:
            with torch.no_grad():
                found = torch.func.functional_call(body, here, (tests,)).argmax(1)
            accuracies.append(100 * float((found == test.labels).double().mean()))
    return accuracies, geometric_mean(ratios) if ratios else 1.0


def figure_12(seeds: int) -> None:
    """Figures 11 and 12."""
    base: dict[str, Scalar] = {"image-size": 16, "partition": "iid"}
    results = over_seeds(seeds, lambda seed: load_seed(base, 1, seed), ROWS, one_batch)
    rows = []
    for row, each in results.items():
        curves = zip(*(accuracies for accuracies, _ in each), strict=True)
        cells = [mean_and_deviation(step) for step in curves]
        rows.append((row, *cells, round(math.prod(r for _, r in each) ** (1 / len(each)), 3)))
    columns = ("row", *(f"iteration {step}, %" for step in SHOWN), "length over the real one's")
    title = f"FedLAP figures 11 and 12, digits, one site, one batch an iteration, {seeds} seeds"
    report("reproduce-fedlap-figure12", title, columns, rows)


def by_images(seed: int, data: Federation, images: int) -> tuple[list[float], list[float], float]:
    """Accuracy and the pixels' standard deviation by round, and the kB of a site and round."""
    own: dict[str, Scalar] = {"method": "fedlap", "fedlap.rounds": ROUNDS}
    own |= {"fedlap.images-per-class": images}
    spreads: list[float] = []

    def step(training: Training, sets: Sequence[Synthetic], device: str) -> None:
        spreads.append(float(torch.cat([each.values for each in sets]).std()))
        learn(training, sets, device)

    made = federate(parse_run({**TWO, **own, "seed": seed}), data, step)
    return [a for _, a in made.curve], spreads, made.bytes / ROUNDS / SITES / 1e3


def figure_5(seeds: int) -> None:
    """Figures 5 and 16."""
    results = over_seeds(
        seeds,
        lambda seed: load_seed(TWO, SITES, seed),
        {f"{images} a class": images for images in IMAGES},
        by_images,
    )
    shown = (1, 2, 5, 10)
    rows, pixels = [], []
    for row, each in results.items():
        curves = [mean_and_deviation([one[0][at - 1] for one in each]) for at in shown]
        rows.append((row, *curves, round(each[0][2], 2)))
        spread = [round(mean(one[1][at - 1] for one in each), 3) for at in shown]
        pixels.append((row, *spread))
    rounds = [f"round {at}" for at in shown]
    text = f"digits, {SITES} sites of two classes, {seeds} seeds"
    title = f"FedLAP figure 5, {text}, accuracy in %"
    report("reproduce-fedlap-figure5", title, ("images", *rounds, "kB a round"), rows)
    title = f"FedLAP figure 16, {text}, standard deviation of pixels"
    report("reproduce-fedlap-figure16", title, ("images", *rounds), pixels)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--figure", nargs="*", choices=["5", "12"], default=["5", "12"])
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    if "5" in options.figure:
        figure_5(options.seeds)
    if "12" in options.figure:
        figure_12(options.seeds)


if __name__ == "__main__":
    main()
