"""Plots of the benchmarks, written next to their results."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.results import RESULTS


def axes_of(width: float, height: float, panels: int = 1) -> Any:
    """The axes of a new figure; an array of them for several panels with one vertical axis.

    Args:
        width: in inches.
        height: in inches.
        panels: how many, side by side.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots(1, panels, sharey=True)


def draw(axes: Any, name: str, legend: bool = True) -> None:
    """Give the axes a grid and their figure a legend, and write it to results/<name>.png.

    Args:
        axes: of `axes_of`.
        name: of the file, without its ending.
        legend: to the right of the axes; False writes none.
    """
    axes.grid(alpha=0.3)
    if legend:
        axes.figure.legend(loc="outside right upper", fontsize=8)
    axes.figure.savefig(RESULTS / f"{name}.png", dpi=130)
    print(f"drawn to benchmarks/results/{name}.png")


def draw_growth(
    name: str,
    sites: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    memory: Sequence[float],
) -> None:
    """Two panels, time and memory against the number of sites.

    Args:
        name: of the file, without its ending.
        sites: their number in each run.
        seconds: processor seconds of each run, by what spends them; the first also gives a
            linear line.
        memory: peak of each run, in GB.
    """
    from matplotlib.figure import Figure

    left, right = Figure(figsize=(9, 3.5), layout="constrained").subplots(1, 2)
    for marker, (label, values) in zip("os", seconds.items(), strict=False):
        left.loglog(sites, values, f"{marker}-", label=label)
    last = next(iter(seconds.values()))[-1]
    left.loglog(sites, [last * count / sites[-1] for count in sites], ":", label="linear")
    left.set(xlabel="sites", ylabel="processor s")
    right.semilogx(sites, memory, "s-", color="tab:green")
    right.set(xlabel="sites", ylabel="peak memory, GB", ylim=(0, None))
    right.grid(alpha=0.3)
    draw(left, name)


def draw_images(name: str, pictures: Sequence[tuple[str, Tensor]]) -> None:
    """A row of images for each entry, with its name, to results/<name>.png.

    Args:
        name: of the file, without its ending.
        pictures: names, and images (n, 3, height, width) with pixels from 0 to 1; 16 are drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.05 * len(pictures)), layout="constrained")
    for place, (title, images) in zip(figure.subplots(len(pictures), 1), pictures, strict=True):
        place.imshow(torch.cat(list(images[:16]), 2).permute(1, 2, 0).numpy())
        place.set_title(title, fontsize=8, loc="left")
        place.axis("off")
    figure.savefig(RESULTS / f"{name}.png", dpi=120)
    print(f"drawn to benchmarks/results/{name}.png")
