"""Parsers of signed files, and of files of models and generators."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from benchmarks._fuzz_mutations import (
    of_json,
    of_message,
    of_tensors,
)
from benchmarks._fuzz_parser import REFUSES, Parser, of_file, pinned
from fedsurrogate.common import message_files
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import ConfigError, DataError, SealError, SurrogateError
from fedsurrogate.common.models.generators import fresh_generator, tensors_of
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security import documents
from fedsurrogate.common.security.documents import read_request
from fedsurrogate.common.security.sealing import new_key, open_sealed, public_key, seal, sign
from fedsurrogate.common.signed_models.signed_model import (
    PURPOSE,
    digest_of,
    read_signed_model,
    received_model,
    save_signed_model,
    sign_model,
    signed_values,
    unpack_gaussians,
)
from fedsurrogate.common.wire import records
from fedsurrogate.common.wire.generator_files import (
    manifest_of,
    pack_generator,
    read_generator,
    read_manifest,
    read_synthetic_set,
    write_synthetic_set,
)
from fedsurrogate.common.wire.model_proto import (
    load_model,
    pack_classifier,
    save_model,
)
from fedsurrogate.common.wire.records import unpack_bundle
from fedsurrogate.strategies.pooling.class_means import read_centre
from tests.pins import messages as pins


def signed_files() -> Iterator[Parser]:
    """Sealed relays, and files that are signed as a whole."""
    signed_file = of_message(pb.Bundle, {"manifest": of_json})
    request, south = pins._request(), new_key()
    keys = {"north": public_key(pins.SITE)}
    yield Parser(
        "bundle",
        lambda content: unpack_bundle(content, request, keys),
        REFUSES,
        pinned("bundle"),
        signed_file,
        partial(_signed_again, purpose=records.PURPOSE, private=pins.SITE),
    )
    for name, parse, private, purpose, allowed in (
        (
            "message request",
            message_files.unpack_request,
            pins.COORDINATOR,
            message_files.REQUEST,
            (ConfigError, SealError),
        ),
        (
            "message reply",
            message_files.unpack_reply,
            pins.SITE,
            message_files.REPLY,
            (SurrogateError, SealError),
        ),
    ):
        yield Parser(
            name,
            partial(parse, public=public_key(private)),  # type: ignore[operator]
            allowed,
            pinned(name),
            signed_file,
            partial(_signed_again, purpose=purpose, private=private),
        )
    yield Parser(
        "request by file",
        of_file(lambda file: read_request(file, public_key(pins.COORDINATOR)).run()),
        (ConfigError, SealError),
        [request.body()],
        of_json,
        _request_again,
    )
    sealed = seal(b"a relay", pins.SITE, {"south": public_key(south)}, b"context")
    yield Parser(
        "sealed chain message",
        lambda content: open_sealed(content, "south", south, keys["north"], b"context"),
        (SealError,),
        [sealed],
        of_message(pb.Sealed),
        _sealed_again,
    )


def _signed_again(content: bytes, purpose: bytes, private: bytes) -> bytes:
    message = pb.Bundle.FromString(content)
    whole = len(message.manifest).to_bytes(8, "big") + message.manifest + message.payload
    message.signature = sign(whole, private, purpose)
    return message.SerializeToString(deterministic=True)


def _request_again(body: bytes) -> bytes:
    with suppress(ValueError, RecursionError):
        body = (json.dumps(json.loads(body), indent=2, sort_keys=True) + "\n").encode()
    signature = sign(body, pins.COORDINATOR, documents.PURPOSE).hex()
    return documents.FIRST_LINE.encode() + signature.encode() + b"\n" + body


def _sealed_again(content: bytes) -> bytes:
    from fedsurrogate.common.security import sealing

    message = pb.Sealed.FromString(content)
    whole = sealing._signed(b"context", message)
    message.signature = sealing._halves(pins.SITE)[1].sign(whole)
    return message.SerializeToString(deterministic=True)


def model_files() -> Iterator[Parser]:
    """Files of models and generators, and the signed model in a message."""
    trusted = frozenset({public_key(pins.COORDINATOR)})
    privacy = pins.Privacy(epsilon=8.0, delta=2.0**-17, mechanism="sums")
    signed = [pins._signed(privacy), pins._signed(None)]
    quadratic = next(each for name, each in pins._classifiers() if name == "quadratic")
    facts = signed[1].manifest
    signed.append(sign_model(quadratic, None, facts, pins.COORDINATOR))
    yield Parser(
        "signed model",
        of_file(lambda file: read_signed_model(file, trusted)),
        (SurrogateError, SealError),
        [save_signed_model(each) for each in signed],
        of_tensors("manifest"),
        _model_again,
    )
    yield Parser(
        "signed model in a message",
        _received,
        (SurrogateError, SealError),
        [_sent(each) for each in signed],
        of_json,
        _values_again,
    )
    yield Parser(
        "gaussians",
        lambda content: unpack_gaussians(base64.b64encode(content).decode()),
        REFUSES,
        [base64.b64decode(text) for text in pinned("gaussians")],
        of_tensors(),
    )
    yield Parser(
        "model file",
        of_file(load_model),
        REFUSES,
        [_saved(partial(save_model, each)) for _, each in pins._classifiers()],
        of_tensors("classes"),
    )
    run = parse_run({"method": "dpcvae", "dpcvae.latent": 2, "dpcvae.hidden": 3, "classes": "a,b"})
    tensors = tensors_of(fresh_generator(run.settings, run.method.adversarial, 2, 5))
    header = replace(pins.HEADER, method="dpcvae", classes=("a", "b"))
    generator = pins.Generator(header, run, tensors)
    for name, read in (("generator", read_generator), ("manifest of a generator", read_manifest)):
        yield Parser(
            name, of_file(read), (DataError,), [pack_generator(generator)], of_tensors("manifest")
        )
    labels = torch.tensor([0, 1, 1])
    made = _saved(
        lambda file: write_synthetic_set(file, generator, labels, 0, manifest_of(generator))
    )
    yield Parser(
        "synthetic embeddings",
        of_file(read_synthetic_set),
        (DataError,),
        [made],
        of_tensors("manifest"),
    )
    public = save({"x": torch.rand(4, 5)})
    yield Parser(
        "public features",
        of_file(lambda file: read_centre(str(file), 1.0)),
        (ConfigError,),
        [public],
        of_tensors(),
    )


def _saved(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        write(file)
        return file.read_bytes()


def _model_again(content: bytes) -> bytes:
    """A changed model file whose digest and signature fit, where it is one."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        facts = json.loads(header["__metadata__"]["manifest"])
        facts["tensors"] = digest_of(load(content))
        header["__metadata__"] |= _signature_of(facts)
        text = json.dumps(header).encode()
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, RecursionError):
        return content
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _signature_of(facts: Any) -> dict[str, str]:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    signature = sign(text.encode(), pins.COORDINATOR, PURPOSE).hex()
    return {"manifest": text, "signature": signature, "key": public_key(pins.COORDINATOR).hex()}


def _sent(model: Any) -> bytes:
    payload = base64.b64encode(pack_classifier(model.classifier)).decode()
    return json.dumps({"payload": payload} | signed_values(model)).encode()


def _values_again(content: bytes) -> bytes:
    try:
        values = json.loads(content)
        facts = json.loads(values["manifest"])
        return json.dumps(values | _signature_of(facts)).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return content


def _received(content: bytes) -> object:
    """A message as Flower gives it: bytes, and texts and numbers by key."""
    try:
        values = json.loads(content)
        payload = base64.b64decode(str(values.pop("payload")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise SurrogateError("no message") from None
    info = {key: each for key, each in values.items() if isinstance(each, str | int | float)}
    return received_model(payload, info)
