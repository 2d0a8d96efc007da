"""A private run leaves copies of an image out and another run does not: features are computed once."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run

COPIES = 4


@pytest.mark.parametrize("private_first", [True, False])
def test_copies_that_a_private_run_leaves_out_are_no_reason_to_compute_again(
    private_first: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    for name in ("no", "yes"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    for number in range(COPIES):
        # With two labels, so that a private run uses neither.
        shutil.copy(tmp_path / f"data/no/{number}.png", tmp_path / f"data/yes/copy-{number}.png")
    node = parse_node_config(
        {
            "data": "imagefolder",
            "data-dir": str(tmp_path / "data"),
            "state-dir": str(tmp_path / "state"),
            "cache-dir": str(tmp_path / "cache"),
        }
    )
    exact = {"classes": "no,yes", "image-size": 4, "device": "cpu"}
    runs = [exact | {"epsilon": 1.0, "delta": 1e-5}, exact]
    used = {}
    for settings in runs if private_first else runs[::-1]:
        found = load_site(parse_run(settings), node, 1000.0)
        used["epsilon" in settings] = len(found.train.labels) + len(found.test.labels)
    assert used[False] > used[True]
    folders = [each for each in (tmp_path / "cache/features").iterdir() if each.is_dir()]
    assert len(folders) == 1
