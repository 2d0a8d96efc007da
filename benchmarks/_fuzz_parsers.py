"""Every parser of bytes that somebody else made: its valid samples, its one kind of exception, and
how its messages are changed.

`tests/benchmarks/test_fuzz.py` reads in the source which functions parse; each is reached by a
sample here, or stands in `OWN` with the reason why its bytes are nobody else's.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

from benchmarks._fuzz_mutations import (
    Change,
    of_bytes,
    of_json,
    of_message,
    of_tensors,
    of_text,
)
from client_app.methods.heads import distillation
from client_app.offline.keys import received_keys
from common import surrogate_pb2 as pb
from common.counting.counts_proto import unpack_counts
from common.errors import ConfigError, DataError, RunError, SealError, StateError, SurrogateError
from common.exchange import message_files
from common.models.generators import fresh_generator, tensors_of
from common.run import parse_run
from common.security import signed_requests
from common.security.receipts import parse_receipts
from common.security.sealing import new_key, open_sealed, public_key, read_keys, seal, sign
from common.security.signed_requests import read_request
from common.signed_models.making import received_model, signed_values
from common.signed_models.signed_model import (
    PURPOSE,
    digest_of,
    read_signed_model,
    save_signed_model,
    sign_model,
    unpack_gaussians,
)
from common.surrogates.surrogates import SumsSurrogate
from common.wire import bundles, sum_proto
from common.wire.bundles import signed_part, unpack_bundle
from common.wire.generator_files import (
    manifest_of,
    pack_generator,
    read_generator,
    read_manifest,
    read_synthetic_set,
    write_synthetic_set,
)
from common.wire.model_files import load_model, save_model
from common.wire.model_proto import (
    pack_classifier,
    unpack_classifier,
    unpack_parameters,
    unpack_relay,
    unpack_synthetic,
)
from common.wire.records import unpack_question, unpack_surrogate
from common.wire.validation import Expectation, check_surrogate
from server_app.runs.json_files import EVENTS, EventFile, read_json, read_object
from strategies.base.introductions import introduction
from strategies.base.registered import read_table
from strategies.base.training import Training
from strategies.pooling.public_mean import read_centre
from tests.pins import messages as pins

NO_CHANGE: Callable[[bytes], bytes] = lambda content: content  # noqa: E731


@dataclass(frozen=True)
class Parser:
    """A parser of foreign bytes.

    Attributes:
        name: of the kind of message.
        parse: the bytes.
        allowed: types of its exceptions, exactly.
        samples: valid bytes.
        change: of a sample.
        sealed: puts a valid signature on changed bytes, so that they get past the check of it.
    """

    name: str
    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    samples: Sequence[bytes]
    change: Change
    sealed: Callable[[bytes], bytes] = NO_CHANGE

    def case(self, seed: int, number: int) -> bytes:
        """The bytes of one case, the same at every call."""
        random = Random(f"{seed} {self.name} {number}")
        sample = self.samples[random.randrange(len(self.samples))]
        if random.random() < 0.15:
            return of_bytes(random, sample)
        changed = self.change(random, sample)
        return self.sealed(changed) if random.random() < 0.9 else changed


def parsers() -> list[Parser]:
    """All of them."""
    return [*_wire(), *_sums(), *_signed(), *_models(), *_texts(), *_folders()]


def of_file(read: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    """A reader of files as a parser of bytes."""

    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / name
            file.write_bytes(content)
            return read(file)

    return parse


REFUSES = (SurrogateError,)
RUN = parse_run({"classes": "a,b,c"})
PINNED = pins.messages()


def _pinned(*begins: str) -> list[bytes]:
    return [content for name, content in PINNED.items() if name.startswith(begins)]


def _wire() -> Iterator[Parser]:
    """What sites and coordinator send each other over the network."""
    surrogates = _pinned("surrogate", "loadings")
    honest = [each for each in surrogates if _is_sound(each)]
    relay = of_message(pb.Relay, {"surrogates": of_message(pb.Surrogate)})
    relays = [pb.Relay(surrogates=surrogates[at : at + 2]).SerializeToString() for at in range(6)]
    kinds: list[tuple[str, Any, Sequence[bytes], Any]] = [
        ("surrogate", unpack_surrogate, surrogates, of_message(pb.Surrogate)),
        ("checked surrogate", _checked_surrogate, honest, of_message(pb.Surrogate)),
        ("model", unpack_classifier, _pinned("model:"), of_message(pb.Classifier)),
        (
            "site's own head",
            partial(unpack_classifier, most=0),
            _pinned("model: head"),
            of_message(pb.Classifier),
        ),
        ("parameters", unpack_parameters, _pinned("parameters"), of_message(pb.Parameters)),
        ("synthetic records", unpack_synthetic, _pinned("synthetic"), of_message(pb.Synthetic)),
        ("counts", unpack_counts, _pinned("counts"), of_message(pb.Counts)),
        ("public centre", unpack_question, _pinned("public centre"), of_message(pb.Centre)),
        (
            "relay",
            lambda content: [unpack_surrogate(each) for each in unpack_relay(content)],
            relays,
            relay,
        ),
        ("introduction", _introduction, [_INTRODUCTION], of_json),
        (
            "classes of a run",
            lambda text: distillation._classes(
                SimpleNamespace(info={"classes": text.decode()})  # type: ignore[arg-type]
            ),
            [b'["a", "b"]'],
            of_json,
        ),
        (
            "receipts",
            lambda text: parse_receipts(text.decode("utf-8", "replace")),
            _pinned("receipts"),
            of_text,
        ),
    ]
    for name, parse, samples, change in kinds:
        yield Parser(name, parse, REFUSES, samples, change)


def _checked_surrogate(content: bytes) -> None:
    """As a coordinator reads one: structure, then numbers, for each kind of covariance."""
    surrogate = unpack_surrogate(content)
    family = pb.Surrogate.FromString(content).mixtures.covariance
    if isinstance(surrogate, SumsSurrogate):
        squares = surrogate.sums.squares
        whole = squares is not None and len(squares) > surrogate.dimension
        family = "spherical" if squares is None else "full" if whole else "diag"
    header = surrogate.header
    check_surrogate(surrogate, Expectation(header.method, header.run, family, 2**20, 2**20))


def _is_sound(content: bytes) -> bool:
    try:
        _checked_surrogate(content)
    except SurrogateError:
        return False
    return True


_INTRODUCTION = json.dumps(
    {"fingerprint": "f" * 64, "dimension": 8, "classes": '["a", "b"]', "key": "ab" * 64}
).encode()


def _introduction(content: bytes) -> object:
    try:
        info = json.loads(content)
    except (ValueError, RecursionError):
        raise SurrogateError("no values beside a payload") from None
    # As Flower gives it: texts and numbers by key.
    scalars = (
        {key: each for key, each in info.items() if isinstance(each, str | int | float)}
        if (isinstance(info, dict))
        else {}
    )
    return introduction("north", scalars)


def _sums() -> Iterator[Parser]:
    """Messages of secure sums, and what a site keeps of one."""
    delivery = of_message(pb.SumDelivery)
    kinds: list[tuple[str, Any, str, Any]] = [
        ("sum: member", sum_proto.unpack_member, "sum: member", of_message(pb.SumMember)),
        ("sum: key list", sum_proto.unpack_members, "sum: key list", of_message(pb.SumMembers)),
        ("sum: dealt", sum_proto.unpack_dealt, "sum: dealt", of_message(pb.SumDealt)),
        ("sum: delivery", sum_proto.unpack_delivery, "sum: delivery", delivery),
        ("sum: map", sum_proto.unpack_map, "sum: map", of_message(pb.PublicMap)),
        (
            "sum: masked",
            lambda content: sum_proto.unpack_masked(content, 9),
            "sum: masked",
            of_message(pb.MaskedSum),
        ),
        ("sum: total", sum_proto.unpack_total, "sum: total", of_message(pb.SumTotal)),
        ("sum: list", sum_proto.unpack_list, "sum: list", of_message(pb.SumList)),
        ("sum: revealed", sum_proto.unpack_revealed, "sum: revealed", of_message(pb.SumRevealed)),
        ("sum: spare", sum_proto.unpack_spare, "sum: revealed", of_message(pb.SumRevealed)),
    ]
    for name, parse, begins, change in kinds:
        yield Parser(name, parse, REFUSES, _pinned(begins), change)
    state = of_message(pb.SumState)
    yield Parser("sum: state", sum_proto.unpack_state, (StateError,), _pinned("sum: state"), state)


def _signed() -> Iterator[Parser]:
    """Sealed relays, and files that are signed as a whole."""
    signed_file = of_message(pb.Bundle, {"manifest": of_json})
    request, south = pins._request(), new_key()
    keys = {"north": public_key(pins.SITE)}
    yield Parser(
        "bundle",
        lambda content: unpack_bundle(content, request, keys),
        REFUSES,
        _pinned("bundle"),
        signed_file,
        partial(_signed_again, purpose=bundles.PURPOSE, private=pins.SITE),
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
            _pinned(name),
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
        "sealed relay",
        lambda content: open_sealed(content, "south", south, keys["north"], b"context"),
        (SealError,),
        [sealed],
        of_message(pb.Sealed),
        _sealed_again,
    )


def _signed_again(content: bytes, purpose: bytes, private: bytes) -> bytes:
    message = pb.Bundle.FromString(content)
    whole = signed_part(message.manifest, message.payload)
    message.signature = sign(whole, private, purpose)
    return message.SerializeToString(deterministic=True)


def _request_again(body: bytes) -> bytes:
    signature = sign(body, pins.COORDINATOR, signed_requests.PURPOSE).hex()
    return signed_requests.FIRST_LINE.encode() + signature.encode() + b"\n" + body


def _sealed_again(content: bytes) -> bytes:
    from common.security import sealing

    message = pb.Sealed.FromString(content)
    whole = sealing._signed(b"context", message)
    message.signature = sealing._halves(pins.SITE)[1].sign(whole)
    return message.SerializeToString(deterministic=True)


def _models() -> Iterator[Parser]:
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
        [base64.b64decode(text) for text in _pinned("gaussians")],
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
    tensors = tensors_of(fresh_generator(run, 2, 5))
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


def _texts() -> Iterator[Parser]:
    """Settings and keys."""
    key = public_key(pins.SITE).hex()
    yield Parser(
        "settings of a run",
        _settings,
        (ConfigError,),
        [json.dumps(each).encode() for each in _SETTINGS],
        of_json,
    )
    yield Parser(
        "file of keys",
        of_file(read_keys),
        (ConfigError,),
        [f'north = "{key}"\nsouth = "{"ab" * 64}"\n'.encode()],
        of_text,
    )
    node = SimpleNamespace(peers="")
    yield Parser(
        "keys of other sites",
        lambda text: received_keys(node, text.decode("utf-8", "replace")),  # type: ignore[arg-type]
        (SealError,),
        [json.dumps({"north": key, "south": "ab" * 64}).encode()],
        of_json,
    )


_SETTINGS: tuple[dict[str, object], ...] = (
    {"method": "fedpft", "epsilon": 1.0, "delta": 1e-5, "classes": "a,b", "fedpft.components": 3},
    {"method": "fedavg", "fedavg.rounds": 3, "backbone": "pixels", "image-size": 8, "seed": 1},
    {"method": "afl", "secure-sum": True, "classes": "a,b", "sites": 3, "device": "cpu"},
)


def _settings(content: bytes) -> object:
    try:
        flat = json.loads(content)
    except (ValueError, RecursionError):
        raise ConfigError("no settings") from None
    scalars = (
        {k: each for k, each in flat.items() if isinstance(each, str | int | float)}
        if (isinstance(flat, dict))
        else {}
    )
    return parse_run(scalars)


def _folders() -> Iterator[Parser]:
    """Files of a run folder that is read back, and of the coordinator's certificates."""
    table = {"sites": {"north": {"key": "ssh-ed25519 AAAA", "node": 7}}}
    yield Parser(
        "table of registered sites",
        of_file(read_table),
        (RunError,),
        [json.dumps(table).encode()],
        of_json,
    )
    run = parse_run({"method": "fedavg", "classes": "a,b", "fedavg.model": "linear"})
    training = Training.begin(run, ("a", "b"), "f" * 16, 4)
    yield Parser(
        "checkpoint",
        lambda content: Training.load(run, content, "checkpoint"),
        (RunError,),
        [training.save()],
        of_tensors("state"),
    )
    facts = json.dumps({"status": "ok", "sites": {"used": 3}, "accuracy": {"model": 0.5}}).encode()
    yield Parser(
        "metrics of a run",
        of_file(lambda file: read_json(file.parent, file.name)),
        (RunError,),
        [facts],
        of_json,
    )
    yield Parser(
        "metrics of any run", of_file(lambda file: read_object(file)), (), [facts], of_json
    )
    event = json.dumps({"time": 1.0, "event": "replied", "site": "north", "bytes": 5}).encode()
    yield Parser(
        "events of a run",
        of_file(lambda file: EventFile(file).read(to_the_end=True), EVENTS),
        (),
        [event + b"\n" + event + b"\n"],
        of_text,
    )
