"""The model of an evaluation as the bytes that every site receives."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.limits import LARGEST_PRIVATE
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.settings import CountingSettings
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.common.wire.model_files import load_model
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.strategies.base.collection import Recorder

MODEL_FILE = "evaluated.pb"


def evaluated_payload(counting: CountingSettings, recorder: Recorder) -> bytes | None:
    """The bytes of the model that a run evaluates, kept in its folder.

    Args:
        counting: settings, which name the file and the digest of the model.
        recorder: of the run folder.

    Returns:
        The bytes; None if the run evaluates no model.

    Raises:
        RunError: unless the file holds the model that the settings name.
    """
    if counting.kind != "evaluation":
        return None
    payload, digest = payload_of(read_model(Path(counting.model).expanduser()))
    if digest != counting.digest:
        raise RunError(
            f"counting.model = {counting.model!r} is not the model that counting.digest names"
        )
    recorder.keep(MODEL_FILE, payload)
    return payload


def read_model(file: Path) -> Classifier:
    """The model in a file.

    Args:
        file: a signed file, model.safetensors of a run, or its bytes in a `.pb`.

    Raises:
        RunError, ConfigError: when the model cannot be read.
    """
    try:
        if file.suffix == ".pb":
            return unpack_classifier(file.read_bytes())
        return read_signed_model(file).classifier if file.suffix == SUFFIX else load_model(file)
    except (SurrogateError, OSError) as error:
        raise RunError(f"the model {str(file)!r} cannot be read: {error}") from None


def payload_of(model: Classifier) -> tuple[bytes, str]:
    """The bytes of a model at 16 bits.

    Args:
        model: a linear head is brought within the limit of private runs, as in `bounded`.

    Returns:
        The bytes, and their SHA-256 in hexadecimal.

    Raises:
        RunError: for a model of another target than classes that is beyond the limit: its numbers
            have a scale.
    """
    payload = pack_classifier(bounded(model) if isinstance(model, Head) else model)
    return payload, hashlib.sha256(payload).hexdigest()


def bounded(head: Head) -> Head:
    """A head that decides the same, divided by a power of two until sites accept its numbers in a
    private run.

    Noise that was subtracted from a covariance can leave variances near zero, and so weights beyond
    `LARGEST_PRIVATE`. The order of the scores of two classes stays the same; with more classes,
    probabilities become less extreme.

    Args:
        head: weight (C, d) and bias (C,).
    """
    largest = max(float(each.abs().max()) for each in (head.weight, head.bias))
    if not LARGEST_PRIVATE <= largest < math.inf:
        return head
    if head.target:
        raise RunError(
            f"a model with the number {largest:.3g}, and private runs take none from "
            f"{LARGEST_PRIVATE:g}; scale the features, and learn the model again"
        )
    factor = 2.0 ** -(math.floor(math.log2(largest / LARGEST_PRIVATE)) + 1)
    return replace(head, weight=head.weight * factor, bias=head.bias * factor)
