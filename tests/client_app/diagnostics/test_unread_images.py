"""A simulation of images that cannot be opened does not say that they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsurrogate.client_app.diagnostics.first_look import check_records
from fedsurrogate.common.run import Run, parse_run

SIZE = 12


def folders(root: Path, readable: int, broken: bytes) -> Run:
    for number in range(SIZE):
        file = root / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
        if number >= readable:
            file.write_bytes(broken % number if b"%d" in broken else broken + bytes([number]))
    return parse_run({"data": "imagefolder", "data-dir": str(root), "image-size": 8})


@pytest.mark.parametrize("broken", [b"x%d", b"\x89PNG\r\n", b"%d"])
def test_what_cannot_be_opened_is_not_used(broken: bytes, tmp_path: Path) -> None:
    numbers, losses, *_ = check_records(folders(tmp_path, 0, broken), 2)
    assert "12 found, 0 used, 12 left out" in numbers
    assert "UnidentifiedImageError" in losses


@pytest.mark.parametrize("readable", [1, 5, SIZE])
def test_one_image_is_enough_to_begin(readable: int, tmp_path: Path) -> None:
    run = folders(tmp_path, readable, b"x%d")
    assert "12 found, 12 to open" in check_records(run, 2)[0]
