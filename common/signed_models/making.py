"""What a coordinator signs at the end of a run, and how the parts travel to the sites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.head_training import Batch
from fedsurrogate.common.privacy.mechanism import relation_of
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings, kebab
from fedsurrogate.common.settings.target import TargetSettings
from fedsurrogate.common.signed_models.gaussians import Gaussians, fit_gaussians
from fedsurrogate.common.signed_models.signed_model import (
    Manifest,
    Privacy,
    SignedModel,
    as_sent,
    assembled,
    digest_of,
    pack_gaussians,
    sign_model,
    unpack_gaussians,
    verified,
)
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.model_files import file_content
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import Info

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
