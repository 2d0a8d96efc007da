"""A new method whose tensors have any name loses nothing where columns have other scales: how a tensor
moves to another frame follows from its field, and never from its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import fedsurrogate as fs
from fedsurrogate.client_app.methods.job import Job, SiteStatistic
from fedsurrogate.client_app.methods.sums import class_sums
from fedsurrogate.common.methods import METHODS, heads
from fedsurrogate.common.methods.method import MESSAGE, Defences, Field, Method, Plan, fields_of
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.terms import Term
from fedsurrogate.strategies.base.outcome import Defended, Learned
from fedsurrogate.strategies.heads import Heads
from tests.data_kinds.scales.affine import RECORDS, Affine, records

HERE, NAME = "tests.data_kinds.scales.test_any_name:", "of-any-name"


def method(name: str, count: str, point: bool) -> Method:
    """Sites send medians of their classes, or sums, and how many records these are of."""

    def plan(settings: Settings) -> Plan:
        own = heads.plan(settings)
        counts, sums = fields_of([Term(count, "C"), Term(name, "C d", 1, count=count)])
        sends = (counts, Field(name, "C d") if point else sums)
        combination = replace(
            own.combination, site=MESSAGE, site_sums=HERE + "centres", strategy=HERE + "Centres"
        )
        return replace(
            own,
            messages=replace(own.messages, sends=sends),
            combination=combination,
            defences=Defences(),
        )

    return Method(NAME, "Of any name", "here", plan)


def centres(job: Job) -> SiteStatistic:
    """Medians of a site's classes, or sums."""
    classes = job.classes
    count, name = job.run.plan.messages.sends
    x, y, frame = job.own_data(classes)
    counts, sums = class_sums(x, y, len(classes))
    if name.degree is None:
        sums = torch.stack([x[y == at].double().quantile(0.5, 0) for at in range(len(classes))])
    return SiteStatistic({count.name: counts, name.name: sums}, None, classes, frame, len(x))


class Centres(Heads):
    """The nearest of the classes' centres at the coordinator."""

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        return Defended(list(sent))

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        count, name = self.config.plan.messages.sends
        counts = torch.stack([each.tensors[count.name] for each in sent])[..., None]
        tables = torch.stack([each.tensors[name.name] for each in sent])
        weighed = tables * counts if name.degree is None else tables
        means = weighed.sum(0) / counts.sum(0)
        header = replace(sent[0].header, site="coordinator")
        return Learned(Head(header, means, -means.square().sum(1) / 2), Defended(list(sent)))


def accuracy(features: torch.Tensor, labels: torch.Tensor) -> float:
    """Of the model of three sites that each have mostly one class, and so differ in their frames, on the
    second half.
    """
    x, y = features[:RECORDS], labels[:RECORDS]
    rows = [(y == at) | (torch.arange(RECORDS) % 40 < 3) for at in range(3)]
    sent = [fs.fit(x[own], y[own], site=f"site-{at}", method=NAME) for at, own in enumerate(rows)]
    found = fs.learn(sent).predict(features[RECORDS:])
    return float((torch.tensor([int(each) for each in found]) == labels[RECORDS:]).double().mean())


@pytest.mark.parametrize("point", [True, False], ids=["medians", "sums"])
@pytest.mark.parametrize("names", [("medians", "sizes"), ("weight", "bias"), ("sums", "mean")])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_a_method_with_tensors_of_any_name_loses_nothing_in_other_columns(
    point: bool, names: tuple[str, str], shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, labels = records()
    monkeypatch.setitem(METHODS, NAME, method(*names, point))
    changed = Affine((3.0, -2.0, 0.0, 4.0, -3.0, 1.0), shift)(clean)
    assert accuracy(changed, labels) >= accuracy(clean, labels) - 0.02
