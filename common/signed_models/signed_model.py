"""A model file that its coordinator has signed: classifier, settings of the features, privacy
claim, and Gaussians.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from ..errors import ConfigError, RunError, SealError, SurrogateError
from ..files import read_json
from ..models.classifiers import Classifier, Ensemble, Head
from ..models.training_parts import Batch
from ..privacy.mechanism import relation_of
from ..privacy.shares import ALL
from ..run import Run, stored_run
from ..security.documents import canonical_json
from ..security.sealing import PUBLIC_BYTES, new_key, public_key, sign, verify
from ..settings import Settings, kebab
from ..settings.heads import TargetSettings
from ..targets.target import Target
from ..wire.model_proto import (
    classifier_of,
    file_content,
    load_model,
    pack_classifier,
    unpack_classifier,
)
from ..wire.records import Info
from ..wire.tensors import is_fingerprint
from ..wire.tensors import is_name as is_valid_name
from .gaussians import Gaussians, fit_gaussians

FORMAT = 1
SUFFIX = ".fedsurrogate"
PURPOSE = b"model"
MODEL, GAUSSIANS = "model.", "gaussians."
# A name becomes a file's name at each site.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Privacy(BaseModel):
    """The differential privacy of the run at each site.

    Attributes:
        epsilon: of the whole run.
        delta: of the whole run.
        mechanism: its name.
        relation: the change in a site's data that it hides, such as "add or remove one patient";
            empty in files of earlier versions, which do not state it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0)
    mechanism: str = Field(max_length=40)
    relation: str = Field("", max_length=200)

    def in_words(self) -> str:
        """Epsilon, delta and the neighbouring relation, for people."""
        return (
            f"epsilon {self.epsilon:g}, delta {self.delta:g}; neighbouring relation: "
            f"{self.relation or 'not stated'}"
        )


def _class_name(value: str) -> str:
    """The name, as a surrogate's header may have it. Raises ValueError."""
    if not is_valid_name(value):
        raise ValueError("a name of a class that does not print, or is too long")
    return value


def _fingerprint(value: str) -> str:
    """The fingerprint, as a surrogate's header may have it. Raises ValueError."""
    if not is_fingerprint(value):
        raise ValueError("a fingerprint that does not print, or is too long")
    return value


class Manifest(BaseModel):
    """Facts about a model, which the signature covers.

    Attributes:
        run: digest of the run's settings.
        flower_run: Flower's number of the run.
        settings: those that its features need, flat.
        form: what kind of classifier the tensors are.
        sites: number of sites it was learned from.
        gaussians: "" if the file has Gaussians for out-of-distribution scores, otherwise why it has
            none.
        tensors: SHA-256 of all tensors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    name: str = Field(pattern=NAME)
    created: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    method: str = Field(max_length=40)
    run: str = Field(max_length=64)
    flower_run: str = Field(max_length=40)
    fingerprint: Annotated[str, AfterValidator(_fingerprint)]
    classes: list[Annotated[str, AfterValidator(_class_name)]] = Field(min_length=1)
    dimension: int = Field(ge=1)
    settings: dict[str, str | int | float]
    form: dict[str, str]
    sites: int = Field(ge=0)
    privacy: Privacy | None
    gaussians: str = Field(max_length=400)
    tensors: str = Field(pattern=r"^[0-9a-f]{64}$")

    def signed_bytes(self) -> bytes:
        """The bytes that the signature covers. The same manifest always gives the same bytes."""
        content = self.model_dump()
        # The signature of a file of an earlier version covers no such field.
        if self.privacy is not None and not self.privacy.relation:
            del content["privacy"]["relation"]
        return canonical_json(content)

    def run_config(self, more: Mapping[str, Any] | None = None) -> Run:
        """Settings under which features fit this model.

        Args:
            more: settings that override those of the manifest, flat.

        Raises:
            ConfigError: for settings that do not agree.
        """
        return stored_run({**self.settings, **(more or {})})

    def check_of_images(self, what: str) -> None:
        """Refuse a model of bags where single images are answered.

        Args:
            what: answers them.

        Raises:
            ConfigError: for a model of bags.
        """
        if self.run_config().settings.features.bag != "none":
            raise ConfigError(
                f"{what} answers single images, and model {self.name!r} was learned from bags of "
                "images; use `site predict --bag-column`"
            )


@dataclass(frozen=True)
class SignedModel:
    """A model that its coordinator has signed.

    Attributes:
        classifier: the model.
        manifest: facts about it.
        gaussians: for out-of-distribution scores; None without them.
        signature: of the manifest.
        key: the public key that belongs to it.
    """

    classifier: Classifier
    manifest: Manifest
    gaussians: Gaussians | None
    signature: bytes
    key: bytes

    @property
    def signer(self) -> str:
        """The first digits of the signing key, to compare with the output of `coordinator sites key`."""
        return self.key.hex()[:16]

    def scores(self, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mahalanobis and relative Mahalanobis distances of features.

        Args:
            features: (n, d).

        Returns:
            Both distances, (n,) each, as in `Gaussians.scores`; None without Gaussians.
        """
        return None if self.gaussians is None else self.gaussians.scores(features, self.classifier)


