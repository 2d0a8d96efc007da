"""An image is prepared in two steps, of which the second may run on a GPU: every bit is that of
both in one on the processor.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsurrogate.common.backbones.preprocessing import Preprocessing

CHANNELS = st.tuples(*3 * [st.floats(-1, 1, width=32)])
DEVIATIONS = st.tuples(*3 * [st.floats(2**-10, 4, width=32)])


def in_numpy(prepare: Preprocessing, levels: np.ndarray) -> np.ndarray:
    """The normalised levels (h, w, 3), each step rounded to single precision."""
    std = np.array(prepare.std, dtype=np.float32)
    scaled = levels.astype(np.float32) * (1 / (255 * std))
    return scaled - np.array(prepare.mean, dtype=np.float32) / std


@settings(max_examples=40, deadline=None)
@given(
    mean=CHANNELS,
    std=DEVIATIONS,
    crop=st.sampled_from([0, 5, 8]),
    squash=st.booleans(),
    size=st.tuples(st.integers(8, 30), st.integers(8, 30)),
    seed=st.integers(0, 2**31),
)
def test_both_steps_of_the_preparation_give_the_bits_of_single_precision(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    crop: int,
    squash: bool,
    size: tuple[int, int],
    seed: int,
) -> None:
    prepare = Preprocessing(crop and crop + 1, crop, "bicubic", mean, std, squash)
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    pixels = prepare.pixels(image)
    assert pixels.dtype == torch.uint8, "a quarter of the bytes"
    assert pixels.permute(1, 2, 0).is_contiguous(), "channels last"
    expected = in_numpy(prepare, pixels.permute(1, 2, 0).numpy())
    assert np.array_equal(prepare(image).permute(1, 2, 0).numpy(), expected)
    batch = torch.stack([pixels, pixels]).contiguous(memory_format=torch.channels_last)
    normalised = prepare.normalised(batch)
    assert normalised.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(normalised[1], prepare(image)), "in a batch as alone"
    assert torch.equal(batch[0], pixels), "the pixels themselves stay"
