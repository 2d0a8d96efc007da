"""Signed model files: what was signed is read again, and a changed file is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Quadratic
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.sealing import public_key, sign
from fedsurrogate.common.signed_models.signed_model import (
    PURPOSE,
    SignedModel,
    make_signed_model,
    read_signed_model,
    received_model,
    save_signed_model,
    signed_values,
)
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier

KEY = bytes(range(32))
PRIVATE = parse_run(
    {"epsilon": 2.0, "delta": 1e-5, "classes": "a,b,c", "fedpft.covariance": "spherical"}
)


def head(dimension: int = 6) -> Head:
    weight = torch.randn(3, dimension, generator=torch.Generator().manual_seed(0))
    return Head(
        Header("fedpft", "run", "coordinator", "f" * 64, ("a", "b", "c")),
        weight,
        torch.zeros(3),
        0.0,
    )


def sampler(seed: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(limit) % 3
    return torch.randn(limit, 6, generator=torch.Generator().manual_seed(seed)) + labels[
        :, None
    ], labels


def model(config: Run = PRIVATE) -> SignedModel:
    return make_signed_model(head(), config, sampler, "77", 3, KEY)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.fedsurrogate"
    path.write_bytes(save_signed_model(model()))
    return path


def rewritten(file: Path, **changes: object) -> None:
    """Write the file again with other tensors or metadata."""
    with safe_open(file, "pt") as content:
        metadata, tensors = (
            content.metadata(),
            {name: content.get_tensor(name) for name in content.keys()},  # noqa: SIM118
        )
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[name.replace("__", ".")] = value
        else:
            metadata[name] = str(value)
    save_file(tensors, file, metadata)


def test_a_file_gives_back_model_settings_claim_and_gaussians(file: Path) -> None:
    found, made = read_signed_model(file, frozenset({public_key(KEY)})), model()
    assert found.manifest == made.manifest
    assert found.manifest.privacy is not None
    assert (found.manifest.privacy.epsilon, found.manifest.classes) == (2.0, ["a", "b", "c"])
    x = sampler(3, 30)[0]
    assert torch.equal(found.classifier.scores(x), made.classifier.scores(x))
    assert torch.equal(found.scores(x)[1], made.scores(x)[1])
    assert found.manifest.run_config().settings.backbone == "pixels"


def permuted(model: Classifier, order: Sequence[int]) -> Classifier:
    """The same numbers for the classes in another order."""
    own = replace(model.header, classes=tuple(model.header.classes[k] for k in order))
    if isinstance(model, Ensemble):
        return Ensemble(tuple(replace(head, header=own) for head in model.heads))
    return replace(model, header=own)


@st.composite
def classifiers(draw: st.DrawFn) -> Classifier:
    """A classifier of each kind, with classes in any order."""
    names = draw(
        st.lists(st.text("abcxyz01", min_size=1, max_size=3), min_size=2, max_size=5, unique=True)
    )
    count, seed = len(names), draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    own = Header("fedpft", "run", "coordinator", "f" * 64, tuple(names))
    weight = torch.randn(count, 6, generator=generator)
    heads = [Head(own, weight * k, torch.randn(count, generator=generator), None) for k in (1, 2)]
    quadratic = Quadratic(
        own, weight, torch.ones(count, 6), torch.randn(count, generator=generator)
    )
    return draw(st.sampled_from([heads[0], Ensemble(tuple(heads), draw(st.booleans())), quadratic]))


@given(classifiers(), st.randoms(use_true_random=False))
@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_class_names_belong_to_their_numbers_on_every_way(
    tmp_path: Path, classifier: Classifier, chance: random.Random
) -> None:
    names = classifier.header.classes
    config = parse_run(
        {
            "epsilon": 2.0,
            "delta": 1e-5,
            "classes": ",".join(sorted(names)),
            "fedpft.covariance": "spherical",
        }
    )
    made = make_signed_model(classifier, config, None, "77", 3, KEY)
    path, x = tmp_path / "m.fedsurrogate", torch.randn(20, 6)
    path.write_bytes(save_signed_model(made))
    sent = received_model(pack_classifier(classifier), signed_values(made))
    assert sent is not None
    # As every site has it: 16 bits.
    wanted = [names[k] for k in unpack_classifier(pack_classifier(classifier)).predict(x).tolist()]
    for found in (made, sent, read_signed_model(path)):
        assert tuple(found.manifest.classes) == found.classifier.header.classes == names
        assert [
            found.classifier.header.classes[k] for k in found.classifier.predict(x).tolist()
        ] == wanted
    order = list(range(len(names)))
    chance.shuffle(order)
    if order == sorted(order):
        order = order[::-1]
    with pytest.raises(SealError):
        received_model(pack_classifier(permuted(classifier, order)), signed_values(made))
    facts = json.loads(made.manifest.signed_bytes())
    facts["classes"] = [names[k] for k in order]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    with pytest.raises(SealError):
        received_model(
            pack_classifier(permuted(classifier, order)), signed_values(made) | {"manifest": text}
        )
    signature = sign(text.encode(), KEY, PURPOSE).hex()
    with pytest.raises(SealError):
        received_model(
            pack_classifier(classifier),
            signed_values(made) | {"manifest": text, "signature": signature},
        )
    rewritten(path, manifest=text)
    with pytest.raises(SealError):
        read_signed_model(path)


@pytest.mark.parametrize("change", [{"clip": 0.0}, {"centre": torch.ones(6)}])
def test_an_ensemble_whose_heads_were_changed_is_refused(change: dict[str, Any]) -> None:
    """The signature covers weights and biases of an ensemble, so its heads have nothing else."""
    plain = replace(head(), clip=None)
    made = make_signed_model(Ensemble((plain, plain)), PRIVATE, None, "77", 3, KEY)
    changed = pack_classifier(Ensemble((plain, replace(plain, **change))))
    with pytest.raises(SealError, match="no signature covers"):
        received_model(changed, signed_values(made))


def test_a_changed_weight_is_refused(file: Path) -> None:
    rewritten(file, model__weight=head().weight + 0.25)
    with pytest.raises(SealError, match="was changed after it was signed"):
        read_signed_model(file)


def test_changed_gaussians_are_refused(file: Path) -> None:
    with safe_open(file, "pt") as content:
        means = content.get_tensor("gaussians.means")
    rewritten(file, gaussians__means=means + 1)
    with pytest.raises(SealError, match="was changed"):
        read_signed_model(file)


# Signed by the version before the manifest named the neighbouring relation.
EARLIER = {
    "format": "1",
    "manifest": '{"classes":["a","b"],"created":"2026-01-01","dimension":2,"fingerprint":"'
    + "f" * 64
    + '","flower_run":"1","form":{"clip":"0"},"format":1,"gaussians":"none","method":"fedpft","name":'
    '"20260101-fedpft-00000000","privacy":{"delta":1e-05,"epsilon":2.0,"mechanism":"sums"},"run":"r","settings":{"backbone":'
    '"pixels","features.power":1.0,"image-size":0,"seed":0,"test-fraction":0.2},"sites":2,"tensors":'
    '"fa4bbcdbda42ed5385fe49ebec38d9c7c774e7638d3e793bfbe789ecfe8780cd"}',
    "signature": "c209d3d96e03afbdc23a99040cb1ef4e0d9b8f110858ef5ca24cf15b8602f7e2"
    "6a24740705d9de79c6b1fa645d95cc9a99869977c6c67fb815bd3db32f4f0f03",
    "key": "28f703644521e4a9bebb0177e7087135295c3f50143c17437c6cce94e809591e"
    "64d1986ea6033ce30f292b6499a04421c5d26e6de69a0a0c50490d3444e10b7a",
}


def test_a_file_of_an_earlier_version_is_read_and_its_relation_is_not_stated(
    tmp_path: Path,
) -> None:
    file = tmp_path / "earlier.fedsurrogate"
    save_file({"model.weight": torch.eye(2), "model.bias": torch.zeros(2)}, file, EARLIER)
    found = read_signed_model(file, frozenset({public_key(KEY)}))
    assert found.manifest.privacy is not None
    assert (
        found.manifest.privacy.in_words()
        == "epsilon 2, delta 1e-05; neighbouring relation: not stated"
    )
    again = tmp_path / "again.fedsurrogate"
    again.write_bytes(save_signed_model(found))
    assert read_signed_model(again).manifest == found.manifest
    # Nobody can add a relation to it.
    rewritten(
        file,
        manifest=EARLIER["manifest"].replace(
            '"sums"}', '"sums","relation":"add or remove one patient"}'
        ),
    )
    with pytest.raises(SealError, match="was changed"):
        read_signed_model(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    text, other = tmp_path / "a.fedsurrogate", tmp_path / "b.fedsurrogate"
    text.write_text("nothing")
    save_file({"x": torch.zeros(1)}, other)
    for file in (text, other, tmp_path / "none.fedsurrogate"):
        with pytest.raises(SurrogateError):
            read_signed_model(file)


def test_sites_receive_exactly_what_was_signed() -> None:
    made = model()
    found = received_model(pack_classifier(head()), signed_values(made))
    assert found is not None
    assert save_signed_model(found) == save_signed_model(made) or found.manifest == made.manifest
    assert torch.equal(found.scores(sampler(3, 9)[0])[0], made.scores(sampler(3, 9)[0])[0])
    with pytest.raises(SealError):
        received_model(
            pack_classifier(Head(head().header, head().weight * 2, head().bias, 0.0)),
            signed_values(made),
        )
    assert received_model(pack_classifier(head()), {}) is None
