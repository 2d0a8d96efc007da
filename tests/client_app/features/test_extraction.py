import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load
from fedsurrogate.client_app.features import extraction
from fedsurrogate.client_app.features.device_processes import in_parts
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.backbones.preprocessing import OwnTransform, Preprocessing
from fedsurrogate.common.errors import BackboneError, DataError
from tests.samples import Samples


def png(level: int, size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("L", (size, size), level).save(file, "PNG")
    return file.getvalue()


def dataset_of(folder: Path, images: list[bytes]) -> Dataset:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"image": images, "label": [0] * len(images)}), folder / "x.parquet")
    return load(DataSource("parquet", str(folder)), seed=0)


@pytest.fixture
def pixels() -> Backbone:
    return load_backbone("pixels", device="cpu")


@pytest.mark.parametrize(("image_size", "other"), [(0, True), (8, False)])
def test_pixels_of_another_size_are_another_backbone(
    tmp_path: Path, image_size: int, other: bool
) -> None:
    found = []
    for side in (8, 28):
        data = dataset_of(tmp_path / str(side), [png(9, side)])
        found.append(
            extract(
                data,
                load_backbone("pixels", image_size=image_size, device="cpu"),
                tmp_path / "cache",
            )
        )
    assert (found[0].fingerprint != found[1].fingerprint) == other


