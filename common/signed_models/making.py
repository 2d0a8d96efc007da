"""What a coordinator signs at the end of a run, how the parts travel to the sites, and the files of
a model in a run folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunError, SurrogateError
from ..models.classifiers import Classifier
from ..models.training_parts import Batch
from ..privacy.mechanism import relation_of
from ..run import Run, parse_run
from ..security.sealing import new_key
from ..settings import Settings, kebab
from ..settings.heads import TargetSettings
from ..targets.target import Target
from ..wire.model_proto import file_content, load_model, pack_classifier, unpack_classifier
from ..wire.records import Info
from .gaussians import Gaussians, fit_gaussians
from .signed_model import (
    SUFFIX,
    Manifest,
    Privacy,
    SignedModel,
    as_sent,
    assembled,
    digest_of,
    pack_gaussians,
    read_signed_model,
    sign_model,
    unpack_gaussians,
    verified,
)

SAMPLES = 4000
# Room for the Gaussians next to a model in a message.
LARGEST_GAUSSIANS = 2**21
# Names of the values next to a model in a message.
MANIFEST, SIGNATURE, SIGNER, GAUSSIANS = "manifest", "signature", "signer", "gaussians"
WITHOUT_PRIVACY = (
    "the run has no differential privacy, so class means of the sites' records do not go to other "
    "sites; `site evaluate --store` fits Gaussians on the site's own records"
)
Sampler = Callable[[int, int], Batch]


def make_signed_model(
    model: Classifier,
    config: Run,
    sampler: Sampler | None,
    flower_run: str,
    sites: int,
    private: bytes,
    units: Collection[str] = (),
) -> SignedModel:
    """The signed model of a run, at 16 bits, as sites receive it.

    Args:
        model: that was learned.
        config: of the run.
        sampler: draws synthetic features and labels from what the model was learned from.
        flower_run: Flower's number of the run.
        sites: number of sites that the model was learned from.
        private: the coordinator's key.
        units: what the sites' privacy claims protect, "record" or "patient"; none if unknown or
            without privacy.
    """
    released = unpack_classifier(pack_classifier(model))
    gaussians, why = release_gaussians(config.settings, sampler)
    form, tensors = file_content(released)
    digest, now = digest_of(tensors), datetime.now(UTC)
    # Epsilon, delta and mechanism are the same for both units.
    claim = config.mechanism
    privacy = None
    if claim is not None:
        relation = relation_of(claim.name, frozenset(units))
        privacy = Privacy(
            epsilon=claim.epsilon, delta=claim.delta, mechanism=claim.name, relation=relation
        )
    manifest = Manifest(
        name=f"{now:%Y%m%d}-{config.settings.method}-{digest[:8]}",
        created=f"{now:%Y-%m-%d}",
        method=config.settings.method,
        run=config.digest,
        flower_run=flower_run,
        fingerprint=released.header.fingerprint,
        classes=list(released.header.classes),
        dimension=released.dimension,
        settings=feature_settings(config.settings, config.power, config.target),
        form=form,
        sites=sites,
        privacy=privacy,
        gaussians=why,
        tensors=digest,
    )
    return sign_model(released, gaussians, manifest, private)


def feature_settings(
    settings: Settings, power: float, target: Target | None
) -> dict[str, str | int | float]:
    """The settings that decide features and the split into training and test records, flat. No path
    is among them.
    """
    return {
        "backbone": settings.backbone,
        "image-size": settings.image_size,
        "features.power": float(power),
        "seed": settings.seed,
        "test-fraction": settings.test_fraction,
        **({} if settings.features.bag == "none" else {"features.bag": settings.features.bag}),
        **_target_settings(settings.flat(), target),
    }


def _target_settings(own: Mapping[str, Any], target: Target | None) -> dict[str, str | int | float]:
    """The settings of a target that are not the default, flat; none for classes."""
    if target is None:
        return {}
    defaults = Settings().flat()
    keys = map(kebab, TargetSettings.model_fields)
    found = {key: own[key] for key in keys if own[key] != defaults[key]}
    # "0" depends on the run's privacy, which is not among these settings.
    edges = target.public.get("edges")
    return found | ({"bins": len(edges) - 1} if isinstance(edges, list) else {})


def release_gaussians(settings: Settings, sampler: Sampler | None) -> tuple[Gaussians | None, str]:
    """Gaussians for out-of-distribution scores, or why there are none.

    Under differential privacy they are computed from what the sites released, so they cost no
    further privacy. Without it the mixtures went to the coordinator only, and their means must not
    go to other sites.

    Args:
        settings: of the run.
        sampler: draws synthetic features and labels; None if the method leaves nothing to draw
            from.

    Returns:
        The Gaussians and an empty text; or None and the reason.
    """
    if not settings.epsilon:
        return None, WITHOUT_PRIVACY
    if sampler is None:
        return None, f"method = {settings.method!r} leaves no Gaussians"
    features, labels = sampler(settings.seed, SAMPLES)
    try:
        gaussians = as_sent(fit_gaussians(features, labels))
    except ValueError as error:
        return None, f"no Gaussians could be fitted: {error}"
    if len(pack_gaussians(gaussians)) > LARGEST_GAUSSIANS:
        return (
            None,
            f"the Gaussians of {len(gaussians.means)} classes need more than {LARGEST_GAUSSIANS} "
            "bytes",
        )
    return gaussians, ""


def signed_values(model: SignedModel) -> Info:
    """The values that go to sites next to the model's payload."""
    info: Info = {
        MANIFEST: model.manifest.signed_bytes().decode(),
        SIGNATURE: model.signature.hex(),
        SIGNER: model.key.hex(),
    }
    return info if model.gaussians is None else info | {GAUSSIANS: pack_gaussians(model.gaussians)}


