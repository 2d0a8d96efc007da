from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision import models
from torchvision.transforms import functional

from fedsurrogate.client_app.governance.policy import DEFAULT
from fedsurrogate.client_app.governance.work_limits import check_size, check_work
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.costs import find_dimension
from fedsurrogate.common.errors import BackboneError, PolicyError
from fedsurrogate.common.run import parse_run

MOBILENET = "torchvision:mobilenet_v2"


@pytest.fixture
def weights(mobilenet_weights: Path) -> str:
    return str(mobilenet_weights)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height))


@pytest.mark.parametrize("size", [(300, 200), (224, 224), (97, 400), (227, 227)])
def test_preprocessing_is_the_published_preset(weights: str, size: tuple[int, int]) -> None:
    from torchvision.models import MobileNet_V2_Weights

    image = noise(*size)
    ours = load_backbone(MOBILENET, weights, device="cpu").preprocess(image)
    # At most one of 255 levels apart: both round once to whole pixels, but at different points.
    published = MobileNet_V2_Weights.IMAGENET1K_V1.transforms()(image)
    assert (ours - published).abs().max() < 1.5 / 255 / 0.22


def test_image_size_keeps_the_whole_of_a_square_image(weights: str) -> None:
    image = noise(227, 227)
    x = load_backbone(MOBILENET, weights, 96, "cpu").preprocess(image)
    expected = functional.to_tensor(image.resize((96, 96), Image.Resampling.BICUBIC))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(
        x, functional.normalize(expected, mean.tolist(), std.tolist()), atol=1e-5, rtol=0
    )


def test_features_of_an_image_do_not_depend_on_its_neighbours(weights: str) -> None:
    backbone = load_backbone(MOBILENET, weights, 64, "cpu")
    batch = torch.stack([backbone.preprocess(noise(80, 80, seed)) for seed in range(11)])
    together = backbone.forward(batch)
    assert together.shape == (11, 1280)
    torch.testing.assert_close(together[3:4], backbone.forward(batch[3:4]), atol=1e-4, rtol=1e-4)
    assert not together.is_inference()


def test_the_fingerprint_is_of_the_weights_without_the_head_and_of_the_size(
    weights: str, tmp_path: Path
) -> None:
    tensors = load_file(weights)
    file = tmp_path / "headless.safetensors"
    save_file({name: each for name, each in tensors.items() if "classifier" not in name}, file)
    fingerprint = load_backbone(MOBILENET, weights, device="cpu").fingerprint
    assert load_backbone(MOBILENET, str(file), device="cpu").fingerprint == fingerprint
    assert load_backbone(MOBILENET, weights, 128, "cpu").fingerprint != fingerprint


VERSIONED = ("mnasnet0_5", "densenet121", "inception_v3")


@pytest.mark.parametrize(
    "name", [VERSIONED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in VERSIONED[1:])]
)
def test_weights_with_a_version_are_loaded_from_every_file(name: str, tmp_path: Path) -> None:
    """MNASNet refuses a state dict whose version is not there. The oracle is torchvision itself."""
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "inception_v3" else {}
    own = models.get_model(name, weights=None, **options).eval()
    state = own.state_dict()
    plain = {key: value.clone() for key, value in state.items()}
    torch.save(state, tmp_path / "whole.pt")
    torch.save(plain, tmp_path / "plain.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in plain.items()}}, tmp_path / "module.pt")
    save_file(plain, tmp_path / "x.safetensors")
    loaded = [
        load_backbone(f"torchvision:{name}", str(tmp_path / file), device="cpu")
        for file in ("whole.pt", "plain.pt", "module.pt", "x.safetensors")
    ]
    assert len({backbone.fingerprint for backbone in loaded}) == 1
    seen: list[torch.Tensor] = []
    head = [module for module in own.modules() if isinstance(module, torch.nn.Linear)][-1]
    head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    x = loaded[0].preprocess(noise(80, 80))[None]
    with torch.no_grad():
        own(x)
    for backbone in loaded:
        torch.testing.assert_close(backbone.forward(x), seen[0], atol=1e-4, rtol=1e-4)


class Settings:
    """Hyperparameters, as a checkpoint of a training framework holds them."""


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": {}, "hyperparameters": Settings()},
        torch.nn.Linear(2, 2),
        {"args": Path("x")},
        {"weights": np.zeros(3)},
        {"optimizer": Settings, "epoch": 3},
    ],
    ids=["settings", "module", "path", "array", "class"],
)
def test_a_pickled_checkpoint_is_refused_in_one_whole_sentence(
    content: object, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(BackboneError) as refusal:
        load_backbone(MOBILENET, str(tmp_path / "x.pt"), device="cpu")
    text = str(refusal.value)
    assert "is a pickle of more than tensors" in text
    assert text.endswith("save model.state_dict() with torch.save, or as safetensors")
    assert "\x1b" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "is unknown; use 'pixels'"),
        ("torchvision:", "is unknown; use 'pixels'"),
        ("keras:resnet50", "is unknown; use 'pixels'"),
        ("torchvision:nonsense", "it has .*mobilenet_v2"),
        ("open_clip:ViT-B-32", "MODEL/TAG.*its tags are openai"),
        ("open_clip:nonsense/openai", "models are"),
        ("timm:resnet_nonsense", "similar names: resnet"),
    ],
)
def test_an_unknown_backbone_is_refused_with_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone(name, device="cpu")


