"""An audit with its releases and attacks replaced: what is drawn, attacked, counted and named, and what
a check of attacks keeps and refuses.
"""

from __future__ import annotations

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from fedsurrogate.client_app.audit import output, release_audit
from fedsurrogate.client_app.audit.membership import (
    Trials,
    distinct,
    largest_excess,
    lira,
    proven_epsilon,
    success,
    summary,
    usual_distance,
)
from fedsurrogate.client_app.audit.release_audit import audit_release
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run

COUNT = 30
NODE = NodeConfig(site="north")


class Site:
    """A site whose releases give a member three more, where its row is below five."""

    def __init__(self, patch: pytest.MonkeyPatch, units: tuple[str, ...] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(COUNT) % 2
        x = torch.randn(COUNT, 3, generator=generator)
        self.train = LabelledFeatures(x, labels, units, rows=torch.arange(COUNT) + 100)
        self.members: list[Any] = []
        self.scores: list[Any] = []
        self.drawn, self.count = np.random.default_rng(2), COUNT
        site = SiteFeatures(self.train, self.train, ("a", "b"), "f", 0.0, simulated=False)
        header = SimpleNamespace(frame=b"")
        for name, answer in {
            "load_site": lambda run, node, most: site,
            "_release": self.release,
            "unpack_surrogate": lambda payload: SimpleNamespace(header=header),
            "scores_of": self.scored,
            "nearest": lambda sent, classes, x, y, inside: [("a", float(inside.sum()), 20.0)],
            "_places": lambda run, node, rows: [f"file {row}" for row in rows],
        }.items():
            place = release_audit.membership if name == "scores_of" else release_audit
            patch.setattr(place, name, answer)

    def release(self, run: Any, node: NodeConfig, own: SiteFeatures) -> bytes:
        assert own.train.rows is self.train.rows
        self.members.append(
            [any(map(row.equal, own.train.features)) for row in self.train.features]
        )
        assert len(own.train.labels) == sum(self.members[-1])
        return b""

    def scored(self, sent: Any, classes: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count = self.count
        assert (tuple(classes), len(x), len(y)) == (("a", "b"), count, count)
        far = 9.0 * (np.arange(count) < 25) * np.array(self.members[-1][:count])
        self.scores.append(self.drawn.normal(size=count) + far)
        return torch.from_numpy(self.scores[-1])


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_an_audit_is_made_of_its_attacks_on_pairs_of_halves(
    monkeypatch: pytest.MonkeyPatch, private: bool, paired: bool
) -> None:
    units = tuple(f"p{at // 2:02}" for at in range(COUNT)) if paired else None
    site, steps = Site(monkeypatch, units), list[tuple[int, int]]()
    run = parse_run({"epsilon": 2.0, "delta": 1e-5, "classes": "a,b"} if private else {})
    found = audit_release(run, NODE, 1e9, 10, lambda *each: steps.append(each), seed=3)
    assert steps == [(at, 10) for at in range(1, 11)]
    members, scores = np.array(site.members), np.stack(site.scores)
    assert (members[::2] == ~members[1::2]).all()
    drawn = np.random.default_rng(3)
    for half in members[::2]:
        own = drawn.random(COUNT // 2 if paired else COUNT) < 0.5
        assert half.tolist() == (own.repeat(2) if paired else own).tolist()
    trials = Trials(scores, members)
    ratios, apart = lira(trials), distinct(trials)
    assert found.attack == success(ratios, members)
    assert (found.attack_name, found.others) == ("LiRA on the release", {})
    assert (found.method, found.mechanism) == ("fedpft", "sums" if private else "none")
    assert (found.epsilon, found.records, found.of, found.releases) == (2.0 * private, 30, 30, 10)
    wanted = largest_excess(ratios, members, 2.0, 1e-5) if private else None
    assert found.excess == {"LiRA on the release": wanted}
    assert found.allowed == (pytest.approx(1 / (1 + np.exp(-2)), abs=1e-4) if private else 1.0)
    assert found.proven == (0.0 if paired else proven_epsilon(trials, 1e-5 * private))
    assert paired or found.proven > 0
    for at, name in enumerate("ab"):
        rows = np.arange(COUNT) % 2 == at
        area = roc_auc_score(members[:, rows].ravel(), ratios[:, rows].ravel())
        assert found.per_class[name] == (15, pytest.approx(area))
    order = sorted((n for n in range(COUNT) if apart[n] > 3.1), key=lambda n: -apart[n])
    assert len(order) > 20
    assert found.standing_out_count == len(order)
    assert [each.row for each in found.standing_out] == [n + 100 for n in order[:20]]
    assert [each.class_name for each in found.standing_out] == ["ab"[n % 2] for n in order[:20]]
    assert [each.where for each in found.standing_out] == [f"file {n + 100}" for n in order[:20]]
    assert [each.distance for each in found.standing_out] == pytest.approx(apart[order[:20]])
    near = [("a", float(inside.sum()), 20.0) for inside in members]
    assert found.nearest == summary(near, usual_distance(site.train.features))
    assert found.facts()["records"] == 30


@pytest.mark.parametrize(("seconds", "most", "made"), [(0.0, 64, 8), (1e9, 12, 12), (0.0, 4, 4)])
def test_after_its_time_an_audit_has_eight_releases(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int, made: int
) -> None:
    site = Site(monkeypatch)
    assert audit_release(parse_run({}), NODE, seconds, most, seed=1).releases == made
    assert len(site.members) == made


def test_four_units_are_enough_and_three_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    Site(monkeypatch, tuple(f"p{at % 4}" for at in range(COUNT)))
    assert audit_release(parse_run({}), NODE, 0.0, seed=1).releases == 8
    Site(monkeypatch, tuple(f"p{at % 3}" for at in range(COUNT)))
    with pytest.raises(DataError, match=r"^3 units of training records; an audit needs four$"):
        audit_release(parse_run({}), NODE, 0.0, seed=1)


@pytest.mark.parametrize("side", [None, 4])
def test_pictures_of_records_are_small_and_only_of_images(
    monkeypatch: pytest.MonkeyPatch, side: int | None
) -> None:
    opened: list[int] = []

    def image(row: int) -> Image.Image:
        opened.append(row)
        return Image.new("RGB", (300, 150), (row, 0, 0))

    data = SimpleNamespace(opener=image, open_image=image)
    monkeypatch.setattr(output, "share", lambda *given: SimpleNamespace(dataset=data))
    more = {} if side is None else {"side": side}
    found = output.pictures_of(parse_run({}), NODE, [7, 3], **more)
    assert opened == [7, 3]
    for content, row in zip(found, (7, 3), strict=True):
        with Image.open(BytesIO(content)) as shown:
            assert (shown.format, shown.size) == ("PNG", ((side or 96), (side or 96) // 2))
            assert shown.getpixel((0, 0)) == (row, 0, 0)
    data.opener = None  # type: ignore[assignment]
    assert output.pictures_of(parse_run({}), NODE, [7]) == []
