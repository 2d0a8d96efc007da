"""A site's own version of a model of numbers: what each version mends, and when none is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.model_use.adapted import adapted_classifier, store_adapted
from fedsurrogate.client_app.model_use.adapted_numbers import (
    CORRECTED,
    MOVED,
    SCALED,
    adapt_numbers,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.model_use.target_report import evaluate_target
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError, DataError, SealError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.making import make_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import facts_of

RUN = parse_run({"target": "number", "target-range": "-20,20", "value-columns": "ink"})
Change = Callable[[Tensor, Tensor], Tensor]


def head(**more: Any) -> Head:
    assert RUN.target is not None
    target = json.dumps({**RUN.target.public, "deviation": [9.0]})
    weight = torch.tensor([[2.0, -1.0, 0.0, 0.5]])
    return Head(Header("fedpft", "", "", "f", ("ink",)), weight, torch.tensor([1.0]), target=target)


def records(change: Change, count: int = 300, seed: int = 0, copies: int = 1) -> HeldOut:
    """Records whose numbers are those of the model, changed, with errors of deviation one."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw).repeat_interleave(copies, 0)
    noise = torch.randn(count, 1, generator=draw).repeat_interleave(copies, 0)
    values = change(head().scores(x), x).double() + noise
    patients = tuple(str(row // copies) for row in range(len(x)))
    zeros = torch.zeros(len(x), dtype=torch.int64)
    return HeldOut(x, zeros, patients, {}, "own records", values=values)


CHANGES: dict[str, Change] = {
    MOVED: lambda scores, x: scores + 3,
    SCALED: lambda scores, x: 0.3 * scores - 2,
    CORRECTED: lambda scores, x: scores + 2.5 * x[:, 2:3] - 2 * x[:, 3:4],
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_version_that_mends_the_site_is_chosen_and_knows_its_error(name: str) -> None:
    found = adapt_numbers(head(), records(CHANGES[name]))
    assert found.own is not None
    assert isinstance(found.own, Head)
    if name == CORRECTED:
        assert found.chosen == CORRECTED
    unseen = records(CHANGES[name], seed=5)
    assert unseen.values is not None
    error = (found.own.scores(unseen.features) - unseen.values).square().mean() ** 0.5
    before = (head().scores(unseen.features) - unseen.values).square().mean() ** 0.5
    assert error < 1.15
    assert error < 0.8 * before
    assert facts_of(found.own.target)["deviation"][0] == pytest.approx(1.0, abs=0.15)
    gains = {each.name: each.gain for each in found.judged}
    assert gains["shared"] == 0
    assert gains[found.chosen] == max(gains.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_fits_stays(seed: int) -> None:
    found = adapt_numbers(head(), records(lambda scores, x: scores, count=80, seed=seed))
    assert found.own is None
    assert found.chosen == "shared"


def test_copies_of_a_patient_are_never_in_two_folds() -> None:
    """Otherwise a ridge would learn the noise of a patient, and look better than it is."""
    held = records(lambda scores, x: scores, count=30, copies=6)
    assert adapt_numbers(head(), held).own is None
    alone = replace(held, patients=None)
    gains = [
        next(each.gain for each in adapt_numbers(head(), own).judged if each.name == CORRECTED)
        for own in (held, alone)
    ]
    assert gains[0] < gains[1]


def test_what_cannot_be_adapted_is_refused() -> None:
    held = records(lambda scores, x: scores, count=12)
    with pytest.raises(DataError, match="12 records with values are too few"):
        adapt_numbers(head(), held)
    labels = json.dumps({"name": "labels", "columns": ["ink"]})
    with pytest.raises(ConfigError, match="not a model of numbers"):
        adapt_numbers(replace(head(), target=labels), records(CHANGES[MOVED]))
    few = replace(records(CHANGES[MOVED]), patients=("one",) * 300)
    with pytest.raises(DataError, match="records of 1 patients"):
        adapt_numbers(head(), few)


def test_the_own_version_is_kept_used_and_named_on_the_page(tmp_path: Path) -> None:
    node = parse_node_config({"site": "north", "state-dir": str(tmp_path / "state")})
    signed = make_signed_model(head(), RUN, None, "1", 2, bytes(range(32)))
    held = records(CHANGES[SCALED])
    found = adapt_numbers(signed.classifier, held)
    assert found.own is not None
    file = store_adapted(node, signed, found.own, found.share, found.chosen)
    own = adapted_classifier(node, signed)
    assert isinstance(own, Head)
    assert own.target == found.own.target  # type: ignore[attr-defined]
    assert torch.equal(own.scores(held.features), found.own.scores(held.features))
    facts, page = evaluate_target(signed, held, tmp_path / "page", draws=20, own=own)
    plain, shared = evaluate_target(signed, held, tmp_path / "plain", draws=20)
    content = json.loads(facts.read_text())
    assert content["adapted"] is True
    before = json.loads(plain.read_text())["measures"]["ink"]["r2"]["value"]
    assert before < 0 < content["measures"]["ink"]["r2"]["value"]
    assert "own version of the shared one" in page.read_text()
    assert "own version of the shared one" not in shared.read_text()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(SealError):
        adapted_classifier(node, signed)
    assert np.isfinite(own.weight.numpy()).all()
