"""Features of JPEG files of 224 px on a processor: ours beside the bare forward pass on images in
memory, and beside loops around `torch.utils.data.DataLoader`.

Goal: at most 1.2 times the bare forward pass, decoding included. Each loop has two workers that decode
and prepare images (by Pillow with our preprocessing, or by `torchvision.io`), and a forward pass on
batches in inference mode, channels last: plain, compiled, or in bfloat16. Ours writes the cache on
disk too, computes each image alone so that its bits depend on nothing else, and opens files that are
not JPEG. Milliseconds are of the processor, of all processes, a thread for each; `--wall` takes the
time that passes, with all cores. Pieces of work take turns.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import BACKBONES, stored_images
from benchmarks.harness.timing import in_turn, ratio
from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.common.backbones.backbones import CPU_BATCH, Backbone, load_backbone, load_network
from fedsurrogate.common.backbones.networks import USUAL
from fedsurrogate.common.backbones.preprocessing import Preprocessing

SIZE, REPEATS, WORKERS, BARE = 224, 9, 2, "bare forward pass"


def processor_time() -> float:
    """Seconds of the processor, of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Files(torch.utils.data.Dataset[Tensor]):
    """Files of images as a user of torch reads them.

    Args:
        files: of the images.
        prepare: of the backbone.
        by_torchvision: whether torchvision decodes and resizes, and not Pillow.
    """

    def __init__(self, files: list[Path], prepare: Preprocessing, by_torchvision: bool) -> None:
        self._files, self._prepare, self._by_torchvision = files, prepare, by_torchvision

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        if not self._by_torchvision:
            from PIL import Image

            with Image.open(self._files[index]) as image:
                return self._prepare(image.convert("RGB"))
        from torchvision.io import ImageReadMode, decode_image
        from torchvision.transforms.v2.functional import resize

        pixels = decode_image(str(self._files[index]), ImageReadMode.RGB)
        sides = [self._prepare.crop, self._prepare.crop]
        return self._prepare.normalised(resize(pixels, sides, antialias=True))


def loop(
    files: Files, forward: Callable[[Tensor], Tensor], batch_size: int, half: bool
) -> Callable[[], Tensor]:
    """The features of files, by a DataLoader."""

    def work() -> Tensor:
        loader = DataLoader(files, batch_size, num_workers=WORKERS)
        kind = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
        with torch.inference_mode(), kind:
            return torch.cat(
                [
                    forward(batch.contiguous(memory_format=torch.channels_last)).float()
                    for batch in loader
                ]
            )

    return work


def works(
    backbone: Backbone, network: torch.nn.Module, folder: Path, count: int, compiled: bool
) -> dict[str, Callable[[], Any]]:
    """Pieces of work by name."""
    dataset = load(DataSource("imagefolder", str(folder), ("photos",)), seed=0)
    files = sorted(folder.rglob("*.jpg"))
    prepare = backbone.preprocess
    assert isinstance(prepare, Preprocessing)
    images = torch.stack([backbone.preprocess(dataset.open_image(row)) for row in range(count)])
    images = images.contiguous(memory_format=torch.channels_last)
    network = network.to(memory_format=torch.channels_last)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as cache:
            extract(dataset, backbone, Path(cache))

    def bare(size: int) -> Callable[[], None]:
        def work() -> None:
            with torch.inference_mode():
                for batch in torch.split(images, size):
                    network(batch)

        return work

    pillow, own = (Files(files, prepare, by_torchvision) for by_torchvision in (False, True))
    made = {
        "ours": ours,
        BARE: bare(1),
        f"bare, batches of {CPU_BATCH}": bare(CPU_BATCH),
        "bare, batches of 64": bare(64),
        "DataLoader, Pillow": loop(pillow, network, CPU_BATCH, half=False),
        "DataLoader, torchvision.io": loop(own, network, CPU_BATCH, half=False),
        "DataLoader, torchvision.io, bfloat16": loop(own, network, CPU_BATCH, half=True),
    }
    if compiled:
        # Processes that compile, and those of a DataLoader, would wait for each other for ever.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        faster = torch.compile(network, dynamic=False)
        made["DataLoader, torchvision.io, compiled"] = loop(own, faster, CPU_BATCH, half=False)
        made["DataLoader, torchvision.io, compiled, bfloat16"] = loop(own, faster, CPU_BATCH, True)
    return made


def backbones(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Titles, names and weights; those of ViT-B are random."""
    from safetensors.torch import save_file
    from torchvision.models import vit_b_16

    for each in BACKBONES.values():
        yield each.title, each.name, each.weights
    torch.manual_seed(0)
    save_file(vit_b_16().state_dict(), weights := folder / "vit_b_16.safetensors")
    yield "ViT-B/16", "torchvision:vit_b_16", weights


def main() -> None:
    parser: argparse.ArgumentParser = described(__doc__)
    parser.add_argument("--images", type=int, default=128, help="number of photos (default: 128)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns (default: 9)")
    parser.add_argument(
        "--only", default="", help="a part of a backbone's name; the others keep their rows"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile too, in minutes")
    parser.add_argument("--wall", action="store_true", help="wall time, on an idle machine")
    options = parser.parse_args()
    count = options.images
    clock = time.perf_counter if options.wall else processor_time
    if not options.wall:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        photos = folder / "images" / "photos" / "all"
        photos.mkdir(parents=True)
        encoded, _ = stored_images("data/pacs/photo-train.parquet", count)
        for index, image in enumerate(encoded):
            (photos / f"{index:05}.jpg").write_bytes(image)
        chosen = [each for each in backbones(folder) if options.only in each[1]]
        rows = kept_rows("extraction", lambda row: row[0] in {title for title, *_ in chosen})
        for title, name, weights in chosen:
            backbone = load_backbone(name, str(weights), SIZE, "cpu")
            network = load_network(name, str(weights), SIZE, USUAL).model
            made = works(backbone, network, folder / "images", count, options.compile)
            times = in_turn(made, options.repeats, warm=1, clock=clock)
            for work, seconds in times.items():
                least, median, most = min(seconds), statistics.median(seconds), max(seconds)
                each = (1000 * part / count for part in (least, median, most))
                rows.append((title, work, *each, count / median, ratio(seconds, times[BARE])))
    columns = ("backbone", "work", "least ms an image", "median", "most", "images/s", "over bare")
    report("extraction", f"Features of {count} JPEG files of {SIZE} px", columns, rows)


if __name__ == "__main__":
    main()
