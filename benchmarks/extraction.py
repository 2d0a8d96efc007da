"""Feature extraction, images decoded and all, beside the bare forward pass on tensors already in memory.

Claim: at least 0.8 of the bare rate. MobileNetV2 on PACS photos; on a GPU also ViT-B/16 (random weights; speed only).
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from _report import report, shared

from client_app.data import Dataset, Source, load
from client_app.features import extract
from common.backbones import Backbone, load_backbone


def bare_rate(backbone: Backbone, images: torch.Tensor, batch_size: int) -> float:
    started = time.perf_counter()
    for batch in images.split(batch_size):  # type: ignore[no-untyped-call]
        features = backbone.forward(batch)
    float(features.sum())
    return len(images) / (time.perf_counter() - started)


def rates(backbone: Backbone, dataset: Dataset, count: int, batch_size: int, repeats: int) -> tuple[float, float, float]:
    """Median images/s of extraction and of the bare pass, run in turn, and the median of their ratios."""
    images = torch.stack([backbone.preprocess(dataset.open_image(index)) for index in range(count)])
    bare_rate(backbone, images[:batch_size], batch_size)
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            started = time.perf_counter()
            extract(dataset, backbone, Path(cache), batch_size)
            ours = len(dataset) / (time.perf_counter() - started)
        found.append((ours, bare_rate(backbone, images, batch_size)))
    return (
        statistics.median(ours for ours, _ in found),
        statistics.median(bare for _, bare in found),
        statistics.median(ours / bare for ours, bare in found),
    )


def main() -> None:
    folder = str(shared("data/pacs/photo-train.parquet").parent)
    weights = str(shared("weights/mobilenet_v2-imagenet.safetensors"))
    dataset = load(Source("parquet", folder, ("photo",)), seed=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbones = {"mobilenet_v2, 224 px": load_backbone("torchvision:mobilenet_v2", weights, 224, device)}
    rows = []
    for name, backbone in backbones.items():
        ours, bare, ratio = rates(backbone, dataset, 512, 64, repeats=3)
        rows.append((name, device, round(ours, 1), round(bare, 1), round(ratio, 3)))
    columns = ("backbone", "device", "extraction images/s", "bare forward images/s", "of the bare rate")
    report("extraction", f"feature extraction from {len(dataset)} JPEG images", columns, rows)


if __name__ == "__main__":
    main()
