"""One message of every kind, from fixed values: its bytes must not change, on any processor.

All numbers are such that nothing is rounded on the way: whole numbers below 2^11, powers of two,
and their logarithms. What needs random bytes (keys, nonces, shares) is made of fixed ones, or is
pinned as it was made once: RECORDED.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.client_app.governance.budget import Budget, Release, canonical, digest
from fedsurrogate.client_app.governance.ledger import CheckLogEntry, Ledger
from fedsurrogate.common.message_files import (
    MessageReply,
    MessageRequest,
    pack_reply,
    unpack_reply,
)
from fedsurrogate.common.message_files import pack_request as pack_message_request
from fedsurrogate.common.message_files import unpack_request as unpack_message_request
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network, Quadratic
from fedsurrogate.common.models.generators import Generator
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.accounting import GaussianEvent
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import SumState, signed_list
from fedsurrogate.common.secure_aggregation.secrets import (
    Dealt,
    Member,
    Secrets,
    announce,
    combine,
    list_digest,
    own_mask,
    pack_words,
    pair_masks,
    share_digest,
)
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.registrations import join_receipts, parse_receipts
from fedsurrogate.common.security.sealing import open_sealed, public_key, sign
from fedsurrogate.common.signed_models.gaussians import Gaussians, LowRankCovariance
from fedsurrogate.common.signed_models.signed_model import (
    Manifest,
    Privacy,
    SignedModel,
    pack_gaussians,
    save_signed_model,
    sign_model,
    unpack_gaussians,
)
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.covariances import (
    AnyCovariance,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
)
from fedsurrogate.common.surrogates.mixtures import Mixtures, PublicMap
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate, Surrogate, Synthetic
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.model_proto import (
    pack_classifier,
    pack_parameters,
    pack_relay,
    pack_synthetic,
    save_model,
    unpack_classifier,
    unpack_parameters,
    unpack_relay,
    unpack_synthetic,
)
from fedsurrogate.common.wire.records import (
    pack_bundle,
    pack_public_mean,
    pack_surrogate,
    to_record,
    unpack_bundle,
    unpack_public_mean,
    unpack_surrogate,
)
from fedsurrogate.common.wire.surrogate_proto import (
    Counts,
    centre_digest,
    pack_counts,
    pack_dealt,
    pack_delivery,
    pack_list,
    pack_map,
    pack_masked,
    pack_member,
    pack_members,
    pack_revealed,
    pack_state,
    pack_total,
    unpack_counts,
    unpack_dealt,
    unpack_map,
    unpack_member,
    unpack_members,
    unpack_state,
)
from tests.pins import site_messages

BEGINS = 24
SITE, COORDINATOR, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))
HEADER = Header("fedpft", "0123456789abcdef", "north", "f" * 16, ("a", "b", "c"))
TIME = "2026-01-02T03:04:05.678+00:00"
CLAIM = Mechanism(
    "sums",
    8.0,
    2.0**-17,
    "record",
    0.75,
    0.5,
    {"counts": (2.0, 1.0), "sums": (0.5, 1.0), "squares": (4.0, 1.0)},
)
# A sealed chain message from SITE to OTHER, as it was made once.
RECORDED = Path(__file__).parent / "recorded.json"


def numbers(*shape: int, start: int = 0) -> Tensor:
    """Powers of two of both signs and a few zeros, in an order without a pattern."""
    count = int(np.prod(shape))
    at = torch.arange(start, start + count, dtype=torch.float64)
    values = torch.exp2((at * 5 % 7) - 3) * torch.where(at * 3 % 5 < 2, -1.0, 1.0)
    return torch.where(at * 7 % 11 == 3, 0.0, values).float().reshape(shape)


def positive(*shape: int) -> Tensor:
    """Powers of two whose product is one."""
    at = torch.arange(int(np.prod(shape)), dtype=torch.float64)
    return torch.exp2(2 * (at * 3 % 4) - 3).float().reshape(shape)


def fingerprints() -> dict[str, dict[str, Any]]:
    """Of every message: number of bytes, SHA-256, and the first bytes."""
    return {
        name: {
            "bytes": len(each),
            "sha256": hashlib.sha256(each).hexdigest(),
            "begins": each[:BEGINS].hex(),
        }
        for name, each in (messages() | dict(site_messages.messages())).items()
    }


def messages() -> dict[str, bytes]:
    """The bytes of every kind of message, and of the files that last."""
    return dict(
        (*_surrogates(), *_models(), *_training(), *_files(), *_sums(), *_ledger(), *_records())
    )


def read_back() -> dict[str, bytes]:
    """The same bytes, read and written again, of all kinds that the product reads."""
    found, readers = messages(), dict(_readers())
    return {
        name: reader(content)
        for name, content in found.items()
        for kind, reader in readers.items()
        if name.startswith(kind)
    }


def _readers() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    yield "surrogate", lambda content: pack_surrogate(unpack_surrogate(content), 16)
    yield "model", lambda content: pack_classifier(unpack_classifier(content))
    yield "parameters", lambda content: pack_parameters(unpack_parameters(content))
    yield "synthetic", lambda content: pack_synthetic(unpack_synthetic(content))
    yield "relay", lambda content: pack_relay(unpack_relay(content))
    yield "counts", lambda content: pack_counts(unpack_counts(content))
    yield "public mean", lambda content: pack_public_mean(unpack_public_mean(content)) or b""
    yield "gaussians", lambda content: pack_gaussians(unpack_gaussians(content.decode())).encode()
    yield "receipts", lambda content: join_receipts(parse_receipts(content.decode())).encode()
    yield (
        "message request",
        lambda c: pack_message_request(
            unpack_message_request(c, public_key(COORDINATOR)), COORDINATOR
        ),
    )
    yield "message reply", lambda content: pack_reply(unpack_reply(content, public_key(SITE)), SITE)
    yield "sum: member", lambda content: pack_member(unpack_member(content))
    yield "sum: key list", lambda content: pack_members(*unpack_members(content))
    yield "sum: dealt", lambda content: pack_dealt(unpack_dealt(content))
    yield "sum: map", lambda content: pack_map(unpack_map(content))
    yield "sum: state", lambda content: pack_state(unpack_state(content))
    yield (
        "bundle",
        lambda content: _bundle(
            unpack_bundle(content, _request(), {"north": public_key(SITE)}).payload
        ),
    )


def opened() -> dict[str, str]:
    """What today's code reads in messages that were made once with random bytes."""
    recorded = json.loads(RECORDED.read_text())
    sealed = bytes.fromhex(recorded["sealed"])
    shares = {int(place): bytes.fromhex(share) for place, share in recorded["shares"].items()}
    return {
        "sealed": open_sealed(sealed, "south", OTHER, public_key(SITE), b"context").decode(),
        "shares": combine(shares).hex(),
    }


