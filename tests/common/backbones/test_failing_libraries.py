"""What libraries of backbones are asked for, what becomes of their presets, and the words where they
fail. The libraries are pretended.
"""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from fedsurrogate.common.backbones import backbones
from fedsurrogate.common.backbones.backbones import load_backbone, load_network
from fedsurrogate.common.backbones.networks import LoadedNetwork, NetworkRequest
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.errors import BackboneError

MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


class Failing(nn.Module):
    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error:
            raise self.error
        return x


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("too small. More"), r"cannot take images of 8 px \(too small. More\)"),
        (AssertionError("224"), r"cannot take images of 8 px \(224\); set image-size to 0"),
        (ValueError("odd"), r"cannot take images of 8 px \(odd\)"),
        (torch.OutOfMemoryError("2 GiB. GPU 0"), r"free memory of the GPU \(2 GiB\); free memory"),
        (None, r"returns shape \(1, 3, 8, 8\) for one image, not \(1, d\)"),
    ],
)
def test_a_model_that_cannot_take_an_image_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, reason: str
) -> None:
    def tiny(request: NetworkRequest) -> LoadedNetwork:
        assert (request.model, dict(request.weights)) == ("net", {})
        return LoadedNetwork(Failing(error), Preprocessing(8, 8))

    monkeypatch.setitem(backbones._LIBRARIES, "timm", tiny)
    with pytest.raises(BackboneError, match=f"backbone 'timm:net' .*{reason}"):
        load_backbone("timm:net", device="cpu")


def test_a_package_that_a_library_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(request: NetworkRequest) -> LoadedNetwork:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setitem(backbones._LIBRARIES, "open_clip", lacking)
    reason = "'open_clip:a/b' needs a package that is not installed here: No module named 'transf"
    with pytest.raises(BackboneError, match=reason):
        load_network("open_clip:a/b")


def pretended(monkeypatch: pytest.MonkeyPatch, library: str, made: Any) -> list[dict[str, Any]]:
    """Replace a library by one whose models are `made`, or raise it; returns what it is asked for."""
    asked: list[dict[str, Any]] = []

    def create(name: str, **options: Any) -> Any:
        asked.append({"name": name, **options})
        if library == "open_clip":
            asked[-1]["quiet"] = logging.root.manager.disable
        if isinstance(made, BaseException):
            raise made
        return made

    if library == "torchvision":
        monkeypatch.setattr(models, "get_model", create)
    elif library == "timm":
        config = {"input_size": (3, 9, 8), "crop_pct": 0.5, "interpolation": "bicubic"}
        fake: Any = SimpleNamespace(
            is_model=lambda name: name == "net",
            list_models=lambda: ["net"],
            create_model=create,
            models=SimpleNamespace(VisionTransformer=type(None)),
            data=SimpleNamespace(
                resolve_model_data_config=lambda model: (
                    config | {"mean": MEAN, "std": STD} | getattr(model, "more", {})
                )
            ),
        )
        monkeypatch.setitem(sys.modules, "timm", fake)
        monkeypatch.setitem(sys.modules, "timm.models", fake.models)
    else:
        published = {"mean": MEAN, "std": STD, "quick_gelu": 1, "url": "x"}
        fake = SimpleNamespace(
            list_models=lambda: ["net", "bare"],
            list_pretrained_tags_by_model=lambda name: ["one", "two"] if name == "net" else [],
            get_pretrained_cfg=lambda name, tag: published if tag == "one" else {"mean": MEAN},
            create_model=create,
            get_model_preprocess_cfg=lambda clip: clip.config,
        )
        monkeypatch.setitem(sys.modules, "open_clip", fake)
    return asked


@pytest.mark.parametrize("library", ["torchvision:resnet18", "timm:net", "open_clip:net/one"])
@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_weights_that_cannot_be_fetched_are_asked_for_as_a_file(
    monkeypatch: pytest.MonkeyPatch, library: str, kind: type[Exception]
) -> None:
    asked = pretended(monkeypatch, library.split(":")[0], kind("no\n  route. Traceback"))
    before = logging.root.manager.disable
    with pytest.raises(BackboneError) as refusal:
        load_network(library)
    assert str(refusal.value) == (
        f"cannot fetch the weights of '{library}' (no route); on a machine without internet put "
        "them in a file and name it in weights-path; a hospital names it in its node-config"
    )
    assert len(asked) == 1
    assert logging.root.manager.disable == before
