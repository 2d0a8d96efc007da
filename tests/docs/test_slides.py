"""Slides from the files of CLAM and TRIDENT, by the page's own lines, are bags of a site."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from tests.documents import DOCS, blocks


class _File:
    """A file of h5py, with what these tools store."""

    def __init__(self, file: Path) -> None:
        self.content = {"features": np.load(file.with_suffix(".npy"))}

    def __enter__(self) -> dict[str, Any]:
        return self.content

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "form"), [("pt", "nd"), ("pt", "1nd"), ("pt", "half"), ("h5", "1nd")]
)
def test_the_lines_of_the_page_make_bags_of_slides(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = ModuleType("h5py")
    h5py.__dict__["File"] = _File
    monkeypatch.setitem(sys.modules, "h5py", h5py)
    (lines,) = blocks(DOCS / "targets" / "bags.md", "py")
    own: dict[str, Any] = {}
    exec(lines, own)
    slides, means = [], []
    for number, patches in enumerate((3, 7, 1, 5)):
        x = torch.rand(patches, 6, generator=torch.Generator().manual_seed(number))
        file = tmp_path / f"slide-{number}.{kind}"
        if kind == "pt":
            torch.save(x[None] if form == "1nd" else x.half() if form == "half" else x, file)
        else:
            # CLAM writes one more dimension.
            np.save(file.with_suffix(".npy"), x[None].numpy())
        slides.append((file, number % 2))
        means.append(x.mean(0))
    data = tmp_path / "data"
    data.mkdir()
    own["write_slides"](slides, ["benign", "tumour"], "uni", data / "slides.safetensors")
    node = {
        "data": "safetensors",
        "data-dir": str(data),
        "bag-column": "slide",
        "unit": "bag",
        "cache-dir": str(tmp_path / "cache"),
        "state-dir": str(tmp_path / "state"),
    }
    private = {"epsilon": 1.0, "delta": 1e-5, "classes": "benign,tumour", "features.bag": "mean"}
    site = load_site(parse_run(private), parse_node_config(node), 100.0)
    assert site.fingerprint == "uni"
    assert site.train.labels.tolist() == [0, 1, 0, 1]
    near = {"atol": 1e-3, "rtol": 1e-3} if form == "half" else {}
    torch.testing.assert_close(site.train.features, torch.stack(means), **near)
