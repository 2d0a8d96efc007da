"""A bundle is read only if its site signed exactly it for this request; all others are refused with
a reason.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.models.classifiers import Ensemble, Head
from fedsurrogate.common.models.generators import Generator, fresh_generator, tensors_of
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, clip, with_noise
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from fedsurrogate.common.surrogate_pb2 import Bundle
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import (
    pack_generator,
    read_generator,
    write_synthetic_set,
)
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import (
    PURPOSE,
    VERSION,
    pack_bundle,
    unpack_bundle,
)

SITE, PAYLOAD = new_key(), b"a surrogate"
KEYS = {"north": public_key(SITE)}
REQUEST = Request.fresh({}, None)
MANIFEST: dict[str, Any] = {
    "version": VERSION,
    "request": REQUEST.id,
    "request-sha256": REQUEST.digest(),
    "run": REQUEST.run().digest,
    "site": "north",
    "bytes": len(PAYLOAD),
    "sha256": hashlib.sha256(PAYLOAD).hexdigest(),
    "ledger": {},
}


def signed(manifest: object) -> bytes:
    """A bundle with any manifest, signed by the site itself."""
    text = manifest
    if not isinstance(text, bytes):
        text = json.dumps(manifest, sort_keys=True).encode()
    content = len(text).to_bytes(8, "big") + text + PAYLOAD
    return Bundle(
        manifest=text, payload=PAYLOAD, signature=sign(content, SITE, PURPOSE)
    ).SerializeToString(deterministic=True)


def test_what_a_site_packs_is_read_back_whole() -> None:
    assert pack_bundle(REQUEST, "north", PAYLOAD, {}, SITE) == signed(MANIFEST)
    found = unpack_bundle(signed(MANIFEST), REQUEST, KEYS)
    assert (found.site, found.payload, dict(found.manifest)) == ("north", PAYLOAD, MANIFEST)


@pytest.mark.parametrize(
    "manifest",
    [
        *(
            MANIFEST | {"site": site}
            for site in (5, None, ["north"], {}, "", "../north", "n" * 65, "south")
        ),
        *(
            MANIFEST | {"version": version}
            for version in (VERSION - 1, VERSION + 1, str(VERSION), None)
        ),
        *(MANIFEST | {"request": other} for other in ("", None, Request.fresh({}, None).id)),
        *(MANIFEST | {"request-sha256": other} for other in ("", None, "0" * 64)),
        *(
            {key: value for key, value in MANIFEST.items() if key != left_out}
            for left_out in ("site", "version", "request")
        ),
    ],
    ids=lambda manifest: json.dumps(manifest)[-30:],
)
def test_a_manifest_of_another_form_is_refused_although_its_site_signed_it(
    manifest: object,
) -> None:
    with pytest.raises(SurrogateError):
        unpack_bundle(signed(manifest), REQUEST, KEYS)


def test_a_manifest_has_a_mebibyte_at_most_and_is_read_whatever_it_holds() -> None:
    text = json.dumps(MANIFEST).encode()
    fits = text + b" " * (2**20 - len(text))
    assert unpack_bundle(signed(fits), REQUEST, KEYS).site == "north"
    whole = signed(text)
    for content in (
        *map(signed, (fits + b" ", b"[" * 100_000, b"{", b"\xff", b"[]", b"{}", b"3", b'"a"', b"")),
        *(b"", b"\xff", whole[:-1], whole + b"\x7b\x7c", whole * 2),
    ):
        with pytest.raises(SurrogateError, match="no bundle of `site offline release`"):
            unpack_bundle(content, REQUEST, KEYS)


HEAD_HEADER = Header("fedpft", "r", "coordinator", "f", ("a", "b", "c"))


def head_of(dimension: int = 4, classes: tuple[str, ...] = HEAD_HEADER.classes) -> Head:
    draw = torch.Generator().manual_seed(dimension)
    weight = torch.randn(len(classes), dimension, generator=draw)
    return Head(replace(HEAD_HEADER, classes=classes), weight, torch.ones(len(classes)))


@pytest.mark.parametrize(
    "other", [head_of(5), head_of(4, ("a", "b", "d")), head_of(4, ("a", "c", "b"))]
)
def test_heads_of_an_ensemble_have_the_same_classes_and_features(other: Head) -> None:
    fine = unpack_classifier(pack_classifier(Ensemble((head_of(), head_of()))))
    assert isinstance(fine, Ensemble)
    assert fine.dimension == 4
    with pytest.raises(SurrogateError, match="heads of different classes or dimensions"):
        unpack_classifier(pack_classifier(Ensemble((head_of(), other))))


def test_a_generator_of_a_file_has_the_budget_and_the_shape_of_its_run(tmp_path: Path) -> None:
    own = {"method": "dpcvae", "seed": 9, "epsilon": 6.0, "delta": 1e-4}
    run = parse_run(own | {"dpcvae.latent": 2, "dpcvae.hidden": 3})
    tensors = tensors_of(fresh_generator(run.settings, run.method.adversarial, 3, 5))
    header = Header("dpcvae", run.digest, "coordinator", "f", ("a", "b", "c"))
    file = tmp_path / "generator.safetensors"
    file.write_bytes(pack_generator(Generator(header, run, tensors)))
    found = read_generator(file)
    settings: Any = found.run.settings
    assert (settings.method, settings.seed) == ("dpcvae", 9)
    assert (settings.epsilon, settings.delta) == (6.0, 1e-4)
    assert settings.dpcvae == run.settings.dpcvae
    assert found.header == header
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor)

    drawn = write_synthetic_set(tmp_path / "set", found, torch.tensor([0, 2, 2]), 3, {"own": 1})
    torch.testing.assert_close(
        drawn, found.draw(torch.tensor([0, 2, 2]), torch.Generator().manual_seed(3))
    )
    with safe_open(tmp_path / "set", "pt") as content:
        facts = content.metadata()
        assert torch.equal(content.get_tensor("x"), drawn.half())
        assert content.get_tensor("y").tolist() == [0, 2, 2]
    assert (facts["classes"], facts["fingerprint"]) == ("a,b,c", "f")
    described = json.loads(facts["manifest"])
    assert (described["own"], described["seed"]) == (1, 3)
    assert described["records"] == {"a": 1, "b": 0, "c": 2}


@pytest.mark.parametrize(
    ("kind", "less"),
    [
        (torch.float16, 2 * 2.0**-10),
        (torch.bfloat16, 2 * 2.0**-7),
        (torch.float32, 1e-6),
        (torch.float64, 1e-6),
    ],
)
def test_a_clip_leaves_room_for_the_rounding_of_its_numbers(kind: torch.dtype, less: float) -> None:
    clipped, share = clip(torch.tensor([[3.0], [-0.25]], dtype=kind), 0.0)
    assert clipped.dtype == kind
    assert clipped.double().abs().flatten().tolist() == pytest.approx([1 - less] * 2, abs=1e-7)
    assert share == 1


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "c"), ()])
def test_noise_is_added_to_the_sums_that_a_mechanism_names(names: tuple[str, ...]) -> None:
    claim = Mechanism("x", 1.0, 1e-5, "record", 1.0, 0.0, {"b": (2.0, 1.0), "a": (3.0, 1.0)})

    def sums(chosen: tuple[str, ...]) -> list[BoundedSum]:
        return [BoundedSum(name, IntegerSum.of(torch.ones(2), bound=1.0), 1.0) for name in chosen]

    found = with_noise(sums(("a", "b")), claim)
    assert [(each.name, each.sigma) for each in found] == [("b", 2.0), ("a", 3.0)]
    with pytest.raises(ConfigError) as refusal:
        with_noise(sums(names), claim)
    assert str(refusal.value) == f"sums {', '.join(names)}; the mechanism has noise for b, a"
