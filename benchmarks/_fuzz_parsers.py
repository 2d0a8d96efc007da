"""Every parser of bytes that another party made: its valid samples, its one kind of exception, and
how its messages are changed.

`tests/benchmarks/test_fuzz.py` reads in the source which functions parse; each is reached by a
sample here, or stands in `OWN` with the reason why no other party makes its bytes.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import struct
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from benchmarks._fuzz_files import model_files, signed_files
from benchmarks._fuzz_mutations import (
    of_bytes,
    of_json,
    of_message,
    of_tensors,
    of_text,
)
from benchmarks._fuzz_parser import REFUSES, Parser, of_file, pinned
from fedsurrogate.client_app.methods import local_training as distillation
from fedsurrogate.client_app.offline.keys import received_keys
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.data_report import DataReport, Loss, reports_from
from fedsurrogate.common.errors import ConfigError, RunError, SealError, StateError, SurrogateError
from fedsurrogate.common.files import read_json
from fedsurrogate.common.flower.parts import ARRAY, PIECE, check_contents, settings_only
from fedsurrogate.common.flower.v142_fleet import read_fleet_request, signing_key
from fedsurrogate.common.models.class_metrics import (
    ModelQuality,
    packed_quality,
    quality_of,
    unpacked_quality,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Proposal, SignedProposal, read_setting
from fedsurrogate.common.security.enrolment import CURVE, new_request, read_request
from fedsurrogate.common.security.registrations import parse_receipts, read_table
from fedsurrogate.common.security.sealing import public_key, read_keys
from fedsurrogate.common.signed_models.signed_model import settings_of_run
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate
from fedsurrogate.common.targets.metrics import METRIC_VALUES, checked_target
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.model_proto import (
    unpack_classifier,
    unpack_parameters,
    unpack_relay,
    unpack_synthetic,
)
from fedsurrogate.common.wire.records import unpack_public_mean, unpack_surrogate
from fedsurrogate.common.wire.surrogate_proto import unpack_counts
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate
from fedsurrogate.server_app.runs.state import EVENTS, EventFile, read_object
from fedsurrogate.strategies.base.identifications import identification
from fedsurrogate.strategies.base.outcome import metric_values_in
from fedsurrogate.strategies.base.training import Training
from tests.pins import messages as pins


def parsers() -> list[Parser]:
    """All of them."""
    return [*_wire(), *_sums(), *signed_files(), *model_files(), *_texts(), *_folders(), *_flower()]


def _wire() -> Iterator[Parser]:
    """What sites and coordinator send each other over the network."""
    surrogates = pinned("surrogate", "loadings")
    honest = [each for each in surrogates if _is_sound(each)]
    relay = of_message(pb.Relay, {"surrogates": of_message(pb.Surrogate)})
    relays = [pb.Relay(surrogates=surrogates[at : at + 2]).SerializeToString() for at in range(6)]
    kinds: list[tuple[str, Any, Sequence[bytes], Any]] = [
        ("surrogate", unpack_surrogate, surrogates, of_message(pb.Surrogate)),
        ("checked surrogate", _checked_surrogate, honest, of_message(pb.Surrogate)),
        ("model", unpack_classifier, pinned("model:"), of_message(pb.Classifier)),
        (
            "site's own head",
            partial(unpack_classifier, most=0),
            pinned("model: head"),
            of_message(pb.Classifier),
        ),
        ("parameters", unpack_parameters, pinned("parameters"), of_message(pb.Parameters)),
        ("synthetic records", unpack_synthetic, pinned("synthetic"), of_message(pb.Synthetic)),
        ("counts", unpack_counts, pinned("counts"), of_message(pb.Counts)),
        ("public mean", unpack_public_mean, pinned("public mean"), of_message(pb.Centre)),
        (
            "relay",
            lambda content: [unpack_surrogate(each) for each in unpack_relay(content)],
            relays,
            relay,
        ),
        ("identification", _identification, [_IDENTIFICATION], of_json),
        ("frame of columns", Frame.of, [_FRAME], of_bytes),
        (
            "target of a model",
            lambda text: checked_target(text.decode("utf-8", "replace"), ("age",)),
            [
                b'{"name": "regression", "columns": ["age"], "deviation": [2.0]}',
                b'{"name": "multilabel", "columns": ["age"], "prevalence": [0.5]}',
                b'{"name": "survival", "columns": [], "edges": [0, 1, 2], "hazard": [0.1, 0.2]}',
            ],
            of_json,
        ),
        (
            "measures of a target",
            lambda text: metric_values_in({METRIC_VALUES: text.decode("utf-8", "replace")}),
            [b'{"regression.0.age.records": 3, "regression.0.age.absolute": 2.5}'],
            of_json,
        ),
        (
            "measures of a simulated model",
            lambda text: unpacked_quality(text.decode("utf-8", "replace")),
            [_QUALITY],
            of_json,
        ),
        (
            "classes of a run",
            lambda text: distillation._classes({"classes": text.decode("utf-8", "replace")}),
            [b'["a", "b"]'],
            of_json,
        ),
        (
            "receipts",
            lambda text: parse_receipts(text.decode("utf-8", "replace")),
            pinned("receipts"),
            of_text,
        ),
    ]
    for name, parse, samples, change in kinds:
        yield Parser(name, parse, REFUSES, samples, change)


_SCORES, _LABELS = torch.eye(3).repeat(12, 1), torch.arange(36) % 3
_QUALITY = packed_quality(
    cast(ModelQuality, quality_of(_SCORES, _LABELS, ("a", "b", "c"), None))
).encode()


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


# One column, 3 away from zero and of deviation 2.
_FRAME = struct.pack("<2f", 3.0, 2.0)
_IDENTIFICATION = json.dumps(
    {"fingerprint": "f" * 64, "dimension": 8, "classes": '["a", "b"]', "key": "ab" * 64}
    | {"frame": base64.b64encode(8 * _FRAME).decode()}
).encode()


def _identification(content: bytes) -> object:
    try:
        info = json.loads(content)
    except (ValueError, RecursionError):
        raise SurrogateError("no values with a payload") from None
    # As Flower gives it: texts and numbers by key.
    scalars = (
        {key: each for key, each in info.items() if isinstance(each, str | int | float)}
        if (isinstance(info, dict))
        else {}
    )
    return identification("north", scalars)


def _sums() -> Iterator[Parser]:
    """Messages of secure aggregation, and what a site keeps of one."""
    delivery = of_message(pb.SumDelivery)
    kinds: list[tuple[str, Any, str, Any]] = [
        ("sum: member", surrogate_proto.unpack_member, "sum: member", of_message(pb.SumMember)),
        (
            "sum: key list",
            surrogate_proto.unpack_members,
            "sum: key list",
            of_message(pb.SumMembers),
        ),
        ("sum: dealt", surrogate_proto.unpack_dealt, "sum: dealt", of_message(pb.SumDealt)),
        ("sum: delivery", surrogate_proto.unpack_delivery, "sum: delivery", delivery),
        ("sum: map", surrogate_proto.unpack_map, "sum: map", of_message(pb.PublicMap)),
        (
            "sum: masked",
            lambda content: surrogate_proto.unpack_masked(content, 9),
            "sum: masked",
            of_message(pb.MaskedSum),
        ),
        ("sum: list", surrogate_proto.unpack_list, "sum: list", of_message(pb.SumList)),
        (
            "sum: revealed",
            surrogate_proto.unpack_revealed,
            "sum: revealed",
            of_message(pb.SumRevealed),
        ),
        ("sum: spare", surrogate_proto.unpack_spare, "sum: revealed", of_message(pb.SumRevealed)),
    ]
    for name, parse, begins, change in kinds:
        yield Parser(name, parse, REFUSES, pinned(begins), change)
    state = of_message(pb.SumState)
    yield Parser(
        "sum: state", surrogate_proto.unpack_state, (StateError,), pinned("sum: state"), state
    )


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
    proposal = SignedProposal(Proposal.fresh("run", _SETTINGS[0], "a test", 30)).sign(pins.SITE)  # type: ignore[arg-type]
    yield Parser(
        "proposal",
        _proposal,
        (ConfigError,),
        [proposal.text().encode()],
        of_json,
    )
    yield Parser(
        "request to take part",
        read_request,
        (ConfigError,),
        [new_request("north", "St. Mary", "it@mary.example", ec.derive_private_key(7, CURVE()))],
        of_bytes,
    )
    yield Parser(
        "request of a SuperNode over HTTP",
        lambda content: read_fleet_request("/v1/fleet/push-messages", content, b"key"),
        REFUSES,
        # Node 7 sends a message whose sender is node 7.
        [b"\n\x02\x08\x07\x12\x04\n\x02\x18\x07"],
        of_bytes,
    )
    yield Parser(
        "signed headers of HTTP",
        lambda content: signing_key(content.split(b" "), _SIGNED),
        (),
        [_signed_headers()],
        of_bytes,
    )
    node = SimpleNamespace(peers="")
    yield Parser(
        "keys of other sites",
        lambda text: received_keys(node, text.decode("utf-8", "replace")),  # type: ignore[arg-type]
        (SealError,),
        [json.dumps({"north": key, "south": "ab" * 64}).encode()],
        of_json,
    )


_SIGNED = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def _signed_headers() -> bytes:
    """Key, signature and time, as a SuperNode sends them."""
    key = ec.derive_private_key(7, ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    time = _SIGNED.isoformat().encode()
    signature = key.sign(time, ec.ECDSA(SHA256()))
    return b" ".join((base64.b64encode(public), base64.b64encode(signature), time))


def _proposal(text: bytes) -> object:
    """As a site reads one: what it allows, and who has signed."""
    signed = read_setting(base64.b64encode(text).decode())
    return signed.proposal.digest(), signed.signers({"north": public_key(pins.SITE)})


_SETTINGS: tuple[dict[str, object], ...] = (
    {"method": "fedpft", "epsilon": 1.0, "delta": 1e-5, "classes": "a,b", "fedpft.components": 3},
    {"method": "fedavg", "fedavg.rounds": 3, "backbone": "pixels", "image-size": 8, "seed": 1},
    {
        "fedpft.covariance": "gram",
        "secure-aggregation": True,
        "classes": "a,b",
        "sites": 3,
        "device": "cpu",
    },
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
        "settings of a run folder",
        of_file(lambda file: settings_of_run(file.parent), "manifest.json"),
        (RunError, ConfigError),
        [json.dumps({"config": {"method": "fedavg", "seed": 3}}).encode()],
        of_json,
    )
    yield Parser(
        "metrics of any run", of_file(lambda file: read_object(file)), (), [facts], of_json
    )
    report = DataReport("x-rays", 8, (Loss("2 labels are blank", 2),), ("no record of 'a'",))
    yield Parser(
        "data reports of a simulated site",
        lambda content: reports_from(content.decode(errors="replace")),
        (),
        [json.dumps([report.facts()]).encode()],
        of_json,
    )
    event = json.dumps({"time": 1.0, "event": "replied", "site": "north", "bytes": 5}).encode()
    yield Parser(
        "events of a run",
        of_file(lambda file: EventFile(file).read(to_the_end=True), EVENTS),
        (),
        [event + b"\n" + event + b"\n"],
        of_text,
    )


def _flower() -> Iterator[Parser]:
    """Parts of Flower's messages, and packed apps, of which a site reads the settings."""
    size = 2**16
    piece, above = bytes(size), f"{ARRAY} {'0' * 64} ".encode()
    contents = {"0" * 64: f"{PIECE}  {size}".encode() + b"\0" + piece}

    def part(content: bytes) -> None:
        stated = above + str(len(content)).encode() + b"\0" + content
        check_contents(contents | {"array": stated}, 8 * size)

    array = {"dtype": "uint8", "shape": [2 * size], "stype": "x", "arraychunk_ids": [0, 0]}
    yield Parser(
        "an array of pieces", part, (SurrogateError,), [json.dumps(array).encode()], of_json
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", "[tool.flwr.app]\n" * 100)
    yield Parser(
        "settings of a packed app", settings_only, (SurrogateError,), [packed.getvalue()], of_bytes
    )