def received_model(payload: bytes | None, info: Mapping[str, object]) -> SignedModel | None:
    """The signed model in a message.

    Args:
        payload: of the message.
        info: values next to the payload.

    Returns:
        The model; None if the coordinator has signed none.

    Raises:
        SurrogateError: for parts that do not fit together, or settings that cannot be used.
        SealError: if the signature does not fit.
    """
    if MANIFEST not in info:
        return None
    if payload is None:
        raise SurrogateError("a signed model without its payload")
    manifest, signature, signer = (
        str(info.get(name, "")) for name in (MANIFEST, SIGNATURE, SIGNER)
    )
    signed = verified(manifest, signature, signer)
    gaussians = unpack_gaussians(str(info[GAUSSIANS])) if GAUSSIANS in info else None
    model = assembled(signed, unpack_classifier(payload), gaussians)
    try:
        model.manifest.run_config()
    except ConfigError as error:
        raise SurrogateError(f"the model's settings cannot be used: {error}") from None
    return model


MODEL_FILE = "model.safetensors"
OF_SIMULATION = (
    "the model of a simulation has no Gaussians of its surrogates; `site evaluate RUN --store` fits "
    "Gaussians on records that the run has not learned from"
)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return (folder / "manifest.json").is_file()


def settings_of_run(run: Path) -> Run:
    """The settings of a run, under the digest that its files name.

    Args:
        run: the run folder.

    Raises:
        RunError: for a folder that is no run folder.
        ConfigError: for settings of another version.
    """
    manifest = _object(run, "manifest.json")
    if not isinstance(settings := manifest.get("config"), dict):
        raise RunError(f"{run} is not a run folder: manifest.json has no config")
    return replace(parse_run(settings), stored_as=str(manifest.get("run", "")))


def is_simulated(run: Path) -> bool:
    """Whether the run was a simulation, so that this machine has all of its records. Raises RunError."""
    return _object(run, "manifest.json").get("simulated") is True


def signed_from_run(run: Path, private: bytes, sampler: Sampler | None = None) -> SignedModel:
    """Sign the model of a run folder that holds no signed one.

    Args:
        run: the run folder.
        private: the key that signs.
        sampler: draws synthetic features and labels from what the model was learned from; None for
            a model without Gaussians.

    Returns:
        The model.

    Raises:
        RunError: the run has no model.
        SurrogateError: the model cannot be read.
    """
    config, manifest = settings_of_run(run), _object(run, "manifest.json")
    if not (run / MODEL_FILE).is_file():
        raise RunError(
            f"{run} has no {MODEL_FILE}: the run has failed, or its result is no classifier"
        )
    metrics = _object(run, "metrics.json")
    used = _table(metrics.get("sites")).get("used")
    claims = _table(_table(metrics.get("privacy")).get("per_site")).values()
    units = {str(unit) for claim in claims if (unit := _table(claim).get("unit"))}
    return make_signed_model(
        load_model(run / MODEL_FILE),
        config,
        sampler,
        str(manifest.get("flower_run_id", "")),
        used if isinstance(used, int) else 0,
        private,
        units,
    )


def own_model(run: Path) -> SignedModel:
    """The model of a run folder of this account, which is trusted as it is: who may write there may
    write anything of this account. Of a deployment it is the signed one.

    Args:
        run: the run folder.

    Returns:
        The model, under a name that stays the same; that of a simulation without Gaussians.

    Raises:
        ConfigError: the folder is another account's.
        RunError: the run has no model.
        SurrogateError: the model cannot be read.
    """
    owner = run.stat().st_uid
    if owner != os.getuid():
        raise ConfigError(
            f"{run} belongs to user {owner}, and this is user {os.getuid()}: only your own run folder "
            "is used without a signature; name a file that `coordinator export` has written, whose "
            "signature is checked"
        )
    if (run / f"model{SUFFIX}").is_file():
        return read_signed_model(run / f"model{SUFFIX}")
    key = new_key()
    signed = signed_from_run(run, key)
    facts = {"name": f"{signed.manifest.method}-{signed.manifest.tensors[:8]}"}
    manifest = signed.manifest.model_copy(update=facts | {"gaussians": OF_SIMULATION})
    return sign_model(signed.classifier, None, manifest, key)


def _object(run: Path, name: str) -> dict[str, Any]:
    """A JSON object of a run folder. Raises RunError."""
    try:
        content = json.loads((run / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = f"{name} cannot be read ({type(error).__name__})"
        raise RunError(f"{run} is not a run folder: {why}") from None
    if not isinstance(content, dict):
        raise RunError(f"{run / name} is not a JSON object")
    return content


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