def sign_model(
    classifier: Classifier, gaussians: Gaussians | None, manifest: Manifest, private: bytes
) -> SignedModel:
    """Sign a model with the coordinator's key.

    Args:
        classifier: the model.
        gaussians: for out-of-distribution scores; None without them.
        manifest: facts about the model; its form and digest are set here.
        private: the coordinator's key.
    """
    form, tensors = file_content(classifier)
    manifest = manifest.model_copy(
        update={"form": form, "tensors": digest_of(_all(tensors, gaussians))}
    )
    return SignedModel(
        classifier,
        manifest,
        gaussians,
        sign(manifest.signed_bytes(), private, PURPOSE),
        public_key(private),
    )


class Signed(NamedTuple):
    """A manifest whose signature fits.

    Attributes:
        facts: the manifest.
        signature: of it.
        key: the public key that belongs to the signature.
    """

    facts: Manifest
    signature: bytes
    key: bytes

    @property
    def signer(self) -> str:
        """The first digits of the key, to compare with the output of `coordinator sites key`."""
        return self.key.hex()[:16]


def verified(manifest: str, signature: str, key: str) -> Signed:
    """The manifest of a model, of which nothing is read before its signature fits.

    Args:
        manifest: JSON, as it was signed.
        signature: hexadecimal.
        key: public key of the coordinator, hexadecimal.

    Raises:
        SealError: if the signature does not fit.
        SurrogateError: for a signed text that is no manifest.
    """
    try:
        text, signed, signer = manifest.encode(), bytes.fromhex(signature), bytes.fromhex(key)
    except ValueError:
        raise SealError("the signature or its key is no hexadecimal number") from None
    if len(signer) != PUBLIC_BYTES:
        raise SealError(f"the model is signed by a key of {len(signer)} bytes, not {PUBLIC_BYTES}")
    verify(text, signed, signer, PURPOSE)
    try:
        facts = Manifest.model_validate_json(text)
        if facts.signed_bytes() != text:
            raise ValueError("it is not in the form in which it is signed")
    except ValueError as error:
        first = str(error).split("\n")[0]
        raise SurrogateError(f"the model's manifest cannot be read ({first[:200]})") from None
    return Signed(facts, signed, signer)


def assembled(signed: Signed, classifier: Classifier, gaussians: Gaussians | None) -> SignedModel:
    """A model from its parts, as a message or a file contains them.

    Args:
        signed: the manifest.
        classifier: the model.
        gaussians: for out-of-distribution scores; None without them.

    Raises:
        SealError: for a model that is not the signed one.
    """
    if isinstance(classifier, Ensemble) and not all(map(_is_linear, classifier.heads)):
        raise SealError("an ensemble of heads that change features, which no signature covers")
    facts, header = signed.facts, classifier.header
    form, tensors = file_content(classifier)
    digest = digest_of(_all(tensors, gaussians))
    actual = (form, digest, header.fingerprint, list(header.classes), classifier.dimension)
    if actual != (facts.form, facts.tensors, facts.fingerprint, facts.classes, facts.dimension):
        raise SealError("the model is not the one that its manifest describes")
    if (gaussians is None) != bool(facts.gaussians):
        raise SealError("the model's Gaussians are not those that its manifest describes")
    return SignedModel(classifier, facts, gaussians, signed.signature, signed.key)


def _is_linear(head: Head) -> bool:
    """Whether weight and bias are all of a head: a file has no more of one in an ensemble."""
    changed = (head.clip, head.centre, head.projection)
    return changed == (None,) * 3 and head.mean_over_columns == ALL


def save_signed_model(model: SignedModel) -> bytes:
    """The content of a model file: safetensors, with manifest, signature and key in the metadata."""
    from safetensors.torch import save

    _, tensors = file_content(model.classifier)
    metadata = {
        "format": str(FORMAT),
        "manifest": model.manifest.signed_bytes().decode(),
        "signature": model.signature.hex(),
        "key": model.key.hex(),
    }
    content: bytes = save(_all(tensors, model.gaussians), metadata)
    return content


def read_signed_model(file: Path, trusted: frozenset[bytes] | None = None) -> SignedModel:
    """Read and verify a model file.

    Args:
        file: of `save_signed_model`.
        trusted: public keys of coordinators that may have signed it; None accepts any key, and then
            only proves that the file is as its signer made it.

    Raises:
        SurrogateError: for another file.
        SealError: for one that was changed or is not trusted.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            signed = _signed_part(content.metadata() or {})
            known = trusted is None or signed.key in trusted
            names = content.keys() if known else ()
            tensors = {name: content.get_tensor(name) for name in names}
        if known:
            return _built(signed, tensors)
    except SealError as error:
        raise SealError(f"{file} was changed after it was signed ({error}); get it again") from None
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (SafetensorError, RuntimeError, TypeError, OSError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise SurrogateError(
            f"{file} is no readable model file ({why}); give a {SUFFIX} file of a run"
        ) from None
    except SurrogateError as error:
        raise SurrogateError(
            f"{file} is no model file of this version ({str(error)[:300]}); write one from a run "
            "with `coordinator export`"
        ) from None
    raise SealError(
        f"{file} is signed by key {signed.signer}..., which is not a coordinator's key that this "
        "site knows; compare it with the output of `coordinator sites key` there, and set "
        "coordinator-key in the node-config"
    )


def _signed_part(metadata: Mapping[str, str]) -> Signed:
    """The manifest in a file's metadata. Raises as `verified`."""
    if metadata.get("format") != str(FORMAT):
        raise SurrogateError(
            f"its format is {str(metadata.get('format'))[:20]!r}, this version reads {FORMAT}"
        )
    manifest, signature, key = (metadata.get(name, "") for name in ("manifest", "signature", "key"))
    return verified(manifest, signature, key)


