"""The tables of the README and of docs/results.md with both backbones, from the results' JSON.

`benchmarks/pages.py` writes them between the marks `<!-- table NAME -->` and `<!-- end -->`.
"""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from benchmarks.harness.results import stored

EPSILONS = ("none", "8", "4", "2", "1")
BACKBONES = ("", "-lite0")
MEASURES = (
    "majority baseline",
    "accuracy",
    "balanced accuracy",
    "AUROC",
    "sensitivity",
    "specificity",
)
CIFAR, PACS = "CIFAR-10, Dirichlet 0.1", "PACS, photo and sketch"
# Rows of each data set: in words, without epsilon, with it.
FAMILIES = (
    ("centralized head", "centralized head", ""),
    ("nothing set", "default", "default"),
    ("`lowrank` r=64", "lowrank r=64, 8 bits", "lowrank r=64"),
    ("`spherical`", "spherical", "spherical"),
    ("`ensemble`", "ensemble", ""),
)


def xrays(backbone: str, epsilon: str) -> dict[str, Any]:
    """The row of an epsilon of the X-rays at four hospitals."""
    found = stored(f"xrays-four-hospitals{backbone}")
    rows = {f"{row[0]}".removesuffix(".0"): row for row in found["rows"]}
    return dict(zip(found["columns"], rows[epsilon], strict=True))


def accuracy(backbone: str, data: str, row: str, epsilon: str) -> float | None:
    """The mean over seeds in %; None where it is not measured."""
    kind, name = (
        ("families", row) if epsilon == "none" else ("private", f"epsilon {epsilon}, {row}")
    )
    values = (
        stored(f"defaults-{kind}{backbone}")["accuracy"].get(f"{data}: {name}") if row else None
    )
    return mean(values) if values else None


def row_of(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


def ruler(columns: int) -> str:
    """The line below the header of a table."""
    return "|" + "---|" * columns + "\n"


def pair(value: Callable[[str], float | None]) -> str:
    """The numbers of both backbones, the larger one in bold."""
    both = [value(backbone) for backbone in BACKBONES]
    numbers = [round(each, 1) for each in both if each is not None]
    if len(numbers) < 2:
        return ""
    bold = [each == max(numbers) > min(numbers) for each in numbers]
    return " / ".join(
        f"**{n:.1f}**" if b else f"{n:.1f}" for n, b in zip(numbers, bold, strict=True)
    )


def two_backbones() -> str:
    """Both backbones by epsilon."""
    text = row_of(("MobileNetV2 / Lite0", *EPSILONS)) + ruler(1 + len(EPSILONS))
    for measure in ("AUROC", "accuracy"):
        cells = [pair(lambda of, e=e, m=measure: xrays(of, e)[m]) for e in EPSILONS]
        text += row_of((f"X-rays, {measure}", *cells))
    for data in (CIFAR, PACS):
        for words, without, private in FAMILIES:
            rows = [(e, without if e == "none" else private) for e in EPSILONS]
            cells = [pair(lambda of, e=e, r=r, d=data: accuracy(of, d, r, e)) for e, r in rows]
            text += row_of((f"{data.split(',')[0]}, {words}", *cells))
    return text


def xrays_by_epsilon() -> str:
    """X-rays with EfficientNet-Lite0, nothing set."""
    text = row_of(("epsilon", *MEASURES, "kB sent by all sites")) + ruler(2 + len(MEASURES))
    for epsilon in EPSILONS:
        found = xrays("-lite0", epsilon)
        sent = f"{found['kB sent by all sites']:,.1f}"
        text += row_of((epsilon, *(f"{found[each]:.1f}" for each in MEASURES), sent))
    return text


def readme() -> str:
    """The first table of the README."""
    shown, lite = ("none", "8", "2", "1"), "-lite0"
    head = ("released", "non-private", "epsilon 8", "epsilon 2", "epsilon 1")
    text = row_of((*head, "sent by all sites: non-private; private")) + ruler(6)
    area = [f"**{xrays(lite, e)['AUROC']:.1f}**" for e in shown]
    sent = "6.6 MB; 6.6 MB at epsilon 8, else 23 kB"
    text += row_of(("**chest X-rays, default settings: AUROC**", *area, sent))

    def numbers(without: str, private: str, mark: str = "") -> list[str]:
        rows = [(e, without if e == "none" else private) for e in shown]
        found = [accuracy(lite, CIFAR, row, e) for e, row in rows]
        return ["" if each is None else f"{mark}{each:.1f}{mark}" for each in found]

    rows = (
        (
            "all real features in one place, trained head *",
            numbers("centralized head", ""),
            "25.6 MB",
        ),
        (
            "**`fedpft`, default settings** *",
            numbers("default", "default", "**"),
            "16.6 MB; 17 MB at epsilon 8, else 0.26 MB",
        ),
        (
            "`fedpft`, lowrank r=64, `fedpft.bits=8` *",
            numbers("lowrank r=64, 8 bits", ""),
            "0.84 MB",
        ),
        ("`fedpft`, spherical *", numbers("spherical", "spherical"), "0.16 MB; 0.26 MB"),
    )
    return text + "".join(row_of((f"CIFAR-10, {name}", *cells, sent)) for name, cells, sent in rows)


TABLES = {"two-backbones": two_backbones, "xrays-by-epsilon": xrays_by_epsilon, "readme": readme}
