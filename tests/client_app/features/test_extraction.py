from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load
from fedsurrogate.client_app.datasets.left_out import NoRecordsError
from fedsurrogate.client_app.features import device_processes, extraction
from fedsurrogate.client_app.features.device_processes import Part, in_parts, shape_of_images
from fedsurrogate.client_app.features.extraction import ShardWriter, extract
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


def _extract_in_process(folder: Path, queue: multiprocessing.Queue[bool]) -> None:
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


# What a record is: a number for an image of that grey, or why it is none.
GOOD, NO_IMAGE, NO_FEATURE, OTHER_SHAPE = "good", "no image", "no feature", "other shape"
KINDS = st.sampled_from([GOOD, GOOD, GOOD, NO_IMAGE, NO_FEATURE, OTHER_SHAPE])


class Fake:
    """A backbone of two numbers an image, its grey and twice that; it fails for the grey 255."""

    def __init__(self, device: str, own: bool) -> None:
        self.batches: list[list[int]] = []
        transform = OwnTransform(self.prepared)
        plain = load_backbone("pixels", "", 2, "cpu")
        self.backbone = Backbone("fake", 2, "f", transform if own else plain.preprocess,
                                 self.forward, torch.device(device))  # fmt: skip

    def prepared(self, image: Image.Image) -> Tensor:
        grey = image.getpixel((0, 0))
        value = grey[0] if isinstance(grey, tuple) else grey
        size = 3 if value == 254 else 2
        return torch.full((1, size, size), float(value or 0) / 255)

    def forward(self, images: Tensor) -> Tensor:
        greys = (images[:, 0, 0, 0] * 255).round()
        self.batches.append([int(each) for each in greys.tolist()])
        if (greys == 255).any():
            raise ValueError("no feature of this image")
        return torch.stack([greys, 2 * greys], 1)


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=40),
    cut=st.lists(st.integers(0, 40), max_size=3),
    device=st.sampled_from(["cpu", "meta"]),
    batch=st.sampled_from([1, 3, 40]),
    own=st.booleans(),
)
def test_each_readable_record_has_its_features_in_order_and_each_other_its_reason(
    kinds: list[str], cut: list[int], device: str, batch: int, own: bool
) -> None:
    count = len(kinds)
    if not own:
        kinds = [GOOD if each == OTHER_SHAPE else each for each in kinds]
    greys = {GOOD: None, NO_FEATURE: 255, OTHER_SHAPE: 254, NO_IMAGE: None}

    def opened(index: int, resize: int) -> Image.Image:
        assert resize == fake.backbone.preprocess.resize
        if kinds[index] == NO_IMAGE:
            raise OSError(f"cut at {index}")
        grey = greys[kinds[index]]
        return Image.new("RGB", (2, 2), (index if grey is None else grey,) * 3)

    fake = Fake(device, own)
    ends = sorted({0, count, *(min(each, count) for each in cut)})
    pieces = [range(a, b) for a, b in pairwise(ends)]
    found = list(in_parts(opened, pieces, fake.backbone, batch))
    rows = [row for part in found for row in part.rows]
    broken = dict(each for part in found for each in part.broken)
    assert rows == [row for row in range(count) if kinds[row] == GOOD]
    for part in found:
        assert part.features is None or part.features.dtype == torch.float16
        wanted = [[row, 2 * row] for row in part.rows]
        assert (part.features.tolist() if part.features is not None else []) == wanted
    reasons = {
        NO_IMAGE: lambda row: f"OSError: cut at {row}",
        NO_FEATURE: lambda row: "ValueError: no feature of this image",
        OTHER_SHAPE: lambda row: (
            "DataError: the backbone prepares it as (1, 3, 3), others as (1, 2, 2)"
        ),
    }
    assert broken == {row: reasons[kinds[row]](row) for row in range(count) if kinds[row] != GOOD}
    length = 8 if device == "cpu" else batch
    sizes = [
        min(length, len(piece) - at) for piece in pieces for at in range(0, len(piece), length)
    ]
    assert [len(part) for part in found] == sizes
    if device == "cpu":
        assert max(map(len, fake.batches), default=0) <= 2
    whole = [len(each) for each in fake.batches]
    if device == "meta" and not {NO_IMAGE, NO_FEATURE, OTHER_SHAPE} & set(kinds):
        assert whole == sizes


def test_only_an_own_transform_has_a_shape_which_an_image_of_noise_gives() -> None:
    assert shape_of_images(load_backbone("pixels", "", 4, "cpu")) is None
    seen: list[Any] = []

    def turned(image: Image.Image) -> Tensor:
        seen.append(np.asarray(image))
        return torch.zeros(2, image.height, image.width)

    backbone = replace(Fake("cpu", True).backbone, preprocess=OwnTransform(turned))
    assert shape_of_images(backbone) == (2, 96, 64)
    assert shape_of_images(backbone) == (2, 96, 64)
    np.testing.assert_array_equal(seen[0], seen[1])
    assert seen[0].std() > 60
    assert {int(seen[0].min()), int(seen[0].max())} == {0, 255}