def _built(signed: Signed, tensors: Mapping[str, Tensor]) -> SignedModel:
    """The model of a file. Raises SurrogateError or SealError."""
    facts = signed.facts
    if digest_of(tensors) != facts.tensors:
        raise SealError("its tensors are not those that were signed")
    parts: dict[str, dict[str, Tensor]] = {MODEL: {}, GAUSSIANS: {}}
    for name, tensor in tensors.items():
        prefix = MODEL if name.startswith(MODEL) else GAUSSIANS
        if not name.startswith(prefix):
            raise SurrogateError(f"a tensor {name[:40]!r}, which no model has")
        parts[prefix][name.removeprefix(prefix)] = tensor
    named = {"classes": json.dumps(facts.classes), "fingerprint": facts.fingerprint}
    classifier = classifier_of({**facts.form, **named}, parts[MODEL])
    return assembled(signed, classifier, gaussians_of(parts[GAUSSIANS]))


def gaussians_of(tensors: Mapping[str, Tensor]) -> Gaussians | None:
    """The Gaussians of received tensors; None without tensors. Raises SurrogateError."""
    try:
        return Gaussians.of(tensors) if tensors else None
    except (KeyError, ValueError) as error:
        raise SurrogateError(f"the model's Gaussians cannot be read ({str(error)[:100]})") from None


def pack_gaussians(gaussians: Gaussians) -> str:
    """Gaussians as text for a message: means and directions at 16 bits, variances at 32."""
    from safetensors.torch import save

    return base64.b64encode(
        save({name: tensor.contiguous() for name, tensor in _halved(gaussians).items()})
    ).decode()


def unpack_gaussians(text: str) -> Gaussians:
    """Parse the text of `pack_gaussians`.

    Raises:
        SurrogateError: for another text.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(base64.b64decode(text, validate=True))
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise SurrogateError(f"the model's Gaussians cannot be read ({str(error)[:100]})") from None
    if (gaussians := gaussians_of(tensors)) is None:
        raise SurrogateError("Gaussians without tensors")
    return gaussians


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name, as 32-bit numbers."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().float().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).numpy().tobytes())
    return digest.hexdigest()


def is_name(text: str) -> bool:
    """Whether a text can be a model's name."""
    return bool(re.fullmatch(NAME, text))


def _halved(gaussians: Gaussians) -> dict[str, Tensor]:
    return {
        n: t if n.endswith(("variances", "rest")) else t.half()
        for n, t in gaussians.tensors().items()
    }


def _all(tensors: Mapping[str, Tensor], gaussians: Gaussians | None) -> dict[str, Tensor]:
    named = {MODEL + name: tensor.float().contiguous() for name, tensor in tensors.items()}
    if gaussians is not None:
        named |= {
            GAUSSIANS + name: tensor.float().contiguous()
            for name, tensor in gaussians.tensors().items()
        }
    return named


def as_sent(gaussians: Gaussians) -> Gaussians:
    """Gaussians as a message gives them to sites, at 16 bits."""
    return Gaussians.of(_halved(gaussians))


SAMPLES = 4000
# Room for the Gaussians next to a model in a message.
LARGEST_GAUSSIANS = 2**21
# Names of the values next to a model in a message.
MANIFEST, SIGNATURE, SIGNER, PACKED_GAUSSIANS = "manifest", "signature", "signer", "gaussians"
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
        "features.power-transform": float(power),
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
    return (
        info
        if model.gaussians is None
        else info | {PACKED_GAUSSIANS: pack_gaussians(model.gaussians)}
    )


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
    gaussians = unpack_gaussians(str(info[PACKED_GAUSSIANS])) if PACKED_GAUSSIANS in info else None
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
    manifest = read_json(run, "manifest.json")
    if not isinstance(settings := manifest.get("config"), dict):
        raise RunError(f"{run} is not a run folder: manifest.json has no config")
    return replace(stored_run(settings), stored_as=str(manifest.get("run", "")))


def is_simulated(run: Path) -> bool:
    """Whether the run was a simulation, so that this machine has all of its records. Raises RunError."""
    return read_json(run, "manifest.json").get("simulated") is True


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
    config, manifest = settings_of_run(run), read_json(run, "manifest.json")
    if not (run / MODEL_FILE).is_file():
        raise RunError(
            f"{run} has no {MODEL_FILE}: the run has failed, or its result is no classifier"
        )
    metrics = read_json(run, "metrics.json")
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


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
