"""The features on which FedBE and FedKT distil: drawn around each site's mean by its records, and no
site decides their scale; and the settings that decide how many, and what the head is trained with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.heads import (
    SAMPLED,
    _drawn,
    average_head,
    ensemble,
    fedbe,
    fedbe_head,
    fedkt,
    fedkt_head,
)

D, CLASSES = 3, ("a", "b")
# In median deviations.
MOST = 6.0


@st.composite
def heads(draw: st.DrawFn) -> list[Parameters]:
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    found = []
    for number in range(draw(st.integers(1, 5))):
        far, wide = draw(st.sampled_from([0.0, 40.0, -90.0])), draw(st.sampled_from([1.0, 50.0]))
        tensors = {
            "weight": torch.randn(2, D, generator=random),
            "bias": torch.randn(2, generator=random),
            "mean": torch.randn(D, generator=random) + far,
            "deviation": wide * (torch.rand(D, generator=random) + 0.1),
        }
        header = Header("fedbe", "r", f"s{number}", "f", CLASSES)
        found.append(Parameters(header, 1, tensors, draw(st.integers(1, 90))))
    return found


@settings(max_examples=60, deadline=None)
@given(heads(), st.sampled_from([1, 40, 301]), st.integers(0, 99))
def test_features_are_drawn_within_what_most_sites_have(
    sent: list[Parameters], number: int, seed: int
) -> None:
    total = sum(each.records for each in sent)
    middle, wide = list[float](), list[float]()
    for j in range(D):
        for name, of in (("mean", middle), ("deviation", wide)):
            column = sorted(float(each.tensors[name][j]) for each in sent)
            of.append(column[(len(column) - 1) // 2])
    generator, rows = torch.Generator().manual_seed(seed), []
    for each in sent:
        mean, deviation = each.tensors["mean"].clone(), each.tensors["deviation"].clone()
        if len(sent) >= 3:
            for j in range(D):
                room = MOST * wide[j]
                mean[j] = min(max(float(mean[j]), middle[j] - room), middle[j] + room)
                deviation[j] = min(float(deviation[j]), room)
        count = max(1, round(number * each.records / total))
        rows.append(mean + deviation * torch.randn(count, D, generator=generator))
    torch.testing.assert_close(_drawn(sent, number, seed), torch.cat(rows))


@settings(max_examples=4, deadline=None)
@given(heads(), st.integers(0, 99), st.sampled_from(["none", "median"]))
def test_settings_decide_what_a_head_is_distilled_on(
    sent: list[Parameters], seed: int, defence: str
) -> None:
    for method, made in (("fedbe", fedbe_head), ("fedkt", fedkt_head)):
        flat: dict[str, Any] = {
            "method": method,
            "baseline.synthetic": 60,
            "seed": seed,
            "head.min-steps": 3,
        }
        own = parse_run(flat).settings
        features = _drawn(sent, 60, seed)
        each = list(ensemble(sent, CLASSES, own, "none").heads)
        if method == "fedbe":
            mean = average_head(sent, CLASSES, own, defence)
            weights = [float(one.records) for one in sent]
            wanted = fedbe(features, each, mean, weights, SAMPLED, seed)
        else:
            wanted = fedkt(features, each, 2)
        weight, bias = train_on_features(features, wanted, 2, own.head, seed)
        found = made(sent, CLASSES, own, defence)
        assert found.header == Header("fedbe", "r", "coordinator", "f", CLASSES)
        torch.testing.assert_close(found.weight, weight)
        torch.testing.assert_close(found.bias, bias)


@pytest.mark.parametrize("sites", [2, 3])
def test_a_mean_far_away_counts_as_it_is_only_where_two_sites_cannot_outvote_it(sites: int) -> None:
    def site(number: int, mean: float) -> Parameters:
        tensors = {"mean": torch.full((1,), mean), "deviation": torch.zeros(1)}
        header = Header("fedbe", "r", f"s{number}", "f", CLASSES)
        return Parameters(header, 1, tensors, 10)

    drawn = _drawn([*(site(k, 0.0) for k in range(sites - 1)), site(9, 1e6)], 30, 0)
    assert float(drawn.max()) == (1e6 if sites == 2 else 0.0)
