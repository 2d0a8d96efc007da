"""Backbones in the forms in which they are published: small stand-ins with the keys and configurations
of the published ones. The oracle of each is its own library, on the pixels of a picture.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import SwiGLUPacked
from torch import Tensor, nn

from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.backbones.networks import BackboneOptions
from fedsurrogate.common.errors import BackboneError

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
# Keywords that those who published it ask users to give, and the class token as UNI, Virchow do it.
GATED = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 5.3375}
NORMAL = {"mean": (0.7, 0.6, 0.5), "std": (0.2, 0.3, 0.25)}
DATA = {"input_size": (3, 32, 32), "interpolation": "bicubic", "crop_pct": 1.0, **NORMAL}
VIT = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """A photograph that scikit-learn has, in a size of which the preset keeps nearly all."""
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("flower.jpg")).resize((75, 50))


def spread(model: nn.Module, seed: int = 0) -> Any:
    """The model with weights that all matter: published ones are trained, and fresh ones have zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size = 1.2 / weight[0].numel() ** 0.5 if weight.ndim > 1 else 0.1
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            weight.copy_(centre + size * torch.randn(weight.shape, generator=generator))
    return model.eval()


def vit(**options: Any) -> Any:
    return spread(timm.create_model(VIT, num_classes=0, **SMALL | options))


