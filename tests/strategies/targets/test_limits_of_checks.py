"""Each limit of what coded sums can be, by its formula over generated records and noise: a number
just below it is not what is refused, and one just above it is, with the limit in the message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.target import Target
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.targets.sums import CodedSums, check_exact, check_noisy, check_sums
from tests.coded import coded, exact_code, noisy, number_sums

Array = NDArray[np.float64]
D, FALSE_ALARM, TOLERANCE = 3, 1e-7, 1e-2
# Two labels at one kind of site, all three at the other.
SETS = (("north", ("a", "b")), ("south", ("a", "b", "c")))
CAPPED = Labels(("a", "b", "c"), SETS, capped=True)
MEMBERS, ENTRY = CAPPED.members, 0.5
KINDS = st.sampled_from(["numbers", "labels", "cells", "capped"])
SEEDS, RECORDS = st.integers(0, 999), st.integers(40, 120)


TARGETS = {
    "numbers": {"task": "regression", "target-range": "0,100"},
    "cells": {"task": "survival", "horizon": 3.0},
    "labels": {"task": "multilabel", "label-columns": "a,b,c"},
}


def target_of(kind: str) -> Target:
    if kind == "capped":
        return CAPPED
    target = parse_run(TARGETS[kind]).target
    assert target is not None
    return target


def made(kind: str, seed: int, n: int) -> CodedSums:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=draw, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1)
    if kind == "numbers":
        return number_sums((2 * x[:, :2]).clamp(-1, 1), x, -1, 1)
    if kind == "labels":
        values = torch.randint(0, 3, (n, 3), generator=draw).double()
        values[values == 2] = torch.nan
        return coded(exact_code(values), x)
    if kind == "cells":
        return coded(torch.nn.functional.one_hot(torch.arange(n) % 4, 4).double(), x)
    positive = torch.randint(0, 2, (n, 3), generator=draw).double() / 3**0.5
    member = torch.arange(n) % 2
    positive[member == 0, 2] = 0
    sets = ENTRY * torch.nn.functional.one_hot(member, 2).double()
    return coded(torch.cat([positive, sets], 1), x)


def check(kind: str, sums: CodedSums) -> None:
    check_sums(sums, target_of(kind))


def refusal(check: Callable[..., None], *given: object) -> str:
    """Why a check refuses; empty where it does not."""
    try:
        check(*given)
    except SurrogateError as error:
        return str(error)
    return ""


def with_noise(sums: CodedSums, seed: int) -> CodedSums:
    """Another deviation in each row; the largest is in the middle."""
    rows = len(sums.code)
    wide = 0.2 + torch.sin(torch.linspace(0, 3, rows)).double()
    products = 0.0 if sums.products is None else 0.7
    return noisy(sums, 0.3 * wide, 0.2 * wide, 0.4, seed, products=products, centre=True)


def slack_of(sums: CodedSums) -> tuple[float, float]:
    """Of an entry of the code, and of a product."""
    if sums.noise is None:
        return 0.0, 0.0
    tail = math.sqrt(2 * math.log(8 * len(sums.sums) / FALSE_ALARM))
    return tail * max(sums.noise.code.tolist()), tail * sums.noise.products


Change = Callable[[float], CodedSums]


def entry(sums: CodedSums, name: str, at: int | tuple[int, int], sign: float = 1.0) -> Change:
    """The sums with one entry at sign times a value."""

    def changed(value: float) -> CodedSums:
        table = getattr(sums, name).clone()
        table[at] = sign * value
        return replace(sums, **{name: table})

    return changed


def limits(kind: str, sums: CodedSums) -> list[tuple[str, float, Change]]:
    """Name, limit, and how a value gets there."""
    code, of_product = slack_of(sums)
    if kind == "numbers":
        most = sums.records + of_product
        return [(f"squares of number {at + 1}", most, entry(sums, "products", (at, at))) for at in (0, 1)]  # fmt: skip
    first = 1 if kind == "labels" else 0
    found = [
        ("records of a row below zero", code, entry(sums, "code", row, -1.0))
        for row in range(first, len(sums.code))
    ]
    if kind == "labels" and sums.noise is None:
        for label in range(3):
            other = float(sums.code[2 + 2 * label])

            def together(value: float, at: int = 1 + 2 * label, other: float = other) -> CodedSums:
                return entry(sums, "code", at)(value - other)

            found.append(("annotated records of a label", sums.records, together))
    return found


@settings(max_examples=25, deadline=None)
@given(KINDS, SEEDS, RECORDS, st.booleans())
def test_a_number_is_refused_just_beyond_its_limit(
    kind: str, seed: int, n: int, private: bool
) -> None:
    sums = made(kind, seed, n)
    sums = with_noise(sums, seed) if private else sums
    check(kind, sums)
    for name, most, change in limits(kind, sums):
        edge = most * (1 + TOLERANCE) + TOLERANCE
        value = edge + 1e-6 * max(1.0, edge)
        with pytest.raises(SurrogateError) as caught:
            check(kind, change(value))
        said = re.fullmatch(
            r"(.*): (\S+), more than the (\S+) that records can have", str(caught.value)
        )
        assert said is not None
        assert said[1] == name
        # Six digits are shown.
        assert [float(said[2]), float(said[3])] == pytest.approx([value, most], rel=2e-5)
        # Another limit may be reached before.
        below = refusal(check, kind, change(edge - 1e-6 * max(1.0, edge)))
        assert not below.startswith(f"{name}:")


@settings(max_examples=30, deadline=None)
@given(KINDS, SEEDS, st.integers(1, 80), st.sampled_from([0.0, 1.0, 30.0]))
def test_sums_of_any_records_pass_with_any_honest_noise(
    kind: str, seed: int, n: int, scale: float
) -> None:
    sums = made(kind, seed, n)
    if scale:
        sd = torch.full_like(sums.code, scale)
        sums = noisy(sums, sd, sd, scale, seed, products=scale, centre=True)
    check(kind, sums)


@settings(max_examples=25, deadline=None)
@given(SEEDS, RECORDS, st.booleans())
def test_labels_of_a_set_are_at_most_its_records(seed: int, n: int, private: bool) -> None:
    sums = made("capped", seed, n)
    sums = with_noise(sums, seed) if private else sums
    slack = slack_of(sums)[0]
    for label in range(3):
        own = [at for at in range(2) if MEMBERS[at, label]]
        within = sum(float(sums.code[3 + at]) for at in own) / ENTRY
        most = within + (1 + math.sqrt(len(own)) / ENTRY) * slack
        check("capped", entry(sums, "code", label)(most + 0.9 * TOLERANCE))
        with pytest.raises(SurrogateError, match="present labels beyond the annotated records"):
            check("capped", entry(sums, "code", label)(most + 1.1 * TOLERANCE))


def joint(sums: CodedSums, moment: Array, products: bool) -> Array:
    """The mean of (1, z)(1, z)^T, or of (1, z, u), over all records."""
    mean, n = sums.mean.numpy(), sums.records
    second = moment + np.outer(mean, mean) + 2 * sums.rounding * np.eye(D)
    whole = np.block([[np.ones((1, 1)), mean[None]], [mean[:, None], second]])
    if not products:
        return whole
    assert sums.products is not None
    table = np.concatenate([sums.code[1:, None].numpy(), sums.sums[1:].numpy()], 1) / n
    return np.block([[whole, table.T], [table, sums.products.numpy() / n]])


@settings(max_examples=25, deadline=None)
@given(KINDS, SEEDS, RECORDS, st.booleans(), st.sampled_from([0.0, 0.02]))
def test_a_second_moment_is_refused_just_below_what_noise_and_rounding_do(
    kind: str, seed: int, n: int, private: bool, rounding: float
) -> None:
    sums = replace(made(kind, seed, n), rounding=rounding)
    if private:
        sums = replace(with_noise(sums, seed), rounding=rounding)
    noise = 0.0
    if sums.noise is not None:
        largest = max(
            sums.noise.squares,
            sums.noise.products,
            math.sqrt(2) * max(sums.noise.sums.tolist()),
            math.sqrt(2) * max(sums.noise.code.tolist()),
        )
        side = D + len(sums.code)
        tail = math.sqrt(2 * math.log(8 / FALSE_ALARM))
        noise = largest * (math.sqrt(2 * side) + tail) / sums.records
    direction = np.array([0.6, 0.0, -0.8])

    def least(taken: float) -> float:
        whole = joint(sums, sums.covariance.numpy() - taken * np.outer(direction, direction), kind == "numbers")  # fmt: skip
        if not noise:
            scale = np.sqrt(whole.diagonal().clip(0)).clip(1e-12)
            whole = whole / scale / scale[:, None]
        return float(np.linalg.eigvalsh(whole)[0])

    def taken_for(wanted: float) -> float:
        low, high = 0.0, 1.0
        while least(high) > wanted:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if least(middle) > wanted else (low, middle)
        return high

    allowed = noise + TOLERANCE
    for beyond in (0.999, 1.001):
        taken = taken_for(-beyond * allowed)
        matrix = sums.covariance - taken * torch.from_numpy(np.outer(direction, direction))
        wrong = replace(
            sums, moment=Statistics(sums.moment.counts, sums.moment.means, matrix), groups={}
        )
        if beyond < 1:
            check(kind, wrong)
            continue
        with pytest.raises(SurrogateError) as caught:
            check(kind, wrong)
        assert str(caught.value) == (
            f"the second moment has the eigenvalue {-beyond * allowed:.3g}, below -{allowed:.3g}: "
            "no records have such sums"
        )


def exact_of(kind: str, seed: int, n: int) -> dict[str, Tensor]:
    """What a site sends without noise, around its mean."""
    sums = made(kind, seed, n)
    mean, scatter = sums.mean, sums.records * sums.covariance
    rows = slice(1, None) if kind == "numbers" else slice(None)
    code = sums.code[rows]
    tensors = {
        "records": torch.tensor([float(n)]),
        "totals": n * mean,
        "code": code,
        "sums": sums.sums[rows] - torch.outer(code, mean),
        "squares": fold(scatter),
    }
    if sums.products is not None:
        tensors["products"] = fold(sums.products - torch.outer(code, code) / n)
    return tensors


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["numbers", "labels"]), SEEDS, RECORDS)
def test_exact_sums_are_refused_just_beyond_their_limits(kind: str, seed: int, n: int) -> None:
    target, sent = target_of(kind), exact_of(kind, seed, n)
    assert target.counts == (kind == "labels")

    def said(**changed: Tensor) -> str:
        return refusal(check_exact, dict(sent) | changed, target, SurrogateError)

    assert said() == ""
    one = torch.ones(1)
    # Fewer than one record, and one exactly, with which all else is too large.
    assert said(records=0.99 * one) == "sums over 0.99 records"
    assert said(records=torch.nan * one) == "sums over nan records"
    assert "sums over" not in said(records=one)
    whole = sent["code"].clone()
    whole[0] = -1e-3
    assert (said(code=whole) == "a row of -0.001 records") == target.counts
    room = n * (1 + TOLERANCE)
    for sign in (1.0, -1.0):
        whole[0] = sign * room * 1.0001
        if sign > 0 or not target.counts:
            assert said(code=whole) == f"a code with the sum {room * 1.0001:g} of {n:g} records"
        whole[0] = sign * room * 0.9999
        assert "a code with the sum" not in said(code=whole)
    if "products" in sent:
        wide = torch.eye(2).double() * room
        wrong = f"squares of numbers with the sum {1.0001 * room:g}"
        assert said(products=fold(1.0001 * wide)) == wrong
        assert said(products=fold(0.9999 * wide)) == ""
        spread = torch.tensor([4.0, 9.0]).double()
        held = dict(sent) | {"products": fold(spread.diag())}
    else:
        held = dict(sent)
        spread = held["code"].abs()
    # A sum of features is at most as long as Cauchy and Schwarz allow, and rounding.
    trace = float(made(kind, seed, n).covariance.trace()) * n
    for row in range(len(spread)):
        sums = torch.zeros_like(held["sums"])
        longest = math.sqrt(float(spread[row]) * trace * (1 + 2 * TOLERANCE)) / (1 - 1e-3)
        for beyond in (0.9999, 1.0001):
            sums[row] = beyond * longest * torch.tensor([0.6, 0.0, -0.8]).double()
            held["sums"] = sums
            wanted = "a sum of features that is longer than their second moment allows"
            assert said(**held) == (wanted if beyond > 1 else ""), (row, beyond)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["numbers", "labels"]), SEEDS, st.floats(-0.1, 0.1))
def test_exact_second_moments_have_no_eigenvalue_below_rounding(
    kind: str, seed: int, added: float
) -> None:
    target, sent = target_of(kind), exact_of(kind, seed, 60)
    drawn = np.random.default_rng(seed)
    for name, side in (("squares", D), *([("products", 2)] if "products" in sent else [])):
        vectors, _ = np.linalg.qr(drawn.normal(size=(side, side)))
        # Far above what the sums need, but for the products, which records limit.
        values = np.full(side, 1e4 if name == "squares" else 20.0)
        # At the edge the smallest eigenvalue is -0.001 of the trace.
        others = values[1:].sum()
        edge = -1e-3 * others / (1 + 1e-3)
        values[0] = edge * (1 + added) if abs(added) > 1e-4 else others
        matrix = torch.from_numpy(vectors * values @ vectors.T)
        changed = dict(sent) | {name: fold((matrix + matrix.T) / 2)}
        if name == "products":
            changed["sums"] = torch.zeros_like(changed["sums"])
        found = refusal(check_exact, changed, target, SurrogateError)
        assert (found != "") == (added > 1e-4), (values, found)
        if found:
            assert found == (
                "second moments that no records have: the matrix has a negative eigenvalue"
            )


def at_limit(table: Tensor, name: str, value: float, room: float) -> Tensor:
    """The table with the length that a limit is about at a value; `room` is what noise may add."""
    table = table.double().clone()
    if name == "records":
        table[:] = -value
    elif name in ("code", "below"):
        table[0] = value + room if name == "code" else -value
    else:
        table[:] = 0.0
        table[-1] = value + room
    return table


def noisy_limits(
    sent: dict[str, Tensor], sigmas: dict[str, float], counts: bool
) -> list[tuple[str, float, str, float]]:
    """What is wrong, the most it can be, and which tensor has which length then."""
    rows = len(sent["sums"])
    tail = math.sqrt(2 * math.log(8 * (rows + 4) / FALSE_ALARM))
    n = max(float(sent["records"]), 0.0) if "records" in sent else 0.0
    found = []
    if "records" in sent:
        most = n + tail * sigmas["records"]
        found = [
            ("a number of records below zero", tail * sigmas["records"], "records", 0.0),
            ("a code beyond its records", most, "code", tail * sigmas["code"]),
        ]
        for name, what in (
            ("totals", "a sum of features beyond its records"),
            ("squares", "second moments beyond their records"),
            ("products", "products beyond their records"),
        ):
            if name in sent:
                room = sigmas[name] * (math.sqrt(sent[name].shape[-1]) + tail)
                found.append((what, (rows if name == "products" else 1) * most, name, room))
    if counts:
        found.append(("a row of records below zero", tail * sigmas["code"], "below", 0.0))
    return found


def check_rows(
    sent: dict[str, Tensor], sigmas: dict[str, float], said: Callable[[dict[str, Tensor]], str]
) -> None:
    """A row of features beyond its records, or beyond all records where these are sent."""
    tail = math.sqrt(2 * math.log(8 * (len(sent["sums"]) + 4) / FALSE_ALARM))
    for row in range(len(sent["sums"])):
        most = abs(float(sent["code"][row])) + tail * sigmas["code"]
        if "records" in sent:
            most = float(sent["records"]) + tail * sigmas["records"]
        edge = most + TOLERANCE + sigmas["sums"] * (math.sqrt(D) + tail)
        for beyond in (-1e-4, 1e-4):
            table = sent["sums"].clone()
            table[row] = (edge + beyond) * torch.tensor([0.6, 0.0, -0.8]).double()
            found = said(sent | {"sums": table})
            assert found.startswith("a row of features beyond its records (") == (beyond > 0)
            if beyond > 0:
                assert found.endswith("records and noise give 0 at most)")


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["numbers", "labels"]),
    SEEDS,
    RECORDS,
    st.booleans(),
    st.sampled_from([0.1, 3.0]),
)
def test_noisy_sums_are_refused_just_beyond_their_limits(
    kind: str, seed: int, n: int, records: bool, scale: float
) -> None:
    target = target_of(kind)
    sums = made(kind, seed, n)
    rows = slice(1, None) if kind == "numbers" else slice(None)
    # Sums of numbers always have their number of records.
    mean, records = sums.mean, records or kind == "numbers"
    sent = {
        "code": sums.code[rows],
        "sums": sums.sums[rows],
        "squares": fold(n * (sums.covariance + torch.outer(mean, mean))),
    }
    if records:
        sent |= {"records": torch.tensor([float(n)]), "totals": n * mean}
    if records and sums.products is not None:
        sent["products"] = fold(sums.products)
    names = ("records", "totals", "code", "sums", "squares", "products")
    sigmas = {name: scale * (1 + at / 7) for at, name in enumerate(names)}

    def said(changed: dict[str, Tensor]) -> str:
        return refusal(check_noisy, changed, target, sigmas, SurrogateError)

    assert said(sent) == ""
    for what, most, name, room in noisy_limits(sent, sigmas, target.counts):
        edge = most * (1 + TOLERANCE) + TOLERANCE
        for beyond in (-1e-5, 1e-5):
            value = edge + beyond * max(1.0, edge)
            own = "code" if name == "below" else name
            table = at_limit(sent[own], name, value, room)
            wanted = f"{what} ({value:.4g}; records and noise give {most:.4g} at most)"
            found = said(sent | {own: table})
            if beyond > 0:
                assert found == wanted
            else:
                assert not found.startswith(what), found
    check_rows(sent, sigmas, said)
