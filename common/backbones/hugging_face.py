"""Vision transformers as the transformers library writes them (Dinov2, Dinov2 with registers, ViT, the
image tower of SigLIP), built by timm from their `config.json` and `preprocessor_config.json`.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackboneError
from ..extras import needed_for
from .networks import LoadedNetwork, NetworkRequest, Pooling
from .preprocessing import Preprocessing
from .weight_files import Files, Weights, network_part

# A model with a text tower, and the image tower alone.
SIGLIP = ("siglip", "siglip_vision_model")
KINDS = ("dinov2", "dinov2_with_registers", "vit", *SIGLIP)
# What a configuration of SigLIP leaves out where it is the usual.
USUAL_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
# Names that each of these networks has; what stands before them is a prefix.
ANCHORS = ("embeddings.cls_token", "embeddings.position_embeddings", "layernorm.weight")
ANCHORS_SIGLIP = ("embeddings.patch_embedding.weight", "post_layernorm.weight", "head.probe")
# Names in timm, by those of transformers.
RENAMED = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^layernorm\.", "norm."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    # Of SigLIP.
    (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^post_layernorm\.", "norm."),
    (r"^encoder\.layers\.", "blocks."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.attention\.in_proj_", "attn_pool.in."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
)
STEPS = ("resize", "rescale", "normalize")
# Resampling filters by their number in Pillow.
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def hugging_face_network(request: NetworkRequest) -> LoadedNetwork:
    """A vision transformer of the transformers library. Raises BackboneError, PackageError."""
    with needed_for(f"backbone = 'hf:{request.model}'"):
        from timm.layers import SwiGLUPacked
        from timm.models import VisionTransformer

    config, file = request.files.config("config.json"), f"{request.files.folder}/config.json"
    assert request.files.weights is not None
    kind = config.get("model_type")
    if kind not in KINDS:
        other = "; it is of timm: write timm: in place of hf:" if "architecture" in config else ""
        raise BackboneError(
            f"'{file}' has model_type = {kind!r}; hf: reads {', '.join(KINDS)}{other or '; another model can be'}"
            f"{'' if other else ' exported to ONNX, see onnx:'}"
        )
    preprocessing = _preprocessing(request.files)
    size = request.image_size or preprocessing.crop
    tower = kind in SIGLIP
    own = config.get("vision_config") if kind == "siglip" else config
    if tower:
        config = USUAL_SIGLIP | (own if isinstance(own, dict) else {})
    anchors, gelu = (ANCHORS_SIGLIP, "gelu_pytorch_tanh") if tower else (ANCHORS, "gelu")
    given = network_part(request.weights, anchors, request.files.weights)
    pooling = request.options.pooling or ("" if tower else _pooling(config, request.weights))
    try:
        stored, patch = config["image_size"], config["patch_size"]
        if (tower or kind == "vit") and size != stored and not request.image_size:
            raise BackboneError(
                f"'{file}' is for images of {stored} px, and preprocessor_config.json makes images of "
                f"{size} px; set image-size to one of the two"
            )
        if config.get("hidden_act", gelu) != gelu:
            raise BackboneError(
                f"'{file}' has hidden_act = {config['hidden_act']!r}; hf: builds {gelu!r} only; export the "
                "model to ONNX, see onnx:"
            )
        into = given.get("encoder.layer.0.mlp.weights_in.weight")
        width, ratio = config["hidden_size"], config.get("mlp_ratio")
        # timm rounds the product down.
        if tower or kind == "vit":
            ratio = (config["intermediate_size"] + 0.5) / width
        elif into is not None:
            ratio = (into.shape[0] + 0.5) / width
        form: dict[str, Any] = {"init_values": None if kind == "vit" else 1.0}
        if tower:
            form = {"class_token": False, "act_layer": "gelu_tanh"}
            form |= {"global_pool": "" if pooling else "map"}
        elif into is not None:
            form |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
        model = VisionTransformer(
            img_size=size,
            patch_size=patch,
            in_chans=config.get("num_channels", 3),
            num_classes=0,
            embed_dim=width,
            depth=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            mlp_ratio=ratio,
            qkv_bias=config.get("qkv_bias", True),
            reg_tokens=config.get("num_register_tokens", 0) if kind.endswith("registers") else 0,
            no_embed_class=True,
            norm_layer=partial(nn.LayerNorm, eps=config["layer_norm_eps"]),
            **({"global_pool": ""} | form),
        )
    except (KeyError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise BackboneError(
            f"'{file}' describes no {kind} that can be built ({type(error).__name__}: {error}); copy it "
            "from where the weights are published"
        ) from error
    identity = f"hf:{kind}", config["num_attention_heads"], config["layer_norm_eps"], pooling
    convert = partial(_converted, size // patch, request.files.weights, anchors)
    # The pooling that learns is left out where the run wants another.
    head = ("attn_pool.",) if tower and pooling else ()
    return LoadedNetwork(
        *(model, preprocessing, head, convert, identity),
        tokens=model.num_prefix_tokens,
        pooling=pooling,
    )


def _pooling(config: dict[str, Any], weights: Weights) -> Pooling:
    """The pooling of which the files leave no doubt: the class token."""
    what, width = "", config.get("hidden_size")
    for name, value in weights.items():
        if name.endswith("pooler.dense.weight"):
            what = f"the tensor {name}"
        elif name == "classifier.weight" and value.ndim == 2 and value.shape[1] != width:
            what = "a classifier of the class token and the mean of the patches"
    if what:
        raise BackboneError(
            f"the weights have {what}, so features may be more than the class token; set "
            "features.pooling to 'cls', or to 'both' for the mean of the patches as well"
        )
    return "cls"


def _converted(
    side: int, file: Path, anchors: tuple[str, ...], weights: dict[str, Tensor]
) -> Weights:
    """Weights under timm's names, with positions for side x side patches."""
    named: dict[str, Tensor] = {}
    for name, value in network_part(weights, anchors, file).items():
        for pattern, new in RENAMED:
            name = re.sub(pattern, new, name)
        named[name] = value
    for first, *others in (
        (".attention.attention.query.", ".attention.attention.key.", ".attention.attention.value."),
        (".attn.q.", ".attn.k.", ".attn.v."),
    ):
        for name in [name for name in named if first in name]:
            parts = [named.pop(name.replace(first, each)) for each in (first, *others)]
            named[name.replace(first, ".attn.qkv.")] = torch.cat(parts)
    for name in [name for name in named if name.startswith("attn_pool.in.")]:
        kind, value = name.removeprefix("attn_pool.in."), named.pop(name)
        width = len(value) // 3
        named[f"attn_pool.q.{kind}"], named[f"attn_pool.kv.{kind}"] = value[:width], value[width:]
    positions = named.get("pos_embed")
    if positions is None:
        return named
    if "cls_token" in named:
        # The class token's own position goes into the token, as timm has it.
        named["cls_token"] = named["cls_token"] + positions[:, :1]
        positions = positions[:, 1:]
    elif positions.ndim == 2:
        positions = positions[None]
    patches, stored = positions, math.isqrt(positions.shape[1])
    if stored != side:
        grid = patches.reshape(1, stored, stored, -1).permute(0, 3, 1, 2).float()
        grid = nn.functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
        patches = grid.flatten(2).transpose(1, 2)
    named["pos_embed"] = patches
    return named


