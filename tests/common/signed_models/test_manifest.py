"""What the manifest of a signed model may say, and what a coordinator puts into it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, SealError, SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from fedsurrogate.common.signed_models import signed_model
from fedsurrogate.common.signed_models.signed_model import (
    NAME,
    PURPOSE,
    SAMPLES,
    WITHOUT_PRIVACY,
    digest_of,
    feature_settings,
    is_name,
    make_signed_model,
    pack_gaussians,
    received_model,
    release_gaussians,
    signed_values,
    verified,
)
from fedsurrogate.common.wire.model_proto import file_content, pack_classifier
from tests.common.signed_models.test_signed_model import KEY, head, model, sampler


def signed(**changes: object) -> tuple[str, str, str]:
    """A manifest with these facts that its coordinator has signed, whatever they are."""
    facts = json.loads(model().manifest.signed_bytes()) | changes
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return text, sign(text.encode(), KEY, PURPOSE).hex(), public_key(KEY).hex()


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("sites", (0, 9), (-1, 1.5, "3", None)),
        ("dimension", (1, 512), (0, -1, 2.0)),
        ("classes", (["a"], ["a", "b"]), ([], [""], ["a\n"], ["x" * 5000], "ab")),
        ("name", ("a", "A.b_c-9", "x" * 100), ("", ".a", "-a", "a b", "x" * 101, "a/b")),
        ("created", ("2026-01-31",), ("2026-1-31", "2026-01-31\n", "26-01-31", "2026-01-311")),
        ("method", ("", "x" * 40), ("x" * 41, 7)),
        ("run", ("", "x" * 64), ("x" * 65,)),
        ("flower_run", ("", "9" * 40), ("9" * 41,)),
        ("fingerprint", ("f", "f" * 200), ("", "f" * 201)),
        ("gaussians", ("", "x" * 400), ("x" * 401,)),
        ("tensors", ("0" * 64, "af" * 32), ("0" * 63, "0" * 65, "A" * 64, "g" * 64)),
        ("format", (1,), (0, 2, True, "1")),
        ("settings", ({}, {"a": 1, "b": "x", "c": 0.5}), ({"a": None}, {"a": [1]}, [])),
        ("form", ({}, {"clip": "0"}), ({"clip": 0},)),
        ("privacy", (None,), ({}, {"epsilon": 1.0}, 3)),
        ("more", (), (1, None)),
    ],
)
def test_what_a_manifest_may_say_ends_where_it_is_stated(
    field: str, good: Sequence[object], bad: Sequence[object]
) -> None:
    """A signature makes no fact acceptable: each limit is that of the field."""
    for value in good:
        facts = verified(*signed(**{field: value})).facts
        assert getattr(facts, field) == value
    for value in bad:
        with pytest.raises(SurrogateError, match="manifest cannot be read"):
            verified(*signed(**{field: value}))


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("epsilon", 1e-9, (0.0, -1.0, "1")),
        ("delta", 1e-300, (0.0, -1e-9)),
        ("mechanism", "x" * 40, ("x" * 41, 1)),
        ("relation", "x" * 200, ("x" * 201,)),
    ],
)
def test_a_claim_of_a_manifest_is_above_zero_and_short(
    field: str, good: object, bad: Sequence[object]
) -> None:
    claim = {"epsilon": 2.0, "delta": 1e-5, "mechanism": "sums", "relation": "one"}
    found = verified(*signed(privacy=claim | {field: good})).facts.privacy
    assert found is not None
    assert getattr(found, field) == good
    for value in bad:
        with pytest.raises(SurrogateError, match="manifest cannot be read"):
            verified(*signed(privacy=claim | {field: value}))


@given(
    part=st.sampled_from(["text", "signature", "key"]),
    how=st.sampled_from(["shorter", "longer", "no number", "other", "empty"]),
)
def test_a_manifest_is_read_only_with_its_signature_and_key(part: str, how: str) -> None:
    given_parts = dict(zip(("text", "signature", "key"), signed(), strict=True))
    whole = given_parts[part]
    other = {"text": " " + whole, "signature": "00" * 64, "key": public_key(new_key()).hex()}
    given_parts[part] = {
        "shorter": whole[:-2],
        "longer": whole + "00",
        "no number": "zz" + whole[2:],
        "other": other[part],
        "empty": "",
    }[how]
    with pytest.raises(SealError):
        verified(*given_parts.values())
    assert verified(*signed()).signer == public_key(KEY).hex()[:16] == model().signer


@given(st.text("aZ09._-/ \n", max_size=6) | st.integers(98, 103).map(lambda n: "a" * n))
def test_a_name_is_one_that_files_may_have_everywhere(text: str) -> None:
    wanted = bool(re.fullmatch(NAME, text)) and "\n" not in text
    assert is_name(text) == wanted
    assert is_name(text) == (
        1 <= len(text) <= 100
        and text[0].isalnum()
        and all(each.isalnum() or each in "._-" for each in text)
    )


@hypothesis_settings(max_examples=30)
@given(
    backbone=st.sampled_from(["pixels", "pixels:rgb"]),
    size=st.sampled_from([0, 32]),
    power=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 99),
    fraction=st.sampled_from([0.1, 0.5]),
    bag=st.sampled_from(["none", "mean"]),
    sites=st.integers(1, 9),
    units=st.sets(st.sampled_from(["record", "patient"])),
)
def test_a_manifest_has_what_its_features_need_and_facts_of_its_run(
    backbone: str,
    size: int,
    power: float,
    seed: int,
    fraction: float,
    bag: str,
    sites: int,
    units: set[str],
) -> None:
    run = parse_run(
        {
            "backbone": backbone, "image-size": size, "features.power-transform": power,
            "seed": seed, "test-fraction": fraction, "features.bag": bag, "epsilon": 2.0,
            "delta": 1e-5, "classes": "a,b,c", "fedpft.covariance": "spherical",
        }
    )  # fmt: skip
    made = make_signed_model(head(), run, None, "77", sites, KEY, units)
    facts, again = made.manifest, made.manifest.run_config()
    assert again.settings.backbone == backbone
    assert again.settings.image_size == size
    assert again.power == run.power == power
    assert (again.settings.seed, again.settings.test_fraction) == (seed, fraction)
    assert again.settings.features.bag == bag
    assert ("features.bag" in facts.settings) == (bag != "none")
    assert facts.run_config({"seed": seed + 1}).settings.seed == seed + 1
    digest = digest_of(file_content(made.classifier)[1])
    assert facts.name == f"{facts.created.replace('-', '')}-{facts.method}-{digest[:8]}"
    assert (facts.method, facts.run, facts.flower_run) == ("fedpft", run.digest, "77")
    assert (facts.sites, facts.dimension, facts.fingerprint) == (sites, 6, "f" * 64)
    assert facts.privacy is not None
    assert run.mechanism is not None
    assert (facts.privacy.epsilon, facts.privacy.delta) == (2.0, 1e-5)
    assert facts.privacy.mechanism == run.mechanism.name
    one = f"add or remove one {next(iter(units))}" if len(units) == 1 else ""
    assert facts.privacy.relation == one if len(units) < 2 else "patients" in facts.privacy.relation
    assert "not stated" in facts.privacy.in_words() or units
    if bag == "none":
        facts.check_of_images("site predict")
    else:
        with pytest.raises(ConfigError, match=r"site predict .* bags"):
            facts.check_of_images("site predict")


TARGETS: list[dict[str, Any]] = [
    {"task": "multilabel", "label-columns": "a,b"},
    {"task": "regression", "value-columns": "age", "target-range": "0,90"},
    {"task": "survival", "event-column": "died", "time-column": "days", "horizon": 365.0, "time-unit": "days"},
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda flat: flat["task"])
def test_a_manifest_has_the_settings_of_its_target(target: dict[str, Any]) -> None:
    """Those that are set, and no others: columns, limits, and how many bins there are."""
    run = parse_run(target)
    found = feature_settings(run.settings, run.power, run.target)
    assert target.items() <= found.items()
    assert not any(key.startswith(("fedpft", "head")) for key in found)
    again = parse_run(found)
    assert again.target is not None
    assert run.target is not None
    assert again.target.columns == run.target.columns
    assert again.target.outputs == run.target.outputs
    for fact, value in run.target.public.items():
        other = again.target.public[fact]
        # How wide the bins of a run are depends on its privacy, and a model has them itself.
        assert (
            (other == value)
            if fact != "edges"
            else (len(other), other[-1]) == (len(value), value[-1])
        )


def test_gaussians_are_drawn_by_the_seed_and_fit_into_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def draw(seed: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((seed, limit))
        return sampler(seed, limit)

    private = parse_run({"epsilon": 2.0, "delta": 1e-5, "classes": "a,b,c", "seed": 5}).settings
    found, why = release_gaussians(private, draw)
    assert found is not None
    assert (asked, why) == ([(5, SAMPLES)], "")
    size = len(pack_gaussians(found))
    monkeypatch.setattr(signed_model, "LARGEST_GAUSSIANS", size)
    assert release_gaussians(private, draw)[0] is not None
    monkeypatch.setattr(signed_model, "LARGEST_GAUSSIANS", size - 1)
    none, why = release_gaussians(private, draw)
    assert none is None
    assert str(size - 1) in why
    none, why = release_gaussians(private, None)
    assert (none, why) == (None, "method = 'fedpft' leaves no Gaussians")
    none, why = release_gaussians(private, lambda seed, limit: sampler(seed, 1))
    assert none is None
    assert "no class has two records" in why
    assert release_gaussians(parse_run({}).settings, draw) == (None, WITHOUT_PRIVACY)


@given(st.sampled_from(["name", "shape", "number", "order", "type"]))
def test_a_digest_is_of_names_shapes_and_numbers(what: str) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)}
    other = {
        "name": {"a": tensors["a"], "c": tensors["b"]},
        "shape": tensors | {"a": tensors["a"].reshape(3, 2)},
        "number": tensors | {"b": torch.tensor([0.0, 1e-30])},
        "order": dict(reversed(tensors.items())),
        "type": {name: tensor.double() for name, tensor in tensors.items()},
    }[what]
    assert (digest_of(other) == digest_of(tensors)) == (what in ("order", "type"))


def test_a_signed_model_without_gaussians_or_payload_is_not_taken() -> None:
    made = model()
    values, payload = signed_values(made), pack_classifier(head())
    with pytest.raises(SurrogateError, match="without its payload"):
        received_model(None, values)
    with pytest.raises(SealError, match=r"Gaussians|not the one"):
        received_model(payload, {k: v for k, v in values.items() if k != "gaussians"})
    plain = signed_values(model(parse_run({})))
    with pytest.raises(SealError, match=r"Gaussians|not the one"):
        received_model(payload, plain | {"gaussians": values["gaussians"]})
    text, signature, key = signed(settings={"method": "none"})
    wrong = values | {"manifest": text, "signature": signature, "signer": key}
    with pytest.raises(SurrogateError, match="settings cannot be used"):
        received_model(payload, wrong)