def test_a_second_call_reads_the_cache(tmp_path: Path, pixels: Backbone) -> None:
    dataset = dataset_of(tmp_path / "d", [png(i) for i in range(9)])
    first, second = extract(dataset, pixels, tmp_path), extract(dataset, lambda: pixels, tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert torch.equal(first.x, second.x)
    assert not extract(dataset, load_backbone("pixels:rgb", device="cpu"), tmp_path).cached


def test_an_entry_is_on_disk_before_its_shards_go(
    tmp_path: Path, pixels: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, sync, remove = set[int](), os.fsync, Path.unlink

    def fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "0.npz":
            assert {
                (path.parent / name).stat().st_ino for name in ("x.npy", "ok.npy", "digests.json")
            } <= flushed
            flushed.clear()
        remove(path, missing_ok)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "unlink", unlink)
    extract(dataset_of(tmp_path / "d", [png(1)] * 3), pixels, tmp_path)
    assert not flushed


def test_changed_images_are_computed_again(tmp_path: Path, pixels: Backbone) -> None:
    extract(dataset_of(tmp_path / "d", [png(1)] * 3), pixels, tmp_path)
    found = extract(dataset_of(tmp_path / "d", [png(200)] * 3), pixels, tmp_path)
    assert not found.cached
    assert found.x.float().mean() > 0.7


@pytest.mark.parametrize("name", ["x.npy", "ok.npy", "digests.json"])
@pytest.mark.parametrize(
    "harm", [lambda old: b"", lambda old: old[:-1], lambda old: old[:-1] + b"\x07"]
)
def test_a_damaged_entry_is_computed_again(
    tmp_path: Path, pixels: Backbone, name: str, harm: Callable[[bytes], bytes]
) -> None:
    dataset = dataset_of(tmp_path / "d", [png(i) for i in range(9)])
    extract(dataset, pixels, tmp_path)
    [file] = (tmp_path / "features").glob(f"*/{name}")
    file.write_bytes(harm(file.read_bytes()))
    found = extract(dataset, pixels, tmp_path)
    assert not found.cached
    assert torch.equal((found.x[:, 0].float() * 255).round(), torch.arange(9.0))
    assert extract(dataset, pixels, tmp_path).cached


def test_a_failed_computation_leaves_no_entry(tmp_path: Path, pixels: Backbone) -> None:
    dataset = dataset_of(tmp_path / "d", [png(i) for i in range(9)])

    def fail(batch: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(dataset, replace(pixels, forward=fail), tmp_path)
    assert not [path for path in (tmp_path / "features").iterdir() if path.is_dir()]
    assert not extract(dataset, pixels, tmp_path).cached


@pytest.mark.parametrize(("odd", "batch_size"), [(5, 8), (40, 8), (5, 1), (49, 64)])
def test_images_of_several_sizes_need_an_image_size(
    tmp_path: Path, pixels: Backbone, odd: int, batch_size: int
) -> None:
    dataset = dataset_of(tmp_path / "d", [png(i, size=6 if i == odd else 4) for i in range(50)])
    with pytest.raises(BackboneError, match=r"of (4x4 and of 6x6|6x6 and of 4x4) px.*image-size"):
        extract(dataset, pixels, tmp_path, batch_size)
    assert extract(dataset, load_backbone("pixels", image_size=4, device="cpu"), tmp_path).ok.all()


def test_precomputed_features_need_no_backbone_and_no_cache(tmp_path: Path) -> None:
    def never() -> Backbone:
        raise BackboneError("no backbone is needed")

    x = torch.randn(4, 3)
    labels = torch.zeros(4, dtype=torch.int64)
    dataset = Dataset("x", labels, ("a",), labels == 0, "key", features=x)
    found = extract(dataset, never, tmp_path)
    assert found.x is x
    assert found.fingerprint == "features-3"
    assert not list(tmp_path.iterdir())


def _extract_in_process(folder: Path, queue: "multiprocessing.Queue[bool]") -> None:
    dataset = load(DataSource("parquet", str(folder / "d")), seed=0)
    queue.put(extract(dataset, load_backbone("pixels", device="cpu"), folder).cached)


@pytest.mark.slow
def test_processes_compute_an_entry_once(tmp_path: Path) -> None:
    dataset_of(tmp_path / "d", [png(i % 256, size=64) for i in range(500)])
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[bool] = context.Queue()
    workers = [
        context.Process(target=_extract_in_process, args=(tmp_path, queue)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    assert sorted(queue.get(timeout=600) for _ in workers) == [False, True, True]
    for worker in workers:
        worker.join()


@pytest.mark.parametrize("count", [1, 2, 11])
def test_on_a_processor_no_image_is_computed_with_another(
    tmp_path: Path, pixels: Backbone, count: int
) -> None:
    """Of a batch, the shape alone would change the last digits. Every image lies where fresh memory
    does, too.
    """
    seen = set()

    def forward(batch: torch.Tensor) -> torch.Tensor:
        seen.add((len(batch), batch.storage_offset(), batch.untyped_storage().nbytes()))
        return batch.flatten(1)

    images = [png(at, 5) for at in range(count)]
    extract(dataset_of(tmp_path / "d", images), replace(pixels, forward=forward), tmp_path)
    assert seen == {(1, 0, 4 * 5 * 5 * 3)} or seen == {(1, 0, 4 * 5 * 5)}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, pixels: Backbone) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache-dir"):
        extract(dataset_of(tmp_path / "d", [png(1)]), pixels, tmp_path / "file")


@pytest.mark.slow
def test_bits_do_not_depend_on_cores_threads_or_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mobilenet_weights: Path
) -> None:
    noise = torch.randint(
        0, 256, (37, 64, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    files = [io.BytesIO() for _ in noise]
    for file, pixels in zip(files, noise.numpy(), strict=True):
        Image.fromarray(pixels).save(file, "PNG")
    images = [file.getvalue() for file in files]
    images[5] = b"broken"
    dataset = dataset_of(tmp_path / "d", images)
    backbone = load_backbone("torchvision:mobilenet_v2", str(mobilenet_weights), 64, "cpu")
    threads = torch.get_num_threads()
    found = []
    try:
        for cores, used, batch_size in ((1, 1, 64), (2, 2, 64), (5, 3, 7), (3, 2, 1)):
            monkeypatch.setattr(
                os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False
            )
            torch.set_num_threads(used)
            found.append(extract(dataset, backbone, tmp_path / f"{cores}", batch_size).x)
            assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, found[0]) for x in found)
    assert found[0][36].abs().sum() > 0


def test_threads_started_afterwards_use_as_many_cores_as_before(
    tmp_path: Path, pixels: Backbone
) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        dataset = dataset_of(tmp_path / "d", [png(200)] * 30)
        with pytest.raises(BackboneError):
            extract(
                dataset, replace(pixels, forward=lambda batch: batch.flatten(1) * 1e6), tmp_path
            )
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_real_images_give_the_published_features(tmp_path: Path, samples: Samples) -> None:
    weights = samples("weights/mobilenet_v2-imagenet.safetensors")
    table = pq.read_table(samples("data/pacs/photo-test.parquet")).slice(0, 32)
    pq.write_table(table, tmp_path / "photo.parquet")
    dataset = load(DataSource("parquet", str(tmp_path)), seed=0)
    found = extract(
        dataset, load_backbone("torchvision:mobilenet_v2", str(weights), 224, "cpu"), tmp_path
    )
    published = load_file(samples("features/pacs-photo-test.safetensors"))
    assert torch.equal(dataset.labels, published["y"][:32])
    for ours, theirs in zip(
        found.x.float().numpy(), published["x"][:32].float().numpy(), strict=True
    ):
        assert np.corrcoef(ours, theirs)[0, 1] > 0.99


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_decoding_threads_take_no_further_threads_and_the_caller_keeps_its_own(
    pixels: Backbone, device: str
) -> None:
    """On 16 cores each of 16 threads would have 16 more, for copies of one image."""
    decoding: set[int] = set()

    def opened(index: int, _: int) -> Image.Image:
        decoding.add(torch.get_num_threads())
        if index == 40:
            raise KeyboardInterrupt
        return Image.new("L", (2, 2), index)

    elsewhere = replace(pixels, device=torch.device(device), forward=lambda batch: batch.flatten(1))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in in_parts(opened, [range(20)], elsewhere, 4):
            assert torch.get_num_threads() == 3
        parts = in_parts(opened, [range(40)], elsewhere, 4)
        next(parts)
        parts.close()
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyboardInterrupt):
            list(in_parts(opened, [range(41)], elsewhere, 4))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert decoding == {1}


@pytest.mark.parametrize("own", [False, True])
def test_a_gpu_gets_pixels_and_normalises_them_itself(own: bool) -> None:
    """Bit for bit what the processor does, but from an own transform what that returns."""
    seen: list[torch.dtype] = []
    preprocess = Preprocessing(6, 5, "bilinear", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))

    class Watched(Preprocessing):
        def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
            seen.append(pixels.dtype)
            return super().normalised(pixels)

    watched = Watched(**vars(preprocess))
    here = Backbone(
        *("watched", 75, "f", OwnTransform(preprocess) if own else watched),
        *(lambda batch: batch.flatten(1), torch.device("cpu")),
    )
    # Neither a CPU nor CUDA, which is not here.
    there = replace(here, device=torch.device("meta"))

    def opened(index: int, _: int) -> Image.Image:
        noise = np.random.default_rng(index).integers(0, 256, (9, 12, 3), dtype=np.uint8)
        return Image.fromarray(noise)

    found = [
        torch.cat([part.features for part in in_parts(opened, [range(11)], each, 4)])  # type: ignore[misc]
        for each in (here, there)
    ]
    assert torch.equal(*found)
    assert seen == ([] if own else 11 * [torch.uint8] + 3 * [torch.uint8])


