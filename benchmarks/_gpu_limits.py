"""What a device can reach on paper: the operations, bytes and kernels of a piece of work, held
against the device's limits.

Operations are those of torch's own counter; bytes are the inputs and outputs of every kernel, each
read or written once; kernels are the operations that are no views. The slowest resource decides:
compute, memory, the link to the host, or the start of kernels. Without a GPU models run on the meta
device, which has shapes and no numbers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

RESULT = Path(__file__).resolve().parent / "results" / "gpu-limits.json"
IMAGE, BATCH = 224, 256
# The library and name of each model of the table.
MODELS = {
    "ViT-B/16": "torchvision:vit_b_16",
    "ResNet-50": "torchvision:resnet50",
    "DINOv2 ViT-L/14": "timm:vit_large_patch14_dinov2",
}


@dataclass(frozen=True)
class Work:
    """What a piece of work needs.

    Attributes:
        half: operations in bfloat16 or float16.
        tf32: in convolutions of float32, which a GPU computes in TF32 by default.
        single: in float32.
        double: in float64.
        memory: bytes of the device's memory, read and written.
        link: bytes between host and device, in the busier direction.
        launches: kernels.
    """

    half: float = 0.0
    tf32: float = 0.0
    single: float = 0.0
    double: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    launches: float = 0.0

    def times(self, factor: float) -> Work:
        """The same work, this often."""
        return Work(*(each * factor for each in vars(self).values()))

    def plus(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def operations(self) -> float:
        """Of all precisions."""
        return self.half + self.tf32 + self.single + self.double


@dataclass(frozen=True)
class Limits:
    """What a device does at most, each a second; `launch` is the seconds of a kernel's start.

    Attributes:
        half: operations in bfloat16.
        tf32: operations in TF32.
        single: operations in float32.
        double: operations in float64.
        memory: bytes read and written in the device's memory.
        link: bytes from the host to the device.
        launch: seconds between the starts of two kernels.
        images: images that all cores decode and prepare.
    """

    half: float
    tf32: float
    single: float
    double: float
    memory: float
    link: float
    launch: float
    images: float = math.inf

    def floor(self, work: Work) -> tuple[float, str]:
        """The least seconds of this work, and the resource that decides.

        Args:
            work: operations of several precisions add up; everything else overlaps.
        """
        parts = {
            "operations": sum(
                getattr(work, kind) / getattr(self, kind)
                for kind in ("half", "tf32", "single", "double")
            ),
            "memory": work.memory / self.memory,
            "host link": work.link / self.link,
            "kernel starts": work.launches * self.launch,
        }
        slowest = max(parts, key=lambda part: parts[part])
        return parts[slowest], slowest


# NVIDIA's data sheets, without sparsity. PCIe 5.0 with 16 lanes. The start of a kernel is not in
# them; it is what a stream of empty kernels takes.
_H100 = Limits(989e12, 495e12, 67e12, 67e12, 3.35e12, 64e9, 2.5e-6)
SHEETS = {"H100": _H100, "H200": replace(_H100, memory=4.8e12)}
# One NVIDIA H100 80GB HBM3, measured: a copy in its memory, and a product of 8,192 x 8,192.
MEASURED = replace(_H100, half=798e12, memory=3.0e12)


def sheet(name: str) -> Limits | None:
    """The data sheet of a device by the name that CUDA gives it; None if it is not known."""
    return next((limits for part, limits in SHEETS.items() if part in name), None)


def _factorised(cube: float, reads: float = 0.0) -> Callable[..., tuple[float, float]]:
    """Operations, and numbers read, of a factorisation of (..., d, d), as shares of d^3."""

    def count(matrix: Tensor, *_: object, **__: object) -> tuple[float, float]:
        d = matrix.shape[-1]
        cubes = matrix.numel() * d
        return cube * cubes, reads * cubes

    return count


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[float, float]:
    return sdpa_flop_count(query.shape, key.shape, value.shape), 0.0


# Operations that torch's counter leaves out. Attention: one kernel on a GPU, which keeps the scores
# out of the memory. eigh: a reduction to a tridiagonal matrix (4/3), which
# reads the shrinking matrix for every column (1/3), its vectors (4/3), and their way back (2).
_FURTHER: dict[Any, Callable[..., tuple[float, float]]] = {
    torch.ops.aten.scaled_dot_product_attention: _attention,
    torch.ops.aten._linalg_eigh: _factorised(14 / 3, 1 / 3),
    torch.ops.aten.linalg_cholesky_ex: _factorised(1 / 3),
    torch.ops.aten.linalg_inv_ex: _factorised(2),
}


class Counter(TorchDispatchMode):
    """Counts the work of everything that torch does inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count one operation."""
        kwargs = kwargs or {}
        known = func._overloadpacket in flop_registry or func._overloadpacket in _FURTHER
        if not known:
            # In inference mode, composed operations such as `linear` arrive whole.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if func.is_view or not _moves(func):
            return result
        tensors = [
            each for each in tree_flatten((args, kwargs, result))[0] if isinstance(each, Tensor)
        ]
        if not tensors:
            return result
        moved = float(sum(each.numel() * each.element_size() for each in tensors))
        operations, kind = 0.0, _kind(func, tensors)
        if func._overloadpacket in _FURTHER:
            operations, numbers = _FURTHER[func._overloadpacket](*args, **kwargs)
            moved += numbers * tensors[0].element_size()
        elif func._overloadpacket in flop_registry:
            operations = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        self.work = self.work.plus(Work(**{kind: operations}, memory=moved, launches=1))
        return result


def _moves(func: Any) -> bool:
    """Whether an operation reads or writes the numbers of a tensor."""
    return func._overloadpacket not in (
        torch.ops.aten.detach,
        torch.ops.aten._unsafe_view,
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
    )


def _kind(func: Any, tensors: list[Tensor]) -> str:
    dtype = next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)
    if dtype == torch.float64:
        return "double"
    if dtype in (torch.bfloat16, torch.float16):
        return "half"
    if "convolution" in func._overloadpacket.__name__:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "single"
    return "single"


def counted(work: Callable[[], object]) -> Work:
    """The work of a function, which is run once."""
    with Counter() as counter:
        work()
    return counter.work


def network(name: str, device: str) -> nn.Module:
    """A frozen backbone with random weights that ends in its features.

    Args:
        name: library and model, as in the setting `backbone`.
        device: "meta" for shapes only.

    Raises:
        ImportError: if the library is not installed.
    """
    library, _, model = name.partition(":")
    with torch.device(device):
        if library == "timm":
            import timm

            made: nn.Module = timm.create_model(
                model, pretrained=False, num_classes=0, img_size=IMAGE
            )
        else:
            import torchvision

            made = torchvision.models.get_model(model, weights=None)
            # As in the product. The classifier of a new ViT is zero, and so would be its features.
            linear = [path for path, each in made.named_modules() if isinstance(each, nn.Linear)]
            made.set_submodule(linear[-1], nn.Identity())
    return made.eval().requires_grad_(False)


def of_image(name: str) -> Work:
    """What a backbone needs for one image of `IMAGE` pixels in a batch of `BATCH`, in bfloat16."""
    model, images = network(name, "meta").bfloat16(), (BATCH, 3, IMAGE, IMAGE)
    batch = torch.empty(images, device="meta", dtype=torch.bfloat16)
    with torch.inference_mode():
        work = counted(lambda: model(batch))
    return replace(work, link=batch.numel() * 4.0).times(1 / BATCH)


def second_moment(records: int, d: int) -> Work:
    """X^T X of records (n, d), float32."""
    x = torch.empty(records, d, device="meta")
    return counted(lambda: x.T @ x)


def decomposed(d: int, dtype: torch.dtype) -> Work:
    """Eigenvalues and eigenvectors of a covariance (d, d)."""
    covariance = torch.empty(d, d, device="meta", dtype=dtype)
    return counted(lambda: torch.linalg.eigh(covariance))


def table(limits: Limits) -> Iterator[tuple[str, str, float, str]]:
    """What is done, its unit, the most on paper, and what limits it."""
    for title, name in MODELS.items():
        seconds, slowest = limits.floor(of_image(name))
        yield f"{title}, {IMAGE} px", "images/s", 1 / seconds, slowest
    for d in (1280, 4096):
        seconds, slowest = limits.floor(second_moment(100_000, d))
        yield f"second moment of 100,000 records, d = {d:,}", "s", seconds, slowest
        for dtype in (torch.float32, torch.float64):
            seconds, slowest = limits.floor(decomposed(d, dtype))
            kind = str(dtype).removeprefix("torch.")
            yield f"eigenvectors, {kind}, d = {d:,}", "s", seconds, slowest


def main() -> None:
    """Write the table for an H100, as measured, into `RESULT`, and print it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        {"what": what, "unit": unit, "most": float(f"{most:.3g}"), "limited by": by}
        for what, unit, most, by in table(MEASURED)
    ]
    works = [
        {
            "model": title,
            "GFLOP an image": round(work.operations / 1e9, 1),
            "MB of memory an image": round(work.memory / 1e6),
            "kernels a batch": round(work.launches * BATCH),
        }
        for title, work in ((title, of_image(name)) for title, name in MODELS.items())
    ]
    limits = {name: value for name, value in vars(MEASURED).items() if name != "images"}
    content = {"device": "NVIDIA H100 80GB HBM3", "limits": limits, "rows": rows + works}
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    for row in rows + works:
        print(row)


if __name__ == "__main__":
    main()
