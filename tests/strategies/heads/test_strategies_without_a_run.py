"""Strategies of heads without a network: limits of messages, rows of classes, what is combined, and which
sites are asked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters, check_update
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.fedavg import Representation, Updates
from fedsurrogate.strategies.heads import Heads, average_head
from tests.strategies.base.test_courses_of_a_run import Kept

CLASSES = ("a", "b", "c")


def head(site: int = 0, classes: tuple[str, ...] = CLASSES, records: int = 9) -> Parameters:
    draw = torch.Generator().manual_seed(site)
    tensors = {
        "weight": torch.randn(len(classes), 4, generator=draw),
        "bias": torch.randn(len(classes), generator=draw),
        "mean": torch.ones(4),
    }
    return Parameters(Header("average", "r", f"s{site}", "f", classes), 1, tensors, records)


@given(st.integers(0, 2**24))
def test_a_message_has_at_most_eight_numbers_a_byte_or_four_million(size: int) -> None:
    found = Heads({"method": "average"}, Kept()).most_numbers(range(size))  # type: ignore[arg-type]
    assert found == max(size, min(8 * size, 4_194_304))


@pytest.mark.parametrize("classes", [(), ("c", "a", "b")])
@pytest.mark.parametrize("defence", ["none", "screen", "median"])
def test_the_rule_of_the_method_gets_what_the_defence_keeps(
    classes: tuple[str, ...], defence: str
) -> None:
    strategy = Heads({"method": "average", "max-share": 2.5, "defence": defence}, Kept())
    sent = [head(site, records=5 + 90 * (site == 1)) for site in range(6)]
    for site, each in enumerate(sent):
        each.tensors["weight"] = torch.eye(3, 4) * (-90 if site == 5 else 1 + site / 50)
    learned = strategy.learn(sent, classes)
    known = classes or CLASSES
    defended = strategy.defend(sent, known)
    assert (len(defended.kept) < len(sent)) == (defence == "screen")
    assert learned.defended.capped == defended.capped != {}
    wanted = average_head(defended.kept, known, defence)
    assert isinstance(learned.model, Head)
    assert learned.model.header.classes == known
    assert torch.equal(learned.model.weight, wanted.weight)


@pytest.mark.parametrize("change", ["", "nan", "round", "records"])
def test_a_head_is_checked_as_an_update_of_the_first_round(change: str) -> None:
    strategy, sent = Heads({"method": "average"}, Kept()), head()
    if change == "nan":
        sent.tensors["bias"][1] = torch.nan
    changed = {
        "round": Parameters(sent.header, 2, sent.tensors, 9),
        "records": Parameters(sent.header, 1, sent.tensors, 0),
    }.get(change, sent)
    shapes = {name: tuple(each.shape) for name, each in sent.tensors.items()}
    if not change:
        strategy.check(changed)
        return
    with pytest.raises(SurrogateError) as wanted:
        check_update(changed, shapes, 1, private=False)
    with pytest.raises(SurrogateError) as found:
        strategy.check(changed)
    assert str(found.value) == str(wanted.value)


def info_of(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records[INFO])


@pytest.mark.parametrize("reports", [[0.5, 0.7], [0.5], [0.5, None], [None, 0.5, 0.5]])
def test_a_shared_body_is_judged_by_the_own_heads_of_all_sites(
    monkeypatch: pytest.MonkeyPatch, reports: list[float | None]
) -> None:
    from fedsurrogate.strategies import fedavg

    strategy = Representation({"method": "fedrep"}, Kept())
    strategy.outcome.sites = {at: Site(f"s{at}", "used", "") for at in range(len(reports))}
    strategy.outcome.sites[9] = Site("s9", "dropped", "")
    infos = [{} if each is None else {"accuracy.model": each} for each in reports]
    sent: list[Any] = []

    def collection(grid: Any, messages: Any, deadline: float) -> Any:
        sent.extend((each.metadata.dst_node_id, info_of(each), deadline) for each in messages)
        return infos[1:]

    values: Any = {"x": 1}
    monkeypatch.setattr(Updates, "_judged", lambda self, grid, deadline, given_: infos[0] | given_)
    monkeypatch.setattr(strategy, "_payload", lambda: b"body")
    monkeypatch.setattr(strategy, "_read", lambda reply, site: (None, reply))
    monkeypatch.setattr(fedavg, "Collection", collection)
    grid: Any = object()
    if None in reports:
        known = sum(each is not None for each in reports)
        with pytest.raises(SurrogateError, match=f"^{known} of {len(reports)} sites reported the"):
            strategy._judged(grid, 3.0, values)
    else:
        mean = sum(each or 0.0 for each in reports) / len(reports)
        found = strategy._judged(grid, 3.0, values)
        assert found == {"x": 1, "accuracy.model": pytest.approx(mean)}
    brief = {"brief": True, "bytes": 4}
    assert sent == [(at, brief, 3.0) for at in range(1, len(reports))]
