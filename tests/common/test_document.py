"""What people sign is the run: whatever changes what a site sends, computes or charges has another
digest, and a digest changes for nothing else. Settings are found by their types, so a new one is
tried without a line here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.release import prepare
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.methods.counting import KINDS_OF_COUNTS
from fedsurrogate.common.methods.fedpft import form_of
from fedsurrogate.common.privacy.mechanism import STATED
from fedsurrogate.common.run import REASONS, UNSIGNED, Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import (
    numbers_of,
    projected_dimensions,
    rules_of,
    shapes_of,
)
from fedsurrogate.common.settings import Section, Settings, kebab
from fedsurrogate.common.settings.base import Scalar, known_keys, parse_settings
from fedsurrogate.common.settings.heads import TargetSettings
from fedsurrogate.common.targets.registry import CLASS
from fedsurrogate.common.targets.registry import TARGETS as KINDS_OF_TARGETS
from tests.registry import METHODS

Flat = dict[str, Scalar]
CLASSES, SITES, RECORDS = "a,b,c", 997, 90
DIMENSIONS = (8, 700, 1280, 4096)
# All records in every step: accounting is then a closed form.
BUDGET: Flat = {"epsilon": 8.0, "delta": 1e-5} | {
    f"{section}.sample-rate": 1.0 for section in ("fedavg", "fedlap", "dpcvae")
}
SITUATIONS: tuple[Flat, ...] = (
    {},
    BUDGET,
    {"secure-aggregation": True},
    BUDGET | {"secure-aggregation": True},
)
TARGETS: tuple[Flat, ...] = (
    {"classes": CLASSES},
    {"task": "multilabel", "label-columns": "edema,mass"},
    {"task": "regression", "value-columns": "age", "target-range": "0,100"},
    {
        "task": "survival",
        "time-column": "t",
        "event-column": "died",
        "time-unit": "years",
        "horizon": 3.0,
    },
)
KINDS: tuple[Flat, ...] = (
    *({"method": name} for name in METHODS),
    *({"counting.kind": name, "counting.digest": "5e" * 32} for name in KINDS_OF_COUNTS),
)
# Texts of every form that some setting takes; a setting tries those that its own type accepts.
TEXTS = (
    *("x", "y", "a", "b,a", "fedavg", "average", "0,1", "-2,2; -2,2", "north=edema", "flip", "cpu"),
    *("iid", "column", "labels", "pixels:rgb", "torchvision:resnet50"),
    *("f" * 64, "e" * 128, "edema", "0,50", "ridge", "0.5,0.5,0.5", "size,maker", "size: 3, 5", ""),
)
NUMBERS = (0, 1, 2, 3, 7, 28, 1e-6, 0.25, 0.45, 1.0, 2.0, 16.0, 300)
# Settings of no section whose digest changes although no plan does, and why.
COMPUTED_WITH = {
    "seed": "sites draw by it",
    "sites": "people sign whom a run asks, where it names them",
    "noise-seed": "simulated sites draw noise by it",
    "test-fraction": "it selects the records that train",
    "partition": "it selects the records of a site that shares a folder with others",
    "alpha": "as partition",
    "classes-per-site": "as partition",
    "site-column": "as partition",
    "classes": "sites name them in what they send",
    "method": "which function of the site runs",
    "fingerprint": "people sign which backbone is accepted",
    "backbone": "it makes the features",
    "image-size": "it makes the features",
    "fedpft.public": "sites subtract a centre",
    "fedpft.order": "people sign in which order a chain asks the sites, kd's too",
    "secure-aggregation-range": "people sign the limits of a sum; one with noise, or of counts, reaches none",
    "secure-aggregation-records": "as secure-aggregation-range",
    **{
        kebab(name): "people sign what is learned in words, of which several may mean the same"
        for name in TargetSettings.model_fields
    },
}


def fields_by_key(section: type[Section] = Settings, prefix: str = "") -> Iterator[Any]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from fields_by_key(field.annotation, f"{prefix}{kebab(name)}.")
        else:
            yield prefix + kebab(name), field


FIELDS: dict[str, FieldInfo] = dict(fields_by_key())


def leaves(annotation: Any) -> Iterator[Any]:
    """The types in a union, and the values of a literal."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from leaves(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        yield annotation


