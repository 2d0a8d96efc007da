"""What `site doctor` says of a backbone beside its own library: equal, other, or why not compared."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.library_output import compare_with_library
from fedsurrogate.common.backbones.networks import USUAL, BackboneOptions
from tests.common.backbones.test_published_forms import (
    CLIPS,
    NORMAL,
    published,
    siglip,
    spread,
    vit,
)


def compared(
    name: str, of: str = "", options: BackboneOptions = USUAL, folder: Path | None = None
) -> tuple[str, bool | None] | None:
    """The comparison of a backbone, with the files of another folder where one is given."""
    found = load_backbone(name, of, device="cpu", options=options)
    image = Image.effect_noise((50, 40), 90).convert("RGB")
    if folder is not None:
        found = replace(found, weights_path=str(folder))
    return compare_with_library(found, found.preprocess(image))


def test_equal_and_other_weights_are_told_apart(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        (tmp_path / name).mkdir()
        model = vit() if not seed else spread(vit(), seed)
        published(tmp_path / name, model)
    name = f"timm:local-dir:{tmp_path}/one"
    same = compared(name)
    assert same is not None
    assert same[1] is True
    # Kernels of other processors sum in another order.
    assert re.search(
        r"features of an image differ from those of timm by (0|\de-0\d) of the largest", same[0]
    )
    other = compared(name, folder=tmp_path / "two")
    assert other is not None
    assert other[1] is False


def test_a_model_of_open_clip_is_compared_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    config: dict[str, Any] = json.loads(json.dumps(CLIPS["of open_clip"]))
    content = {"model_cfg": config, "preprocess_cfg": dict(NORMAL)}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    clip = spread(open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False))
    save_file(clip.state_dict(), tmp_path / "open_clip_model.safetensors")
    name = f"open_clip:local-dir:{tmp_path}"
    found = compared(name)
    assert found is not None
    assert found[1] is True

    def refused(*args: object, **more: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refused)
    config["text_cfg"] = {
        "hf_model_name": "microsoft/none",
        "hf_tokenizer_name": "none",
        "proj": "mlp",
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    found = compared(name)
    assert found is not None
    assert found[1] is None
    assert "a connection" not in found[0]


def test_a_model_of_transformers_is_compared_where_that_is_installed(tmp_path: Path) -> None:
    siglip(tmp_path, both=False)
    found = compared(f"hf:local-dir:{tmp_path}")
    assert found is not None
    if find_spec("transformers") is None:
        assert found == ("not compared with transformers: it is not installed here", None)
    else:
        assert found[1] is True