GIB = 2**30


@pytest.mark.parametrize(
    ("device", "cores", "gpu_gib", "host_gib", "expected"),
    [
        ("cuda:1", 16, 70, 120, ("cuda:1",) * 4),
        ("cuda", 16, 70, 120, ("cuda:0", "cuda:1") * 2),
        ("cuda", 64, 70, 120, ("cuda:0", "cuda:1") * 8),
        ("cuda:0", 7, 70, 120, ("cuda:0",)),
        ("cuda:0", 16, 14, 120, ("cuda:0",) * 2),
        ("cuda:0", 16, 6, 120, ("cuda:0",)),
        ("cuda:0", 16, 0, 120, ("cuda:0",)),
        ("cuda:0", 16, 70, 13, ("cuda:0",) * 3),
        ("cuda", 16, 70, 13, ("cuda:0", "cuda:1")),
        ("cpu", 64, 70, 120, ()),
    ],
)
def test_a_gpu_has_as_many_processes_as_cores_can_feed_it_and_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    cores: int,
    gpu_gib: int,
    host_gib: int,
    expected: tuple[str, ...],
) -> None:
    """The backbone has 2 GiB, so a process needs 7 on its GPU, and 4 on the host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gpu_gib * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * GIB)
    monkeypatch.setattr(extraction, "usable_cores", lambda: cores)
    monkeypatch.setattr(extraction, "available_memory", lambda: host_gib * GIB)
    assert extraction._places(torch.device(device), 1000) == expected
    assert extraction._places(torch.device(device), 3) == ()