@cache
def values_of(key: str) -> tuple[Scalar, ...]:
    """Valid values of a setting besides its default, by its own type."""
    field = FIELDS[key]
    found: list[Any] = []
    for leaf in leaves(field.annotation):
        found += [leaf] if isinstance(leaf, str | int) and not isinstance(leaf, type) else []
        found += [True, False] if leaf is bool else []
        found += [int(each) for each in NUMBERS] if leaf is int else []
        found += [float(each) for each in NUMBERS] if leaf is float else []
        found += TEXTS if leaf is str or get_origin(leaf) is tuple else []
    default = Settings().flat()[key]
    valid = []
    for value in dict.fromkeys(found):
        try:
            parsed = parse_settings(Settings, {key: value})
        except ConfigError:
            continue
        if parsed.flat()[key] != default:
            valid.append(value)
    return tuple(valid)


def plan_of(run: Run) -> dict[str, Any]:
    """What follows from a run at a site and for its ledger, as plain values."""
    plan, own, classes = run.plan, run.settings, len(run.settings.classes)
    firsts = (True, False) if plan.kind == "rounds" else (False,)
    found: dict[str, Any] = {
        "kind": plan.kind,
        "site": [plan.combination.site, plan.combination.site_sums, plan.combination.evaluate],
        "rounds": run.planned_rounds if plan.kind == "rounds" else 1,
        "power": run.power,
        "target": None if run.target is None else run.target.public,
        "claim": [] if run.mechanism is None else [getattr(run.mechanism, n) for n in STATED],
        "events": [] if run.mechanism is None else [asdict(e) for e in run.mechanism.events],
        "bag": own.features.bag,
    }
    for d in DIMENSIONS:
        sizes = plan.messages.sizes(classes, d, RECORDS)
        found[f"sends {d}"] = [
            [
                (f.name, f.sizes(sizes), f.bits)
                for f in plan.messages.leaving(classes, d, RECORDS, first)
            ]
            for first in firsts
        ]
        found[f"work {d}"] = asdict(plan.work(classes, d))
        found[f"mapped {d}"] = projected_dimensions(run, d), plan.mean_over_columns_weight(d)
        if "fedpft" in run.method.reads and not plan.sent_by_solver and run.target is None:
            form = form_of(own, d)
            found[f"form {d}"] = [form.family] + [form.rank, form.bits] * (form.family == "lowrank")
    if own.secure_aggregation:
        found["sum"] = [
            asdict(rules_of(own, SITES)),
            shapes_of(plan, classes, 8),
            {name: asdict(each) for name, each in numbers_of(plan, own, SITES).items()},
        ]
    return found


def resolved(flat: Mapping[str, Scalar]) -> tuple[str, dict[str, Any]] | None:
    """Digest and plan of a run; None where it is refused."""
    try:
        run = parse_run(flat)
        return run.full_digest, plan_of(run)
    except ConfigError:
        return None


def test_every_setting_has_another_value_by_its_type() -> None:
    without = [key for key in known_keys(Settings) if not values_of(key)]
    assert not without, f"no text of TEXTS and no number of NUMBERS is a valid {without[0]}"


@cache
def bases() -> tuple[Flat, ...]:
    """Settings of all methods and targets, in all situations, that are not refused."""
    every = (a | b | c for a in KINDS for b in SITUATIONS for c in TARGETS)
    found = []
    for base in every:
        with suppress(ConfigError):
            parse_run(base)
            found.append(base)
    return tuple(found)


@given(
    st.deferred(lambda: st.sampled_from(bases())), st.sampled_from(known_keys(Settings)), st.data()
)
@settings(max_examples=200)
def test_a_setting_changes_the_plan_if_and_only_if_it_changes_the_digest(
    base: Flat, key: str, data: st.DataObject
) -> None:
    check(base, key, data.draw(st.sampled_from(values_of(key))))


