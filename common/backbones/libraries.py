"""Networks of torchvision, open_clip and timm: by the names that these libraries know, and from folders
as they publish them.
"""

from __future__ import annotations

import difflib
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackboneError
from ..extras import needed_for
from .backbone_names import HUB, LOCAL, WEIGHTS_IN_FOLDERS
from .networks import LoadedNetwork, NetworkRequest
from .preprocessing import Preprocessing
from .weight_files import Files, Weights, first_sentence, missing_files, network_part

# open_clip builds an image tower with a text tower only; this one has next to no weights.
NO_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}
# Arguments of timm that the weights show, so that the fingerprint has them already.
SHOWN_BY_WEIGHTS = (
    *("init_values", "reg_tokens", "no_embed_class", "num_classes", "mlp_layer", "act_layer"),
    *("mlp_ratio", "dynamic_img_size"),
)
# Names of the pooling in timm.
IN_TIMM = {"token": "cls", "avg": "mean"}


def _no_download(name: str, error: Exception) -> BackboneError:
    return BackboneError(
        f"cannot fetch the weights of {name!r} ({first_sentence(error)}); on a machine without internet "
        "put them in a file and name it in weights-path; a hospital names it in its node-config"
    )


def published_weights(model_name: str) -> Any:
    """The weights of a torchvision model that are used here, as torchvision describes them.

    Raises PackageError without torchvision, ValueError for a model that it does not have.
    """
    with needed_for(f"backbone = 'torchvision:{model_name}'"):
        from torchvision import models

    published = models.get_model_weights(model_name)
    first = "IMAGENET1K_V1"
    return published[first] if first in published.__members__ else published.DEFAULT


def torchvision_network(request: NetworkRequest) -> LoadedNetwork:
    """A classifier of torchvision without its last linear layer. Raises BackboneError, PackageError."""
    model_name = request.model
    with needed_for(f"backbone = 'torchvision:{model_name}'"):
        from torchvision import models

    known = models.list_models(module=models)
    if model_name not in known:
        raise BackboneError(
            f"torchvision has no classification model {model_name!r}; it has {', '.join(known)}"
        )
    weights = published_weights(model_name)
    try:
        model: nn.Module = models.get_model(
            model_name, weights=None if request.weights else weights
        )
    except (OSError, RuntimeError) as error:
        raise _no_download(f"torchvision:{model_name}", error) from error
    head = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not head:
        raise BackboneError(
            f"torchvision model {model_name!r} has no linear layer at its end; choose another"
        )
    model.set_submodule(head[-1], nn.Identity())
    preset = weights.transforms()
    preprocessing = Preprocessing(
        max(preset.resize_size[0], preset.crop_size[0]),
        preset.crop_size[0],
        preset.interpolation.value,
        tuple(preset.mean),
        tuple(preset.std),
    )
    return LoadedNetwork(model, preprocessing, head=(head[-1] + ".",))


def open_clip_network(request: NetworkRequest) -> LoadedNetwork:
    """The image tower of a model of open_clip. Raises BackboneError, PackageError."""
    model_name = request.model
    with needed_for(f"backbone = 'open_clip:{model_name}'"):
        import open_clip

    if model_name.startswith((HUB, LOCAL)):
        return _clip_of_folder(request)
    architecture, _, tag = model_name.partition("/")
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if architecture not in open_clip.list_models() or tag not in tags:
        known = (
            f"its tags are {', '.join(tags)}"
            if tags
            else f"models are {', '.join(open_clip.list_models())}"
        )
        raise BackboneError(
            f"open_clip has no {model_name!r}; write MODEL/TAG, such as ViT-B-32/openai; {known}"
        )
    published = open_clip.get_pretrained_cfg(architecture, tag)
    with quiet():
        try:
            clip = open_clip.create_model(
                architecture,
                pretrained=None if request.weights else tag,
                force_quick_gelu=bool(published.get("quick_gelu", False)),
                force_preprocess_cfg={
                    k: published[k]
                    for k in ("mean", "std", "interpolation", "resize_mode")
                    if k in published
                },
                pretrained_text=False,
            )
        except (OSError, RuntimeError) as error:
            raise _no_download(f"open_clip:{model_name}", error) from error
    config = open_clip.get_model_preprocess_cfg(clip)
    return LoadedNetwork(clip.visual, _clip_preprocessing(config))


