"""Images to features part by part, and shards on disk, against plain loops over the records."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.datasets.left_out import NoRecordsError
from fedsurrogate.client_app.features import cache, device_processes
from fedsurrogate.client_app.features.cache import ShardWriter
from fedsurrogate.client_app.features.device_processes import Part, in_parts, shape_of_images
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.backbones.preprocessing import OwnTransform
from fedsurrogate.common.errors import BackboneError

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
        patch.setattr(cache, "SHARD", SIZE)
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


@pytest.mark.parametrize("bad", [0, 3, 19, 20, 21, 25])
@pytest.mark.parametrize("endless", [False, True])
def test_the_log_names_twenty_broken_images_and_counts_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: int, endless: bool
) -> None:
    """In the order of the records, whether they cannot be read or their features are not finite."""
    total, fake = 40, Fake("cpu", True)

    def opened(index: int, _: int) -> Image.Image:
        if index < bad and not endless:
            raise OSError(f"cut at {index}")
        return Image.new("RGB", (2, 2), (index,) * 3)

    def forward(images: Tensor) -> Tensor:
        found = fake.forward(images)
        return torch.where(found[:, :1] < bad, torch.inf, found) if endless else found

    images = Dataset("wards", torch.zeros(total, dtype=torch.int64), ("a",),
                     torch.ones(total, dtype=torch.bool), "key", opener=opened)  # fmt: skip
    with caplog.at_level("INFO", "fedsurrogate.site"):
        found = extract(images, replace(fake.backbone, forward=forward), tmp_path)
    assert found.ok.tolist() == [row >= bad for row in range(total)]
    assert found.x[bad:].tolist() == [[row, 2 * row] for row in range(bad, total)]
    assert not found.x[:bad].any()
    lines = [each.getMessage() for each in caplog.records]
    why = (
        (lambda row: "features that are NaN or beyond +-65504")
        if endless
        else (lambda row: f"OSError: cut at {row}")
    )
    wanted = [
        f"wards: record {row + 1} is broken and skipped ({why(row)})" for row in range(min(bad, 20))
    ]
    assert [line for line in lines if "is broken" in line] == wanted
    (last,) = (line for line in lines if " images in " in line)
    assert last.startswith(f"wards: features of {total - bad} images in ")
    assert last.endswith(f", {bad} broken images skipped")
    again = extract(images, replace(fake.backbone, forward=forward), tmp_path)
    assert (found.cached, again.cached) == (False, True)
    assert torch.equal(torch.as_tensor(again.x), torch.as_tensor(found.x))
    assert found.fingerprint == again.fingerprint == "f"


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