@pytest.mark.slow
def test_what_nobody_signs_changes_no_plan_of_any_method_and_target() -> None:
    for base in bases():
        for key in UNSIGNED:
            for value in {values_of(key)[0], values_of(key)[-1]}:
                check(base, key, value)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_a_choice_switches_on_is_signed_with_it(method: str) -> None:
    """Alone, a setting of a form, a head or a network that is not chosen changes nothing."""
    base: Flat = {"method": method, "classes": CLASSES}
    sections = ("", "features", *METHODS[method].reads)
    keys = [key for key in FIELDS if key.rpartition(".")[0] in sections]
    for choice in keys:
        if not any(isinstance(leaf, str) for leaf in leaves(FIELDS[choice].annotation)):
            continue
        for value in values_of(choice):
            for key in keys:
                if key != choice and resolved(base | {choice: value}) is not None:
                    check(base | {choice: value}, key, values_of(key)[0])


def test_every_method_and_target_of_the_registry_is_tried() -> None:
    assert {base.get("method", "fedpft") for base in bases()} == METHODS.keys()
    assert {base.get("task", CLASS) for base in bases()} == {CLASS, *KINDS_OF_TARGETS}


def check(base: Flat, key: str, value: Scalar) -> None:
    """That a setting changes plan and digest, or neither."""
    before, after = resolved(base), resolved(base | {key: value})
    if before is None or after is None:
        return
    changed = [
        name
        for name in before[1].keys() | after[1].keys()
        if before[1].get(name) != after[1].get(name)
    ]
    if before[0] == after[0]:
        assert not changed, f"{key} = {value!r} changes {changed}, and people sign the same digest"
        return
    section = key.rpartition(".")[0]
    read = section in ("features", *parse_run(base).method.reads)
    # Names of sites are signed, their number is not.
    assert key not in UNSIGNED or changed or key in ("fedpft.public", "sites")
    assert changed or read or key in COMPUTED_WITH, f"{key} = {value!r} changes the digest alone"


def test_only_named_settings_are_left_out_and_each_is_one_of_the_settings() -> None:
    assert UNSIGNED.keys() <= set(known_keys(Settings))
    assert sum(len(keys.split()) for keys in REASONS.values()) == len(UNSIGNED)


@pytest.mark.parametrize("method", ["fedpft", "average"])
def test_a_site_answers_alike_whatever_a_setting_says_that_nobody_signs(
    tmp_path: Path, method: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "data"
    folder.mkdir()
    y = torch.arange(60) % 3
    x = torch.randn(60, 8, generator=generator) + torch.eye(3, 8)[y]
    (tmp_path / "policy.toml").write_text("without-dp = true\nsmallest-class = 1\n")
    for split, rows in (("train", slice(0, 45)), ("test", slice(45, 60))):
        save_file(
            {"x": x[rows].contiguous(), "y": y[rows].contiguous()},
            folder / f"{split}.safetensors",
            {"classes": CLASSES, "fingerprint": "f" * 16},
        )
    node = parse_node_config(
        {
            "site": "north",
            "data": "safetensors",
            "data-dir": str(folder),
            "state-dir": str(tmp_path / "state"),
            "check-log-dir": str(tmp_path / "check-log"),
            "policy": str(tmp_path / "policy.toml"),
        }
    )
    gate = open_gate(node, "safetensors", "7")
    gate.ledger.open()
    base: Flat = {"method": method, "classes": CLASSES, "head.min-steps": 5}

    def answered(flat: Flat) -> tuple[bytes, object]:
        made = prepare(SiteRequest(parse_run(flat), node, "north", flower_run="7"), gate)
        return made.made.payload, made.release

    before = answered(base)
    # An approval is not signed, and looked at by itself.
    for key in UNSIGNED.keys() - {"approval"}:
        for value in values_of(key)[:2]:
            try:
                run = parse_run(base | {key: value})
            except ConfigError:
                continue
            # One that decides a form has another digest then, see above.
            if run.digest == parse_run(base).digest:
                assert answered(base | {key: value}) == before, f"{key} = {value!r}"