def _mixtures(covariance: AnyCovariance) -> Mixtures:
    labels = torch.tensor([0, 0, 1, 2])
    return Mixtures(
        torch.tensor([6, 1, 30]),
        labels,
        torch.tensor([0.25, 0.75, 1.0, 1.0]),
        numbers(4, 4),
        covariance,
    )


def _surrogates() -> Iterator[tuple[str, bytes]]:
    triangular = torch.eye(4) * torch.exp2(torch.arange(4.0)) + torch.ones(4, 4).tril(-1) / 4
    families: dict[str, AnyCovariance] = {
        "spherical": Spherical(positive(4)),
        "diag": Diagonal(positive(4, 4)),
        "full": Full(triangular.expand(4, 4, 4).clone()),
        "lowrank": LowRank(numbers(4, 2), positive(4)),
        "gram": Gram(4 * torch.eye(4) + torch.ones(4, 4).tril(-1) + torch.ones(4, 4).triu(1)),
    }
    for name, covariance in families.items():
        yield f"surrogate {name}", pack_surrogate(Surrogate(HEADER, _mixtures(covariance)))
    yield (
        "surrogate spherical, with a claim",
        pack_surrogate(
            Surrogate(
                HEADER,
                _mixtures(families["spherical"]),
                replace(CLAIM, name="dp-em", centre="0f" * 8),
            )
        ),
    )
    loadings = LowRank(
        torch.tensor([[127.0, 8.0], [-64.0, 1.0], [1.0, -4.0], [0.0, 2.0]]), positive(4) + 4096
    )
    yield "loadings of 8 bits", pack_surrogate(Surrogate(HEADER, _mixtures(loadings)), 8)
    for name, squares in (
        ("spherical", None),
        ("diag", numbers(4, start=3)),
        ("full", numbers(10, start=3)),
    ):
        noise = {
            key: value
            for key, value in CLAIM.noise.items()
            if key != "squares" or squares is not None
        }
        claim = replace(CLAIM, noise=noise, unit="patient")
        sums = Sums(
            numbers(3, start=1),
            numbers(3, 4),
            squares,
            {key: sigma for key, (sigma, _) in noise.items()},
        )
        yield f"surrogate of sums, {name}", pack_surrogate(SumsSurrogate(HEADER, sums, claim))
    yield "public mean", pack_public_mean(numbers(4, start=2)) or b""
    yield "digest of a public mean", centre_digest(numbers(4, start=2)).encode()
    tables = {
        "decisions": torch.tensor([[5, -2], [0, 70000]]),
        "scores": torch.arange(8).reshape(1, 2, 4),
    }
    for name, claim in (
        ("exact", None),
        ("noisy", replace(CLAIM, name="counts", clip=0.0, noise={"scores": (2.0, 1.5)})),
    ):
        yield (
            f"counts, {name}",
            pack_counts(Counts(replace(HEADER, method="evaluation"), tables, claim)),
        )