@pytest.mark.slow
def test_open_clip_reads_the_image_tower_of_a_whole_model(tmp_path: Path) -> None:
    import open_clip

    torch.manual_seed(0)
    clip = open_clip.create_model("RN50", force_quick_gelu=True).eval()
    torch.save(clip.state_dict(), tmp_path / "clip.pt")
    backbone = load_backbone("open_clip:RN50/openai", str(tmp_path / "clip.pt"), device="cpu")
    assert backbone.dim == 1024
    x = backbone.preprocess(noise(300, 240))[None]
    with torch.no_grad():
        torch.testing.assert_close(backbone.forward(x), clip.encode_image(x), atol=1e-4, rtol=1e-3)


def test_timm_gives_pooled_features_without_the_head(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet18").eval()
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    backbone = load_backbone("timm:resnet18", str(tmp_path / "timm.safetensors"), 64, "cpu")
    x = backbone.preprocess(noise(100, 70))[None]
    assert backbone.dim == 512
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
    torch.testing.assert_close(backbone.forward(x), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dim"),
    [("resnet18", 512), ("efficientnet_b0", 1280), ("convnext_tiny", 768), ("vit_b_32", 768)],
)
def test_torchvision_models_give_what_enters_their_last_layer(
    tmp_path: Path, model: str, dim: int
) -> None:
    from torchvision.models import get_model

    save_file(get_model(model).state_dict(), tmp_path / "w.safetensors")
    backbone = load_backbone(f"torchvision:{model}", str(tmp_path / "w.safetensors"), device="cpu")
    assert backbone.dim == dim
    if model == "vit_b_32":
        with pytest.raises(BackboneError, match="cannot take images of 100 px"):
            load_backbone(f"torchvision:{model}", str(tmp_path / "w.safetensors"), 100, "cpu")


@pytest.mark.parametrize("at", ["its weights", "its first image"])
def test_a_backbone_that_a_gpu_cannot_hold_is_not_called_unsuitable(
    weights: str, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(torch.nn.Module, "to" if at == "its weights" else "__call__", full)
    with pytest.raises(
        BackboneError, match="does not fit into the free memory of the GPU"
    ) as error:
        load_backbone(MOBILENET, weights, 96, "cpu")
    assert "image-size" not in str(error.value)


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


NAMES = st.sampled_from(["pixels", "pixels:rgb"])


def made(name: str, side: int) -> int:
    """The dimension of the features that the backbone gives for an image in colour."""
    backbone = load_backbone(name, image_size=side)
    image = Image.new("RGB", (side + 3, side), (10, 200, 30))
    features = backbone.forward(backbone.preprocess(image)[None])
    assert backbone.dim == features.shape[1]
    return int(features.shape[1])


@given(NAMES, st.integers(2, 24))
@settings(max_examples=30)
def test_the_dimension_that_is_planned_is_that_of_the_features(name: str, side: int) -> None:
    run = parse_run({"backbone": name, "image-size": side})
    assert find_dimension(run.settings) == made(name, side)


@given(NAMES, st.integers(2, 24), st.integers(-1, 0))
@settings(max_examples=40)
def test_a_site_refuses_a_dimension_before_and_after_it_has_features_alike(
    name: str, side: int, spare: int
) -> None:
    dimension = made(name, side)
    run = parse_run({"backbone": name, "image-size": side, "classes": "a,b"})
    limits = DEFAULT.model_copy(update={"largest_dimension": dimension + spare})
    for check in (
        lambda: check_work(run.plan.work(2, 0), limits, run.settings),
        lambda: check_size(run.plan.work(2, dimension), limits, dimension, 2),
    ):
        if spare < 0:
            with pytest.raises(PolicyError, match="largest-dimension"):
                check()
        else:
            check()