def published(folder: Path, model: Any, **options: Any) -> Path:
    """A folder as timm publishes it, with these arguments besides `SMALL` in its configuration."""
    own = SMALL | options
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    cfg = {**DATA, "num_classes": 0, "fixed_input_size": True, "classifier": "head"}
    cfg |= {"first_conv": "patch_embed.proj"}
    content = {"architecture": VIT, "num_classes": 0, "num_features": 24, "model_args": own}
    content |= {"global_pool": own.get("global_pool", "token"), "pretrained_cfg": cfg}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def same(
    found: Backbone, picture: Image.Image, wanted: Callable[[Tensor], Tensor], preset: Any = None
) -> None:
    """Features are the library's own of the same pixels, and the pixels those of its own preset."""
    x = found.preprocess(picture)
    with torch.no_grad():
        expected = wanted(x[None])
    assert found.dim == expected.shape[1]
    torch.testing.assert_close(found.forward(x[None]), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.01
    if preset is not None:
        # At most a level apart: both round to whole pixels, at other points. Of an image of the right
        # size nothing is rounded.
        assert (x - preset(picture)).abs().max() < 1.6 / 255 / min(NORMAL["std"])
        sized = picture.resize((found.preprocess.resize,) * 2)
        with torch.no_grad():
            expected = wanted(preset(sized)[None])
        mine = found.forward(found.preprocess(sized)[None])
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


FORMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "layer scale that no file names (UNI)": ({"init_values": 1e-5}, ("init_values",)),
    "layer scale": ({"init_values": 1e-5, "dynamic_img_size": True}, ()),
    "registers (DINOv2)": (
        {"init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True},
        ("reg_tokens", "no_embed_class", "init_values"),
    ),
    "gated layers (UNI2, Virchow)": (
        {"init_values": 1e-5, "reg_tokens": 8, "no_embed_class": True, **GATED},
        ("mlp_layer", "act_layer", "mlp_ratio"),
    ),
    "mean of patches": ({"global_pool": "avg", "fc_norm": False}, ()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_timm_gives_the_features_of_timm(
    tmp_path: Path, picture: Image.Image, form: str, safe: bool
) -> None:
    options, left_out = FORMS[form]
    model = vit(**options)
    stated = {key: value for key, value in options.items() if key not in left_out}
    published(tmp_path, model, **stated)
    (tmp_path / ("pytorch_model.bin" if safe else "model.safetensors")).unlink()
    found = load_backbone(f"timm:local-dir:{tmp_path}", device="cpu")
    preset = timm.data.create_transform(**DATA, is_training=False)
    same(found, picture, model, preset)
    pooling = "avg" if "fc_norm" in options else "token"
    assert found.in_words == (
        f"timm:{VIT}, pooling {pooling}, images of 32 px (bicubic, mean 0.7,0.6,0.5, std 0.2,0.3,0.25), "
        "24 features, "
    )
    if not left_out:
        oracle = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        same(found, picture, oracle, preset)


def test_a_plain_name_takes_the_configuration_beside_its_file(
    tmp_path: Path, picture: Image.Image
) -> None:
    model = vit(init_values=1e-5)
    published(tmp_path, model)
    file = str(tmp_path / "model.safetensors")
    beside = load_backbone(f"timm:{VIT}", file, device="cpu")
    same(beside, picture, model)
    folder = load_backbone("timm:local-dir:anywhere", str(tmp_path), device="cpu")
    assert folder.fingerprint == beside.fingerprint
    with pytest.raises(BackboneError, match=f"is of '{VIT}'; write timm:{VIT}, or remove the file"):
        load_backbone("timm:resnet18", file)


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "backbone.", "model.", "encoder.", "teacher.", "module.encoder.", "student.backbone."],
)  # fmt: skip
@pytest.mark.parametrize("outer", ["", "state_dict", "model", "teacher"])
def test_a_checkpoint_of_a_training_script_is_read_by_the_networks_own_names(
    tmp_path: Path, picture: Image.Image, prefix: str, outer: str
) -> None:
    model = vit()
    published(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    weights: dict[str, Any] = {f"{prefix}{key}": each for key, each in model.state_dict().items()}
    other = "" if prefix == "" else prefix.split(".")[0] + "_"
    weights |= {f"{other}head.mlp.0.weight": torch.ones(3, 24), "fc.bias": torch.ones(3)}
    content = {outer: weights, "epoch": 3, "optimizer": {"lr": torch.ones(1)}} if outer else weights
    torch.save(content, tmp_path / "pytorch_model.bin")
    found = load_backbone(f"timm:local-dir:{tmp_path}", device="cpu")
    same(found, picture, model)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    plain = load_backbone(f"timm:local-dir:{tmp_path}", device="cpu")
    assert plain.fingerprint == found.fingerprint


def test_two_networks_in_one_file_are_refused(tmp_path: Path) -> None:
    published(tmp_path, vit())
    (tmp_path / "model.safetensors").unlink()
    parts = {name: dict(vit().state_dict()) for name in ("student", "teacher")}
    torch.save(parts, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        BackboneError, match=r"has two networks, 'student.' and 'teacher.'; save the"
    ):
        load_backbone(f"timm:local-dir:{tmp_path}")


@pytest.mark.parametrize("registers", [0, 4])
def test_a_checkpoint_of_dinov2_has_facebooks_own_names(
    tmp_path: Path, picture: Image.Image, registers: int
) -> None:
    options = {"init_values": 1e-5, "reg_tokens": registers, "no_embed_class": registers > 0}
    model = vit(**options)
    published(tmp_path, model, init_values=1e-5)
    weights = {**model.state_dict(), "mask_token": torch.ones(1, 24)}
    if registers:
        weights["register_tokens"] = weights.pop("reg_token")
        own = torch.ones(1, 1, 24)
        weights["cls_token"] = weights["cls_token"] - own
        weights["pos_embed"] = torch.cat([own, weights["pos_embed"]], 1)
    save_file(weights, tmp_path / "model.safetensors")
    same(load_backbone(f"timm:local-dir:{tmp_path}", device="cpu"), picture, model)


@pytest.mark.parametrize("pooling", ["cls", "mean", "both"])
def test_tokens_are_pooled_as_the_run_says_where_no_file_does(
    tmp_path: Path, picture: Image.Image, pooling: Any
) -> None:
    """Virchow's configuration returns all tokens."""
    model = vit(global_pool="", reg_tokens=2, no_embed_class=True)
    published(tmp_path, model, global_pool="", reg_tokens=2, no_embed_class=True)
    name = f"timm:local-dir:{tmp_path}"
    refusal = (
        "returns 19 tokens of 24 numbers .* set features.pooling to 'cls' .* 'mean' .* or 'both'"
    )
    with pytest.raises(BackboneError, match=refusal):
        load_backbone(name, device="cpu")

    def wanted(x: Tensor) -> Tensor:
        tokens = model(x)
        parts = {"cls": tokens[:, 0], "mean": tokens[:, 3:].mean(1)}
        return parts[pooling] if pooling in parts else torch.cat([*parts.values()], 1)

    found = load_backbone(name, device="cpu", options=BackboneOptions(pooling=pooling))
    same(found, picture, wanted)
    others = {"cls", "mean", "both"} - {pooling}
    assert found.fingerprint not in {
        load_backbone(name, device="cpu", options=BackboneOptions(pooling=each)).fingerprint  # type: ignore[arg-type]
        for each in others
    }


def test_mean_and_std_of_the_run_take_the_place_of_the_files(tmp_path: Path) -> None:
    published(tmp_path, vit())
    name, image = f"timm:local-dir:{tmp_path}", Image.new("RGB", (32, 32), (51, 102, 255))
    options = BackboneOptions(mean=(0.0, 0.2, 1.0), std=(0.1, 0.2, 0.5))
    found = load_backbone(name, device="cpu", options=options)
    assert found.preprocess(image)[:, 0, 0].tolist() == pytest.approx([2, 1, 0], abs=1e-6)
    assert found.fingerprint != load_backbone(name, device="cpu").fingerprint


def test_the_size_of_images_is_never_guessed(tmp_path: Path, picture: Image.Image) -> None:
    """A file without a configuration, with positions for another size than the name's."""
    model = spread(timm.create_model("test_vit", num_classes=0, img_size=64))
    name, file = "timm:test_vit", tmp_path / "w.safetensors"
    save_file(model.state_dict(), file)
    refusal = r"positions for images of 64 px, .* takes 160 px; set image-size to one of the two"
    with pytest.raises(BackboneError, match=refusal):
        load_backbone(name, str(file), device="cpu")
    same(load_backbone(name, str(file), 64, device="cpu"), picture, model)
    larger = timm.create_model("test_vit", num_classes=0, img_size=96).eval()
    convert = timm.models.vision_transformer.checkpoint_filter_fn
    larger.load_state_dict(convert(dict(model.state_dict()), larger))
    same(load_backbone(name, str(file), 96, device="cpu"), picture, larger)


# The Hugging Face hub's cache.


def in_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, repository: str, folder: Path) -> None:
    """The folder's files as huggingface_hub keeps those that it has fetched."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    place = cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / ("a" * 40))
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)


OFFLINE = BackboneOptions(download=False)


def test_a_repository_of_the_hub_is_read_from_its_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Image.Image
) -> None:
    model = vit(init_values=1e-5)
    (tmp_path / "made").mkdir()
    published(tmp_path / "made", model)
    in_cache(monkeypatch, tmp_path / "cache", "lab/uni", tmp_path / "made")
    found = load_backbone("timm:hf-hub:lab/uni", device="cpu", options=OFFLINE)
    same(found, picture, model)
    folder = load_backbone(f"timm:local-dir:{tmp_path / 'made'}", device="cpu")
    own = load_backbone(
        "timm:hf-hub:lab/other", str(tmp_path / "made"), device="cpu", options=OFFLINE
    )
    assert found.fingerprint == folder.fingerprint == own.fingerprint
    for name, files in (
        ("timm:hf-hub:lab/uni2", "config.json and model.safetensors or pytorch_model.bin"),
        ("hf:lab/uni2", "config.json, preprocessor_config.json and model.safetensors or"),
        ("open_clip:hf-hub:lab/uni2", "open_clip_config.json and open_clip_model.safetensors or"),
    ):
        wanted = "are not on this machine, and download-weights = false; fetch them from "
        wanted += f"https://huggingface.co/lab/uni2 ({files}"
        with pytest.raises(BackboneError, match=re.escape(wanted)):
            load_backbone(name, options=OFFLINE)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for name, place in (
        ("torchvision:resnet18", "https://download.pytorch.org/models/resnet18"),
        ("timm:resnet18", "https://huggingface.co/timm/resnet18.a1_in1k"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "https://huggingface.co/laion/CLIP-ViT-B-32"),
        ("open_clip:RN50/cc12m", "https://huggingface.co/timm/resnet50_clip.cc12m"),
    ):
        with pytest.raises(
            BackboneError, match=f"fetch them from {re.escape(place)}.* weights-path"
        ):
            load_backbone(name, options=OFFLINE)


def test_weights_that_a_library_has_fetched_are_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import models

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    name = "torchvision:shufflenet_v2_x0_5"
    url = models.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1.url
    file = tmp_path / "checkpoints" / Path(url).name
    torch.save(models.shufflenet_v2_x0_5(weights=None).state_dict(), file)
    stored = load_backbone(name, device="cpu", options=OFFLINE)
    assert stored.fingerprint == load_backbone(name, str(file), device="cpu").fingerprint


# open_clip.

VISION = {"image_size": 32, "patch_size": 8, "width": 24, "layers": 2, "head_width": 8}
TEXT = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
TIMM_VISION: dict[str, Any] = {"timm_model_name": "test_vit", "timm_model_pretrained": True}
TIMM_VISION |= {"timm_pool": "", "timm_proj": "linear", "image_size": 160}
CLIPS: dict[str, dict[str, Any]] = {
    "of open_clip": {"embed_dim": 12, "vision_cfg": VISION, "text_cfg": TEXT},
    "quick gelu": {"embed_dim": 12, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT},
    "tower of timm (BiomedCLIP, SigLIP 2)": {"embed_dim": 12, "vision_cfg": TIMM_VISION, "text_cfg": TEXT},
    "attentional pooling (CoCa, CONCH)": {
        "embed_dim": 12, "text_cfg": TEXT, "custom_text": True,
        "vision_cfg": VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", CLIPS)
@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_a_folder_of_open_clip_gives_the_features_of_open_clip(
    tmp_path: Path, picture: Image.Image, form: str, mode: str
) -> None:
    import open_clip

    config: dict[str, Any] = json.loads(json.dumps(CLIPS[form]))
    config["vision_cfg"].pop("timm_model_pretrained", None)
    stated = {"mean": NORMAL["mean"], "std": NORMAL["std"], "interpolation": "bicubic"}
    preset = stated | {"resize_mode": mode}
    content = {"model_cfg": config, "preprocess_cfg": preset}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    clip = spread(open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False))
    torch.save(clip.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    oracle, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    # As it is published; the tower's own weights would be fetched.
    content["model_cfg"] = CLIPS[form]
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    found = load_backbone(f"open_clip:local-dir:{tmp_path}", device="cpu")
    pair = bool(config["vision_cfg"].get("output_tokens"))
    visual = oracle.eval().visual
    same(found, picture, lambda x: visual(x)[0] if pair else oracle.encode_image(x), transform)


# transformers.

HF_SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32}
HF_SMALL |= {"patch_size": 8}
SQUARE = {"height": 32, "width": 32}
PROCESSOR: dict[str, Any] = {
    "do_resize": True, "size": SQUARE, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": NORMAL["mean"], "image_std": NORMAL["std"],
}  # fmt: skip
CROPPED = PROCESSOR | {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": SQUARE}
HUGGING = ("Dinov2", "Dinov2-gated", "Dinov2-other-size", "Dinov2WithRegisters", "ViT")


def hugging(form: str, folder: Path) -> Any:
    """A model of transformers, in a folder as it saves it."""
    transformers = pytest.importorskip("transformers")
    name, *more = form.split("-", 1)
    options: dict[str, Any] = dict(HF_SMALL)
    options |= {"use_swiglu_ffn": True} if more == ["gated"] else {}
    options |= {"image_size": 56} if more == ["other-size"] else {}
    options |= {"intermediate_size": 72} if name == "ViT" else {}
    config = getattr(transformers, f"{name}Config")(**options)
    extra = {"add_pooling_layer": False} if name == "ViT" else {}
    model = spread(getattr(transformers, f"{name}Model")(config, **extra))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(CROPPED))
    return model


@pytest.mark.parametrize("form", HUGGING)
@pytest.mark.parametrize("pooling", ["", "mean", "both"])
def test_a_folder_of_transformers_gives_the_features_of_transformers(
    tmp_path: Path, picture: Image.Image, form: str, pooling: Any
) -> None:
    model = hugging(form, tmp_path)
    prefix = 1 + getattr(model.config, "num_register_tokens", 0)

    def wanted(x: Tensor) -> Tensor:
        tokens = model(x).last_hidden_state
        cls, mean = tokens[:, 0], tokens[:, prefix:].mean(1)
        return {"": cls, "mean": mean, "both": torch.cat([cls, mean], 1)}[pooling]

    options = BackboneOptions(pooling=pooling)
    found = load_backbone(f"hf:local-dir:{tmp_path}", device="cpu", options=options)
    same(found, picture, wanted)
    if not pooling and form != "ViT":
        same(found, picture, lambda x: model(x).pooler_output)


# SigLIP.

SIGLIP_SMALL = HF_SMALL | {"intermediate_size": 61}


class Siglip(nn.Module):
    """The image tower of SigLIP, with the names of its parts in transformers."""

    def __init__(self, width: int = 24, depth: int = 2, heads: int = 3, inner: int = 61) -> None:
        super().__init__()

        def mlp() -> nn.Module:
            return nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, eps=1e-6)

        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, width, 8, 8),
                "position_embedding": nn.Embedding(16, width),
            }
        )
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList()})
        for _ in range(depth):
            attention = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
            parts = {"layer_norm1": norm(), "self_attn": attention, "layer_norm2": norm()}
            self.encoder["layers"].append(nn.ModuleDict({**parts, "mlp": mlp()}))
        self.post_layernorm, self.heads = norm(), heads
        attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.head = nn.ModuleDict({"attention": attention, "layernorm": norm(), "mlp": mlp()})
        self.head.register_parameter("probe", nn.Parameter(torch.zeros(1, 1, width)))

    def tokens(self, x: Tensor) -> Tensor:
        patches = self.embeddings["patch_embedding"](x).flatten(2).transpose(1, 2)
        x = patches + self.embeddings["position_embedding"].weight
        for layer in self.encoder["layers"]:
            y, own = layer["layer_norm1"](x), layer["self_attn"]
            split = (len(y), y.shape[1], self.heads, -1)
            q, k, v = (
                own[name](y).reshape(split).transpose(1, 2)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
            x = x + own["out_proj"]((weights @ v).transpose(1, 2).flatten(2))
            x = x + self.feed(layer["mlp"], layer["layer_norm2"](x))
        return self.post_layernorm(x)

    def feed(self, mlp: Any, x: Tensor) -> Tensor:
        return mlp["fc2"](nn.functional.gelu(mlp["fc1"](x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x)
        probe = self.head.probe.expand(len(x), -1, -1)
        pooled = self.head["attention"](probe, tokens, tokens)[0]
        pooled = pooled + self.feed(self.head["mlp"], self.head["layernorm"](pooled))
        return pooled[:, 0]


def siglip(folder: Path, both: bool) -> Siglip:
    """A tower in a folder, alone, or beside a text tower as MedSigLIP is published."""
    model = spread(Siglip())
    weights = {f"vision_model.{name}": each for name, each in model.state_dict().items()}
    content: dict[str, Any] = {"model_type": "siglip_vision_model", **SIGLIP_SMALL}
    if both:
        text = "text_model.embeddings.position_embedding.weight"
        weights |= {
            text: torch.ones(8, 24),
            "logit_scale": torch.ones(1),
            "logit_bias": torch.ones(1),
        }
        content = {"model_type": "siglip", "vision_config": SIGLIP_SMALL, "text_config": {}}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("pooling", ["", "mean"])
def test_the_image_tower_of_siglip_pools_as_it_has_learned(
    tmp_path: Path, picture: Image.Image, both: bool, pooling: Any
) -> None:
    model = siglip(tmp_path, both)
    options = BackboneOptions(pooling=pooling)
    found = load_backbone(f"hf:local-dir:{tmp_path}", device="cpu", options=options)
    same(found, picture, model if not pooling else lambda x: model.tokens(x).mean(1))
    with pytest.raises(BackboneError, match="has no class token; set 'mean'"):
        load_backbone(f"hf:local-dir:{tmp_path}", options=BackboneOptions(pooling="cls"))


def test_the_image_tower_of_siglip_is_that_of_transformers(
    tmp_path: Path, picture: Image.Image
) -> None:
    transformers = pytest.importorskip("transformers")
    model = spread(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIGLIP_SMALL)))
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    found = load_backbone(f"hf:local-dir:{tmp_path}", device="cpu")
    same(found, picture, lambda x: model(x).pooler_output)


# What is refused.


def changed(folder: Path, name: str, **keys: Any) -> None:
    """Keys of a configuration; None removes one."""
    content = json.loads((folder / name).read_text()) | keys
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        ({"architecture": None, "model_type": "dinov2"}, "names no architecture of timm; .* write hf: in place"),
        ({"architecture": "vit_tinny"}, "timm has no model 'vit_tinny'; similar names: "),
        ({"model_args": {"colour": "red"}}, r"config.json' describes no network .* \(TypeError: .*colour"),
        ({"model_args": {"embed_dim": 25, "num_heads": 3}}, "describes no network that its library can build"),
        ({"model_args": SMALL | {"depth": 1}}, r"do not fit .*: 12 unexpected \(blocks.1"),
        ({"model_args": SMALL | {"depth": 3}}, r"do not fit .*: 12 missing \(blocks.2"),
        ({"model_args": SMALL | {"embed_dim": 48}}, r"do not fit .* of another shape \(blocks.0"),
    ],
)  # fmt: skip
def test_a_configuration_of_timm_that_does_not_fit_is_refused(
    tmp_path: Path, keys: dict[str, Any], refusal: str
) -> None:
    published(tmp_path, vit())
    changed(tmp_path, "config.json", **keys)
    with pytest.raises(BackboneError, match=refusal):
        load_backbone(f"timm:local-dir:{tmp_path}", device="cpu")


@pytest.mark.parametrize(
    ("name", "keys", "refusal"),
    [
        ("config.json", {"model_type": "swin"}, "model_type = 'swin'; hf: reads dinov2, .* onnx:"),
        ("config.json", {"model_type": None, "architecture": "x"}, "it is of timm: write timm:"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act = 'relu'; hf: builds 'gelu' only"),
        ("config.json", {"hidden_size": None}, r"describes no vit that can be built \(KeyError"),
        ("config.json", {"image_size": 64}, "is for images of 64 px, and .* of 32 px; set image-size"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize = False; it must be true"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, "rescale_factor = 1.0; it must be 1 / 255"),
        ("preprocessor_config.json", {"resample": 5}, "resample = 5; it must be 0, 1, 2 or 3"),
        ("preprocessor_config.json", {"image_mean": [1]}, r"image_mean = \[1\]; it must be three"),
        ("preprocessor_config.json", {"size": {"longest_edge": 9}}, "must be a shortest_edge, or a height"),
        ("preprocessor_config.json", {"do_center_crop": None}, "do_center_crop = None; it must be true"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 24}}, "crop_size = .* at most size"),
        ("preprocessor_config.json", {"size": {"height": 40, "width": 40}}, "must be size where that is"),
    ],
)  # fmt: skip
def test_a_configuration_of_transformers_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, keys: dict[str, Any], refusal: str
) -> None:
    hugging("ViT", tmp_path)
    changed(tmp_path, name, **keys)
    with pytest.raises(BackboneError, match=refusal):
        load_backbone(f"hf:local-dir:{tmp_path}", device="cpu")


def test_a_pooling_that_the_files_leave_open_is_asked_for(
    tmp_path: Path, picture: Image.Image
) -> None:
    """A ViT with a pooler of its own task, and a classifier of the class token and the mean."""
    model, name = hugging("ViT", tmp_path), f"hf:local-dir:{tmp_path}"
    stored, other = load_file(tmp_path / "model.safetensors"), tmp_path / "other.safetensors"
    pooler = {
        "vit.pooler.dense.weight": torch.ones(24, 24),
        "vit.pooler.dense.bias": torch.ones(24),
    }
    for more, reason in (
        (
            pooler,
            "the weights have the tensor vit.pooler.dense.weight, .* set features.pooling to 'cls', or to 'both'",
        ),
        (
            {"classifier.weight": torch.ones(2, 48)},
            "have a classifier of the class token and the mean",
        ),
    ):
        save_file({f"vit.{key}": each for key, each in stored.items()} | more, other)
        with pytest.raises(BackboneError, match=reason):
            load_backbone(name, str(other), device="cpu")
        options = BackboneOptions(pooling="cls")
        found = load_backbone(name, str(other), device="cpu", options=options)
        same(found, picture, lambda x: model(x).last_hidden_state[:, 0])


def test_a_folder_without_the_files_is_refused_with_what_it_has(tmp_path: Path) -> None:
    for name in ("timm", "hf", "open_clip"):
        with pytest.raises(BackboneError, match="does not exist"):
            load_backbone(f"{name}:local-dir:{tmp_path}/none")
        with pytest.raises(BackboneError, match="but nothing; give"):
            load_backbone(f"{name}:local-dir:{tmp_path}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, weights)
    with pytest.raises(
        BackboneError, match=r"has no config\.json, which says what the weights are for"
    ):
        load_backbone(f"timm:local-dir:{tmp_path}")
    for content, reason in (
        ("{", "is no JSON"),
        ("3", "is no JSON object"),
        ("[" * 10**5, "is no JSON"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(BackboneError, match=reason):
            load_backbone(f"timm:local-dir:{tmp_path}")
    with pytest.raises(
        BackboneError, match=r"has no open_clip_model\.safetensors or .*, but config"
    ):
        load_backbone(f"open_clip:local-dir:{tmp_path}")
    with pytest.raises(BackboneError, match=r"is a folder; give a .safetensors file"):
        load_backbone("torchvision:resnet18", str(tmp_path))


# ONNX.


class Centred(nn.Module):
    """Features that depend on the other images of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return flat - flat.mean(0)


def exported(
    module: nn.Module, file: Path, side: int = 32, batch: bool = True, free: bool = False
) -> Path:
    """A graph of a module: of any number of images, or one, and of images of one size, or any."""
    pytest.importorskip("onnxscript")
    axes: Any = {0: "batch"} if batch else {}
    axes |= {2: "height", 3: "width"} if free else {}
    example = torch.zeros(2 if batch else 1, 3, side, side)
    torch.onnx.export(
        module.eval(),
        (example,),
        file,
        dynamo=False,
        input_names=["images"],
        dynamic_axes={"images": axes},
    )
    return file


STATED = BackboneOptions(mean=NORMAL["mean"], std=NORMAL["std"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("free", [True, False])
def test_a_graph_gives_the_features_of_the_module_that_it_was(
    tmp_path: Path, picture: Image.Image, batch: bool, free: bool
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    file = exported(module, tmp_path / "net.onnx", batch=batch, free=free)
    size = 32 if free else 0
    found = load_backbone(f"onnx:{file}", "", size, "cpu", STATED)
    same(found, picture, module)
    images = torch.stack([found.preprocess(picture.rotate(90 * turn)) for turn in range(4)])
    torch.testing.assert_close(found.forward(images), module(images).detach(), atol=1e-5, rtol=1e-5)
    named = load_backbone(
        "onnx:net", str(shutil.copy(file, tmp_path / "copy.onnx")), size, "cpu", STATED
    )
    assert named.fingerprint == found.fingerprint
    torch.manual_seed(1)
    other = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    file = exported(other, tmp_path / "other.onnx", batch=batch, free=free)
    assert load_backbone(f"onnx:{file}", "", size, "cpu", STATED).fingerprint != found.fingerprint


@pytest.mark.filterwarnings("ignore")
def test_weights_beside_a_graph_are_in_its_fingerprint(tmp_path: Path) -> None:
    import onnx

    exported(nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)), tmp_path / "one.onnx")
    found = set()
    for change in (0, 1):
        graph = onnx.load(tmp_path / "one.onnx")
        file = tmp_path / "two.onnx"
        onnx.save(graph, file, save_as_external_data=True, location="two.data", size_threshold=0)
        data = bytearray((tmp_path / "two.data").read_bytes())
        data[0] ^= change
        (tmp_path / "two.data").write_bytes(data)
        found.add(load_backbone(f"onnx:{file}", "", 0, "cpu", STATED).fingerprint)
        (tmp_path / "two.data").unlink()
    assert len(found) == 2


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_is_no_backbone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))
    for module, options, size, reason in (
        (flat, BackboneOptions(), 0, "does not say how its images are normalised; set features.mean and"),
        (flat, STATED, 64, r"takes images of 32 x 32 px; image-size = 64 must be"),
        (nn.Sequential(nn.Linear(32, 4), nn.Flatten(2)), STATED, 0, r"1 dimensions|0 outputs of 2 dim"),
        (Centred(), STATED, 0, "change with the other images"),
    ):  # fmt: skip
        exported(module, file)
        with pytest.raises(BackboneError, match=reason):
            load_backbone(f"onnx:{file}", "", size, "cpu", options)
    exported(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), file, free=True)
    with pytest.raises(BackboneError, match="takes images of any size; image-size = 0 must be"):
        load_backbone(f"onnx:{file}", "", 0, "cpu", STATED)
    torch.onnx.export(flat, (torch.zeros(4, 3072),), file, dynamo=False)
    with pytest.raises(BackboneError, match=r"takes .* \[4, 3072\]; a backbone takes one"):
        load_backbone(f"onnx:{file}", "", 0, "cpu", STATED)
    torch.onnx.export(flat, (torch.zeros(4, 3, 32, 32),), file, dynamo=False)
    with pytest.raises(
        BackboneError, match="takes 4 images at once; export it with one, or any number"
    ):
        load_backbone(f"onnx:{file}", "", 0, "cpu", STATED)
    file.write_bytes(b"noise")
    with pytest.raises(BackboneError, match="cannot be read"):
        load_backbone(f"onnx:{file}", "", 0, "cpu", STATED)
    with pytest.raises(BackboneError, match="does not exist"):
        load_backbone(f"onnx:{tmp_path}/none.onnx", "", 0, "cpu", STATED)