def _classifiers() -> Iterator[tuple[str, Classifier]]:
    head = Head(HEADER, numbers(3, 4), numbers(3, start=5))
    yield "head", head
    yield "head with clip and centre", replace(head, clip=0.5, centre=numbers(4, start=9))
    yield (
        "head with a projection",
        replace(head, weight=numbers(3, 2), projection=numbers(2, 4, start=4)),
    )
    yield "ensemble", Ensemble((head, replace(head, bias=numbers(3, start=6))))
    yield (
        "quadratic, diagonal",
        Quadratic(HEADER, numbers(3, 4), positive(3, 4), numbers(3, start=2).double()),
    )
    yield (
        "quadratic",
        Quadratic(HEADER, numbers(3, 4), numbers(3, 4, 4), numbers(3, start=2).double()),
    )
    yield (
        "linear network",
        Network(HEADER, "linear", 4, {"weight": numbers(3, 4), "bias": numbers(3)}),
    )
    out = {"linear.weight": numbers(3, 2), "linear.bias": numbers(3)}
    yield (
        "mlp",
        Network(
            HEADER, "mlp", 4, {"hidden.weight": numbers(2, 4), "hidden.bias": numbers(2), **out}
        ),
    )


def _models() -> Iterator[tuple[str, bytes]]:
    for name, model in _classifiers():
        yield f"model: {name}", pack_classifier(model)
        yield f"file of a {name}", _saved(lambda file, model=model: save_model(model, file))  # type: ignore[misc]
    for name, privacy in (
        (
            "private",
            Privacy(epsilon=8.0, delta=2.0**-17, mechanism="sums", relation="add or remove one"),
        ),
        ("not private", None),
    ):
        signed = _signed(privacy)
        yield f"manifest of a signed model, {name}", signed.manifest.signed_bytes()
        yield f"signature of a signed model, {name}", signed.signature
        yield f"file of a signed model, {name}", _tensors(save_signed_model(signed))
    yield "gaussians", pack_gaussians(_gaussians()).encode()
    run = parse_run({"method": "dpcvae", "dpcvae.latent": 2, "classes": "a,b,c"})
    tensors = {"mean.weight": numbers(4, 5), "mean.bias": numbers(4)}
    yield (
        "file of a generator",
        _tensors(pack_generator(Generator(replace(HEADER, method="dpcvae"), run, tensors))),
    )


def _gaussians() -> Gaussians:
    parts = [
        LowRankCovariance(torch.eye(4)[:2] * sign, positive(2), torch.tensor([0.5]))
        for sign in (1, -1)
    ]
    return Gaussians(numbers(3, 4), numbers(4, start=2), parts[0], parts[1])


def _signed(privacy: Privacy | None) -> SignedModel:
    manifest = Manifest(
        name="20260102-fedpft-01234567",
        created="2026-01-02",
        method="fedpft",
        run=HEADER.run,
        flower_run="77",
        fingerprint=HEADER.fingerprint,
        classes=["a", "b", "c"],
        dimension=4,
        settings={"backbone": "pixels", "image-size": 2, "features.power-transform": 0.5},
        form={},
        sites=3,
        privacy=privacy,
        gaussians="" if privacy else "without privacy",
        tensors="0" * 64,
    )
    head = Head(HEADER, numbers(3, 4), numbers(3, start=5), 0.5)
    return sign_model(head, _gaussians() if privacy else None, manifest, COORDINATOR)


