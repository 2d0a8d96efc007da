"""Speed of feature extraction with image decoding, compared with the bare forward pass on tensors
in memory.

Claim: at least 0.8 of the bare rate. MobileNetV2 on PACS photos; on a GPU also ViT-B/16 (random
weights; speed only). On a CPU the bare pass runs in two ways: with all threads in every pass, which
is torch's default, and with one thread per worker, as in extraction.
"""

import math
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import shared
from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone


def bare_rate(backbone: Backbone, images: torch.Tensor, batch_size: int) -> float:
    started = time.perf_counter()
    for batch in images.split(batch_size):  # type: ignore[no-untyped-call]
        features = backbone.forward(batch)
    float(features.sum())
    return len(images) / (time.perf_counter() - started)


def bare_rate_of_workers(backbone: Backbone, images: torch.Tensor) -> float:
    """Images per second with one thread per worker and the small batches that extraction uses on a
    CPU.
    """

    def work(batch: torch.Tensor) -> None:
        torch.set_num_threads(1)
        backbone.forward(batch)

    threads = torch.get_num_threads()
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, torch.split(images, 1)))
    rate = len(images) / (time.perf_counter() - started)
    torch.set_num_threads(threads)
    return rate


def rates(
    backbone: Backbone, dataset: Dataset, count: int, batch_size: int, repeats: int
) -> list[float | None]:
    """Median images per second of extraction and both bare passes, run in turn, and the medians of
    their ratios.
    """
    images = torch.stack([backbone.preprocess(dataset.open_image(index)) for index in range(count)])
    images = images.contiguous(memory_format=torch.channels_last)
    bare_rate(backbone, images[:batch_size], batch_size)
    turns = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            started = time.perf_counter()
            extract(dataset, backbone, Path(cache), batch_size)
            ours = len(dataset) / (time.perf_counter() - started)
        bare = bare_rate(backbone, images, batch_size)
        alone = (
            bare_rate_of_workers(backbone, images)
            if backbone.device.type == "cpu"
            else float("nan")
        )
        turns.append((ours, bare, alone, ours / bare, ours / alone))
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    return [None if math.isnan(median) else round(median, 3) for median in medians]


def main() -> None:
    described(__doc__).parse_args()
    folder = str(shared("data/pacs/photo-train.parquet").parent)
    weights = str(shared("weights/mobilenet_v2-imagenet.safetensors"))
    dataset = load(DataSource("parquet", folder, ("photo",)), seed=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone = load_backbone("torchvision:mobilenet_v2", weights, 224, device)
    rows = [("mobilenet_v2, 224 px", device, *rates(backbone, dataset, 512, 64, repeats=5))]
    workers = "bare, one thread a worker"
    columns = (
        "backbone",
        "device",
        "extraction images/s",
        "bare images/s",
        workers,
        "of bare",
        f"of {workers}",
    )
    report("extraction", f"feature extraction from {len(dataset)} JPEG images", columns, rows)


if __name__ == "__main__":
    main()