@given(
    count=st.integers(0, 30),
    workers=st.integers(1, 3),
    ahead=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None)
def test_at_most_so_many_results_are_pending_and_they_come_in_order(
    count: int, workers: int, ahead: int
) -> None:
    asked: list[int] = []

    def pieces() -> Any:
        for at in range(count):
            asked.append(at)
            yield range(at, at + 1)

    given_ = 0
    for part in device_processes._in_order(
        lambda piece: Part(list(piece), None, []), pieces(), workers, ahead
    ):
        assert part.rows == [given_]
        given_ += 1
        assert len(asked) <= given_ - 1 + ahead
        assert len(asked) == min(count, given_ - 1 + ahead)
    assert given_ == count


SIZE = 4


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 14), data=st.data())
def test_shards_are_written_when_all_their_records_are_there_and_read_back_if_undamaged(
    count: int, data: st.DataObject
) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 999)))
    x = draw.normal(size=(count, 3)).astype(np.float16)
    state = draw.integers(0, 4, count)  # 0: broken; 1: not finite; others are good.
    firsts = list(range(0, count, SIZE))
    pieces = []
    for first in firsts:
        rows = list(range(first, min(first + SIZE, count)))
        at = data.draw(st.integers(0, len(rows)))
        pieces += [each for each in (rows[:at], rows[at:]) if each]
    pieces = [pieces[at] for at in data.draw(st.permutations(range(len(pieces))))]
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "SHARD", SIZE)
        folder = Path(place, "entry.partial")
        writer = ShardWriter.resumed(folder, count)
        assert (writer.done, [*map(list, writer.missing())]) == (
            0,
            [list(range(f, min(f + SIZE, count))) for f in firsts],
        )
        there: set[int] = set()
        known = False
        for rows in pieces:
            good = [row for row in rows if state[row]]
            part = Part(good, None, [(row, "why") for row in rows if not state[row]],
                        torch.from_numpy(x[good]) if good else None, (7, 8))  # fmt: skip
            writer.add(part, torch.tensor([bool(state[row] > 1) for row in good]) if good else None)
            there |= set(rows)
            known |= bool(good)
            full = [f for f in firsts if set(range(f, min(f + SIZE, count))) <= there]
            done = full if known else []
            assert [each.start for each in writer.missing()] == [f for f in firsts if f not in done]
            assert writer.done == sum(min(SIZE, count - f) for f in done)
        if not known:
            assert not folder.exists()
            return
        assert (writer.dimension, writer.size) == (3, (7, 8))
        ok = state > 1
        kept = np.where(ok[:, None], x, 0)
        again = ShardWriter.resumed(folder, count)
        assert (again.done, again.missing(), again.dimension, again.size) == (count, [], 3, (7, 8))
        np.testing.assert_array_equal(again.finish(), ok)
        np.testing.assert_array_equal(np.load(folder / "x.npy"), kept)
        # One changed bit of a feature costs the shard that has it.
        hit = data.draw(st.sampled_from(firsts))
        content = bytearray((folder / f"{hit}.npz").read_bytes())
        content[content.index(b"\n", content.index(b"descr")) + 1] ^= 1
        (folder / f"{hit}.npz").write_bytes(content)
        assert [each.start for each in ShardWriter.resumed(folder, count).missing()] == [hit]


def test_images_that_all_fail_are_refused_with_the_reason_of_the_first(tmp_path: Path) -> None:
    def opened(index: int, _: int) -> Image.Image:
        raise OSError(f"cut at {index}")

    fake = Fake("cpu", True)
    images = Dataset(
        "wards", torch.zeros(3, dtype=torch.int64), ("a",), torch.ones(3, dtype=torch.bool), "key"
    )
    words = "none of the 3 images of 'wards' can be read; reason for the first: OSError: cut at 0"
    with pytest.raises(NoRecordsError, match=words):
        extract(replace(images, opener=opened), fake.backbone, tmp_path)
    with pytest.raises(NoRecordsError, match="reason for the first: it is empty"):
        extract(replace(images, opener=opened, labels=images.labels[:0]), fake.backbone, tmp_path)

    def endless(found: Tensor) -> Tensor:
        return torch.full((len(found), 2), torch.nan)

    with pytest.raises(BackboneError, match="backbone 'fake': features that are NaN or beyond"):
        extract(
            replace(images, opener=lambda index, _: Image.new("RGB", (2, 2))),
            replace(fake.backbone, forward=endless),
            tmp_path,
        )
    assert not [each for each in tmp_path.rglob("*") if each.name.endswith((".npy", ".partial"))]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, pixels: Backbone) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache-dir"):
        extract(dataset_of(tmp_path / "d", [png(1)]), pixels, tmp_path / "file")