def _training() -> Iterator[tuple[str, bytes]]:
    header = replace(HEADER, method="fedavg")
    layers = {
        "weight": numbers(3, 4, start=1),
        "bias": numbers(3),
        "control.bias": numbers(3, start=7),
    }
    yield "parameters", pack_parameters(Parameters(header, 2, layers, 40))
    sparse = torch.where(torch.arange(40) % 3 == 0, numbers(40), 0.0).reshape(4, 10)
    sgd = replace(CLAIM, name="dp-sgd", noise={"gradients": (0.75, 0.5)})
    yield (
        "parameters, sparse and private",
        pack_parameters(Parameters(header, 1, {"weight": sparse}, 0, sgd)),
    )
    images = Synthetic(
        replace(HEADER, method="fedlap"), 3, numbers(4, 4), torch.tensor([0, 0, 1, 2]), 2.5, 40
    )
    yield "synthetic records", pack_synthetic(images)
    yield "synthetic records, private", pack_synthetic(replace(images, records=0, claim=sgd))
    yield "relay", pack_relay([b"one", b"", b"three"])


def _request() -> Request:
    settings = {
        "method": "fedpft",
        "epsilon": 8.0,
        "delta": 1e-5,
        "classes": "a,b,c",
        "seed": 7,
        "compare": False,
    }
    return Request("0123456789abcdef", settings, b"centre", "2999-12-31", {"north": "receipt"})


def _bundle(payload: bytes) -> bytes:
    ledger = {
        key: value
        for key, value in asdict(_release(1)).items()
        if key not in ("facts", "flower_run")
    }
    return pack_bundle(_request(), "north", payload, ledger, SITE)


def _files() -> Iterator[tuple[str, bytes]]:
    yield "request by file", _request().signed(COORDINATOR)
    yield "bundle", _bundle(b"payload")
    settings = {"method": "fedavg", "fedavg.rounds": 2}
    info = {"round": 1, "run": HEADER.run, "share": 0.5, "final": True, "places": [1, 2]}
    asked = MessageRequest(
        "ab" * 32, "77", "north", "train", settings, info, "2999-12-31", b"payload"
    )
    yield "message request", pack_message_request(asked, COORDINATOR)
    yield (
        "message request without a payload",
        pack_message_request(replace(asked, payload=None), COORDINATOR),
    )
    reply = MessageReply("ab" * 32, "cd" * 32, "north", {"status": "ok", "bytes": 7}, b"payload")
    yield "message reply", pack_reply(reply, SITE)
    yield "public key", public_key(SITE)
    yield "signature", sign(b"content", SITE, b"purpose")


def _members() -> tuple[dict[str, Secrets], tuple[Member, ...]]:
    secrets, members = {}, []
    for number, (name, private) in enumerate(
        (("north", SITE), ("south", OTHER), ("west", COORDINATOR)), 1
    ):
        secrets[name] = Secrets(
            bytes([16 * number]) * 16, bytes([16 * number + 1]) * 32, bytes([16 * number + 2]) * 16
        )
        members.append(announce(name, secrets[name], private, public_key(private), b"context"))
    return secrets, tuple(members)


def _sums() -> Iterator[tuple[str, bytes]]:
    secrets, members = _members()
    seen = list_digest(members, b"context")
    by_name = {member.site: member for member in members}
    yield "sum: member", pack_member(members[0])
    yield "sum: key list", pack_members(members, b"m" * 32)
    yield "sum: digest of the key list", seen
    yield "sum: own mask", pack_words(own_mask(secrets["north"].blind, seen, 9))
    for name in by_name:
        masks = pair_masks(
            name, secrets[name].masking, by_name, sorted(by_name.keys() - {name}), seen, 9
        )
        yield f"sum: pair masks of {name}", pack_words(masks)
    yield "sum: digest of a share", share_digest(b"s" * 17, "north", "south", "blind", seen)
    digests = {name: {"blind": b"b" * 32, "masking": b"k" * 32} for name in by_name}
    dealt = Dealt(
        "north",
        dict.fromkeys(by_name, b"c" * 50),
        digests,
        {"blind": b"B" * 32, "masking": b"K" * 32},
        seen,
    )
    yield "sum: dealt", pack_dealt(dealt)
    yield "sum: delivery", pack_delivery([dealt], "south", b"map")
    yield "sum: map", pack_map(PublicMap(numbers(2, 4), numbers(4)))
    yield "sum: signed list", signed_list(seen, ("north", "south"))
    words = (np.arange(9, dtype=np.uint64) * 1_234_567_891 % 2**32).astype(np.uint32)
    distributed = replace(CLAIM, name="secure-aggregation")
    yield "sum: masked", pack_masked(HEADER, words, distributed)
    yield (
        "sum: total",
        pack_total(replace(HEADER, site="coordinator"), ["north", "south"], words, None),
    )
    yield "sum: list", pack_list(["south", "north"], {"south": b"s" * 64, "north": b"n" * 64})
    shares = {
        "south": {"blind": b"1" * 17, "masking": b"2" * 17},
        "north": {"blind": b"3" * 17, "masking": b"4" * 17},
    }
    revealed = {
        kind: {name: both[kind] for name, both in shares.items()} for kind in ("blind", "masking")
    }
    yield "sum: revealed", pack_revealed(revealed, b"p" * 32)
    state = SumState(
        "north",
        b"context",
        "agreed",
        secrets["north"],
        members,
        shares,
        ("north", "south"),
        b"m" * 32,
        b"p" * 32,
    )
    yield "sum: state", pack_state(state)