def _clip_of_folder(request: NetworkRequest) -> LoadedNetwork:
    """The image tower alone: its text tower may need a package, and files, that a site has not."""
    with needed_for(f"backbone = 'open_clip:{request.model}'"):
        from open_clip import CustomTextCLIP
        from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    config = request.files.config("open_clip_config.json")
    try:
        model = config["model_cfg"]
        vision = dict(model["vision_cfg"])
        if "timm_model_name" in vision:
            vision["timm_model_pretrained"] = False
        gelu = bool(model.get("quick_gelu", False))
        with quiet():
            visual = CustomTextCLIP(model["embed_dim"], vision, dict(NO_TEXT), gelu).visual
        stated = merge_preprocess_dict(asdict(PreprocessCfg()), config.get("preprocess_cfg", {}))
        preprocessing = _clip_preprocessing(stated | {"size": visual.image_size})
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
        raise _no_config(request.files, "open_clip_config.json", error) from error
    return LoadedNetwork(
        visual, preprocessing, identity=("open_clip", gelu, sorted(vision.items()))
    )


def _no_config(files: Files, name: str, error: Exception) -> BackboneError:
    return BackboneError(
        f"'{files.folder}/{name}' describes no network that its library can build "
        f"({type(error).__name__}: {first_sentence(error)}); copy it from where the weights are published"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """open_clip warns about random weights; the file's weights replace them right after."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


def _clip_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["size"] if isinstance(config["size"], int) else config["size"][0]
    squash = config["resize_mode"] == "squash"
    return Preprocessing(
        size, size, config["interpolation"], tuple(config["mean"]), tuple(config["std"]), squash
    )


def timm_network(request: NetworkRequest) -> LoadedNetwork:
    """A model of timm without its classifier. Raises BackboneError, PackageError."""
    name, files = request.model, request.files
    with needed_for(f"backbone = 'timm:{name}'"):
        import timm

    in_folder = name.startswith((HUB, LOCAL))
    config = files.config("config.json", needed=in_folder)
    known = str(config.get("architecture", ""))
    if in_folder and not known:
        raise BackboneError(
            f"'{files.folder}/config.json' names no architecture of timm; it has "
            f"{', '.join(sorted(config)[:6])}; if the weights are of transformers, write hf: in place of "
            "timm:"
        )
    if known and not in_folder and known != name.partition(".")[0]:
        raise BackboneError(
            f"backbone = 'timm:{name}', but '{files.folder}/config.json' is of {known!r}; write "
            f"timm:{known}, or remove the file if it is not of these weights"
        )
    architecture = known or name
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=5, cutoff=0.3)
        raise BackboneError(
            f"timm has no model {architecture!r}; similar names: {', '.join(close) or 'none'}"
        )
    source = f"local-dir:{files.folder}" if known else name
    build = partial(timm.create_model, source, pretrained=not request.weights, num_classes=0)
    try:
        model: nn.Module = build()
        if more := _seen(model, request, bool(known)):
            model = build(**more)
    except (OSError, RuntimeError) as error:
        if known:
            raise _no_config(files, "config.json", error) from error
        raise _no_download(f"timm:{name}", error) from error
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        raise _no_config(files, "config.json", error) from error
    stated = timm.data.resolve_model_data_config(model)
    crop = stated["input_size"][-1]
    resize = max(crop, int(crop / stated["crop_pct"]))
    squash = stated.get("crop_mode") == "squash"
    preprocessing = Preprocessing(
        resize, crop, stated["interpolation"], tuple(stated["mean"]), tuple(stated["std"]), squash
    )
    classifier = getattr(model, "default_cfg", {}).get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    args = dict(config.get("model_args") or {}) | more
    args = {key: value for key, value in args.items() if key not in SHOWN_BY_WEIGHTS}
    pooling = request.options.pooling if more.get("global_pool") == "" else ""
    if pooling:
        args["pooling"] = pooling
    elif known:
        args["global_pool"] = getattr(model, "global_pool", "")
    filters = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    return LoadedNetwork(
        model,
        preprocessing,
        tuple(head + "." for head in heads),
        None if filters is None else partial(_filtered, filters, model),
        (f"timm:{architecture}", sorted(args.items(), key=str)) if args else None,
        pooling,
        getattr(model, "num_prefix_tokens", 0),
    )


def _filtered(filters: Any, model: nn.Module, weights: dict[str, Tensor]) -> Weights:
    """Weights of another form, as timm converts them; unchanged where it cannot."""
    try:
        converted: Weights = filters(dict(weights), model)
    except (KeyError, RuntimeError, AttributeError, ValueError, IndexError, AssertionError):
        return weights
    return converted


def _seen(model: nn.Module, request: NetworkRequest, configured: bool) -> dict[str, Any]:
    """Arguments of timm that the run and the weights ask for, and the model does not have."""
    with needed_for(f"backbone = 'timm:{request.model}'"):
        from timm.models import VisionTransformer

    args: dict[str, Any] = {}
    pooling, size = request.options.pooling, request.image_size
    pool = getattr(model, "global_pool", None)
    if pooling and IN_TIMM.get(str(pool)) != pooling:
        if not hasattr(model, "num_prefix_tokens"):
            raise BackboneError(
                f"features.pooling = {pooling!r}: 'timm:{request.model}' has no tokens to pool; leave "
                "it out"
            )
        args["global_pool"] = ""
    if size and getattr(model, "default_cfg", {}).get("fixed_input_size"):
        args["img_size"] = size
    if not isinstance(model, VisionTransformer) or not request.weights:
        return args
    assert request.files.weights is not None
    expected = model.state_dict()
    given = network_part(request.weights, expected, request.files.weights)
    if "blocks.0.ls1.gamma" in given and "blocks.0.ls1.gamma" not in expected:
        args["init_values"] = 1e-5
    registers = given.get("reg_token", given.get("register_tokens"))
    count = 0 if registers is None else registers.shape[1]
    if count != model.num_reg_tokens:
        args["reg_tokens"] = count
    return args | _gated(model, given) | _positions(model, given, count, size or configured)


def _gated(model: nn.Module, given: Weights) -> dict[str, Any]:
    """Arguments for layers whose first half gates the second: SwiGLU, as all published ones are."""
    with needed_for("a backbone of timm"):
        from timm.layers import GluMlp, SwiGLUPacked

    into, out = (given.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    if into is None or out is None or into.shape[0] != 2 * out.shape[1]:
        return {}
    if isinstance(model.blocks[0].mlp, GluMlp):  # type: ignore[index, union-attr]
        return {}
    # timm rounds the product down.
    ratio = (into.shape[0] + 0.5) / into.shape[1]
    return {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": ratio}


def _positions(model: Any, given: Weights, registers: int, decided: int) -> dict[str, Any]:
    """Arguments for the tokens that have positions in the file; refuses other sizes of images, unless
    a configuration or the run decides the size.
    """
    stored = given.get("pos_embed")
    if stored is None or stored.ndim != 3 or model.pos_embed is None:
        return {}
    count, patches = stored.shape[1], model.patch_embed.num_patches
    alone = math.isqrt(count) ** 2 == count or "register_tokens" in given
    args = {"no_embed_class": True} if alone and not model.no_embed_class else {}
    if not decided:
        own = count if math.isqrt(count) ** 2 == count else count - 1 - registers
        own = count - 1 if "register_tokens" in given else own
        side, wanted = math.isqrt(own), model.patch_embed.patch_size[0]
        if own != patches and side * side == own:
            raise BackboneError(
                f"the file has positions for images of {side * wanted} px, and the model of this name "
                f"takes {math.isqrt(patches) * wanted} px; set image-size to one of the two"
            )
    return args


def stored_files(name: str) -> Files:
    """The weights of a model that its library has fetched before, for a site that fetches none.

    Args:
        name: of the backbone.

    Returns:
        The files.

    Raises:
        BackboneError: where they are not on this machine: what to fetch, and where to put it.
    """
    library, _, model = name.partition(":")
    repository, url, folder = "", "", Path(torch.hub.get_dir()) / "checkpoints"
    with needed_for(f"backbone = {name!r}"):
        from huggingface_hub import try_to_load_from_cache

        if library == "torchvision":
            url = published_weights(model).url
        elif library == "timm":
            import timm

            config = timm.get_pretrained_cfg(model)
            repository, url = (config.hf_hub_id or "", config.url or "") if config else ("", "")
        else:
            import open_clip

            published = open_clip.get_pretrained_cfg(*model.partition("/")[::2])
            repository, url = published.get("hf_hub", ""), published.get("url", "")
            folder = Path.home() / ".cache" / "clip"
    repository = repository.strip("/")
    cached = [
        found
        for file in WEIGHTS_IN_FOLDERS.get(library, ())
        if repository.count("/") == 1 and (found := try_to_load_from_cache(repository, file))
    ]
    for place in [*cached, folder / Path(url).name] if url else cached:
        if isinstance(place, str | Path) and Path(place).is_file():
            return Files(Path(place).parent, Path(place))
    raise missing_files(name, f"https://huggingface.co/{repository}" if repository else url)
