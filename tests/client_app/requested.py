"""Requests at a site whose steps are only noted: what is called, in which order, and with what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.client_app import requests
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import Run
from fedsurrogate.common.wire.records import from_record, to_record
from tests.attacks.privacy.visits import close_logs

FLOWER, SITE, CACHE, KEPT = "77", "north", 12.5, 34.5
PRIVATE = {"epsilon": 5.0, "delta": 1e-5, "classes": "a,b,c"}
SUMMED = {"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "a,b,c"}
SEALED = {"fedpft.seal": True, "fedpft.topology": "chain", "classes": "a,b,c"}
LARGEST = 1073741824
Note = tuple[Any, ...]


class Calls:
    """What was called, in order, and the functions that note it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[Note] = []
        self.patch = patch

    def noting(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.made.append((name, *given, *named.values()))
            return result

        return call

    def instead(self, name: str, result: Any = None, module: Any = requests) -> None:
        """Note calls of a function that a module calls, and make none."""
        self.patch.setattr(module, name, self.noting(name, result))

    def names(self) -> list[str]:
        return [each[0] for each in self.made]

    def of(self, name: str) -> Note:
        (found,) = (each for each in self.made if each[0] == name)
        return found[1:]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield Calls(monkeypatch)
    close_logs()


def gate(
    calls: Calls,
    exact: bool = True,
    limits_attacks: bool = False,
    smallest: int = 2,
    at_models: bool = True,
) -> Any:
    """A gate that only notes what it is asked, in the place of the site's own."""
    made = SimpleNamespace(
        policy=SimpleNamespace(
            cache_mib=CACHE,
            kept_mib=KEPT,
            limits_attacks=limits_attacks,
            exact_sums_at_models=at_models,
        ),
        check_request=calls.noting("check_request"),
        check_receipts=calls.noting("check_receipts", 41),
        new_receipt=calls.noting("new_receipt", {"receipt": "new"}),
        check_size=calls.noting("check_size"),
        exact_numbers_may_leave=calls.noting("exact_numbers_may_leave", exact),
        smallest_class=calls.noting("smallest_class", smallest),
        let_out=calls.noting("let_out"),
        ledger=SimpleNamespace(entries=lambda: [{}, {"flower_run": FLOWER}]),
    )
    made.has_charged = lambda run: any(e.get("flower_run") == run for e in made.ledger.entries())
    calls.instead("open_gate", made)
    return made


def features(simulated: bool) -> SiteFeatures:
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    # Columns in other units have a frame.
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(5)
    part = LabelledFeatures(x, labels)
    return SiteFeatures(part, part, ("a", "b", "c"), "print", 0.25, simulated)


def request(
    folder: Path, run: Run, data: str = "", payload: bytes | None = None, **numbers: Any
) -> SiteRequest:
    node = NodeConfig(site=SITE, data=data, data_dir=data and str(folder), state_dir=str(folder))
    _, info = from_record(message(payload, **numbers), LARGEST)
    return SiteRequest(run, node, SITE, flower_run=FLOWER, payload=payload, info=info)


def message(payload: bytes | None, **numbers: Any) -> Any:
    size = {} if payload is None else {"bytes": len(payload)}
    named = {key.removesuffix("_"): value for key, value in numbers.items()}
    return to_record(payload, size | named)