def _release(number: int) -> Release:
    return Release(
        run=HEADER.run,
        flower_run="77",
        method="fedpft",
        round=number,
        mechanism="sums",
        events=(GaussianEvent(4.0, 0.5, 3),) if number == 1 else (),
        unit="patient",
        epsilon=8.0,
        delta=1e-5,
        sigmas={"counts": 2.0, "sums": 0.5},
        sensitivities={"counts": 1.0, "sums": 1.0},
        facts={"clipped": 0.25},
        bytes=492,
        sha256="ab" * 32,
        sample_rate=0.5,
        disclosure="disclosures/x",
        rounds=1,
    )


def _ledger() -> Iterator[tuple[str, bytes]]:
    """The lines of a ledger that was opened, charged twice and reopened, all at one time, with
    hashes to match.
    """
    with tempfile.TemporaryDirectory() as folder:
        ledger, budget = (
            Ledger(Path(folder), "0011223344556677"),
            Budget(1e6, 1e-5, 1e6, after_open=True),
        )
        ledger.open()
        for number in (1, 2):
            ledger.charge(_release(number), budget)
        ledger.reopen("a person's reason", 0.0, 1e-5)
        content = [
            *(next(Path(folder).glob("*.jsonl.*"))).read_bytes().splitlines(),
            *ledger.path.read_bytes().splitlines()[1:],
        ]
        head = ledger.head.read_text().split()
        assert head == ["2", json.loads(content[-1])["hash"]], (
            "number of entries, and the last hash"
        )
    previous, names = "", ("header", "release", "release without privacy", "decision")
    for name, line in zip(names, content, strict=True):
        entry = json.loads(line)
        assert (
            line
            == json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
            == canonical(entry)
        )
        assert entry["hash"] == digest(entry)
        entry |= {"time": TIME, "previous": previous} | (
            {"aside": {}} if name == "decision" else {}
        )
        previous = digest(entry)
        yield f"ledger: {name}", canonical(entry | {"hash": previous}) + b"\n"
    check_log = CheckLogEntry(1_767_322_800, 3, previous, "5a" * 32)
    receipts = [check_log.receipt(3, previous), replace(check_log, opened=5).receipt(2, "ab" * 32)]
    yield "receipts", join_receipts(receipts).encode()


def _records() -> Iterator[tuple[str, bytes]]:
    info = {
        "run": HEADER.run,
        "round": 2,
        "share": 0.5,
        "final": True,
        "places": [1, 2],
        "empty": "",
        "bytes": 7,
    }
    record = to_record(b"payload", info)
    shown = {name: dict(each) for name, each in record.config_records.items()}
    for name, arrays in record.array_records.items():
        shown[name] = {
            key: [a.dtype, list(a.shape), a.stype, a.data.hex()] for key, a in arrays.items()
        }
    yield "record of Flower", json.dumps(shown, sort_keys=True).encode()


def _saved(save: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save(file)
        return _tensors(file.read_bytes())


def _tensors(content: bytes) -> bytes:
    """A safetensors file with its metadata in alphabetical order: the library writes them in any
    order.
    """
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return json.dumps(header, sort_keys=True).encode() + b"\n" + content[8 + length :]