def _preprocessing(files: Files) -> Preprocessing:
    """The preprocessing of `preprocessor_config.json`."""
    stated = {"resample": 3, "rescale_factor": 1 / 255} | files.config("preprocessor_config.json")
    (resize, shorter), cut = _side(stated, "size"), stated.get("do_center_crop", False)
    crop = _side(stated, "crop_size")[0] if cut else resize
    means, deviations = stated.get("image_mean"), stated.get("image_std")
    for key, allowed, fine in (
        *((f"do_{step}", "true", stated.get(f"do_{step}", True) is True) for step in STEPS),
        (
            "rescale_factor",
            "1 / 255",
            math.isclose(stated["rescale_factor"], 1 / 255, rel_tol=1e-6),
        ),
        ("resample", "0, 1, 2 or 3", stated["resample"] in RESAMPLE),
        ("image_mean", "three numbers", isinstance(means, list) and len(means) == 3),
        ("image_std", "three numbers", isinstance(deviations, list) and len(deviations) == 3),
        ("do_center_crop", "true where size has a shortest_edge", cut or not shorter),
        ("crop_size", "at most size", crop <= resize),
        ("crop_size", "size where that is a height and a width", shorter or crop == resize),
    ):
        if not fine:
            raise _wrong(stated, key, allowed)
    mean, std = tuple(map(float, means or ())), tuple(map(float, deviations or ()))
    return Preprocessing(resize, crop, RESAMPLE[stated["resample"]], mean, std, not shorter)


def _side(stated: dict[str, Any], key: str) -> tuple[int, bool]:
    """Pixels of a square, or of the shorter side, and whether it is the latter."""
    value = stated.get(key)
    sides = value if isinstance(value, dict) else {"height": value, "width": value}
    if isinstance(shorter := sides.get("shortest_edge"), int):
        return shorter, True
    height, width = sides.get("height"), sides.get("width")
    if not isinstance(height, int) or height < 1 or height != width:
        raise _wrong(stated, key, "a shortest_edge, or a height and a width that are equal")
    return height, False


def _wrong(stated: dict[str, Any], key: str, allowed: str) -> BackboneError:
    return BackboneError(
        f"preprocessor_config.json has {key} = {stated.get(key)!r}; it must be {allowed}"
    )