def test_a_tower_of_siglip_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    siglip(tmp_path, both=True)
    name = f"hf:local-dir:{tmp_path}"
    for own, refusal in (
        (SIGLIP_SMALL | {"hidden_act": "gelu"}, "hf: builds 'gelu_pytorch_tanh' only"),
        (SIGLIP_SMALL | {"image_size": 64}, "is for images of 64 px, and .* of 32 px"),
        # What is left out is the usual, which these weights are not.
        ("text", "is for images of 224 px"),
        (SIGLIP_SMALL | {"num_hidden_layers": 1}, r"do not fit .*: 12 unexpected \(blocks.1"),
    ):
        changed(tmp_path, "config.json", vision_config=own)
        with pytest.raises(BackboneError, match=refusal):
            load_backbone(name, device="cpu")


class Tokens(nn.Module):
    """A tower that returns its tokens and their mean, as exporters of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.layer(x).flatten(2).transpose(1, 2)
        return tokens, tokens.mean(1)


@pytest.mark.filterwarnings("ignore")
def test_the_outputs_of_a_graph_are_told_apart_by_their_form(
    tmp_path: Path, picture: Image.Image
) -> None:
    file, module = tmp_path / "net.onnx", Tokens()
    exported(module, file)
    same(load_backbone(f"onnx:{file}", "", 0, "cpu", STATED), picture, lambda x: module(x)[1])
    options = BackboneOptions(STATED.mean, STATED.std, "cls")
    same(
        load_backbone(f"onnx:{file}", "", 0, "cpu", options), picture, lambda x: module(x)[0][:, 0]
    )
