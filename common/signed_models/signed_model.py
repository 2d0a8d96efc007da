"""A model file that its coordinator has signed: classifier, settings of the features, privacy
claim, and Gaussians.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from ..errors import ConfigError, SealError, SurrogateError
from ..models.classifiers import Classifier, Ensemble, Head
from ..privacy.shares import ALL
from ..run import Run, parse_run
from ..security.documents import canonical_json
from ..security.sealing import PUBLIC_BYTES, public_key, sign, verify
from ..wire.model_proto import classifier_of, file_content
from ..wire.tensors import is_fingerprint
from ..wire.tensors import is_name as is_valid_name
from .gaussians import Gaussians

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
        return parse_run({**self.settings, **(more or {})})

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
    return changed == (None,) * 3 and head.own_mean == ALL


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
