"""What an audit states is what its attacks found on the releases that it made, by record and by class."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from fedsurrogate.client_app.audit import release_audit
from fedsurrogate.client_app.audit.membership import (
    Trials,
    allowed_auc,
    distinct,
    largest_excess,
    lira,
    proven_epsilon,
    success,
)
from fedsurrogate.client_app.audit.output import pictures_of
from fedsurrogate.client_app.audit.release_audit import LIRA, STANDS_OUT, audit_release
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import Run, parse_run
from tests.client_app.audit.test_release_audit import hospital

NODE, COUNT = NodeConfig(site="north"), 60
PLAIN = {"backbone": "none", "fedpft.covariance": "spherical"}


def site(patch: pytest.MonkeyPatch, units: int = COUNT) -> None:
    """Records of two classes, of which each tenth is far from all others."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 3, generator=drawn)
    x[::10] *= 30
    owners = tuple(f"p{at % units}" for at in range(COUNT)) if units < COUNT else None
    train = LabelledFeatures(x, torch.arange(COUNT) % 2, owners, torch.arange(COUNT) + 100)
    own = SiteFeatures(train, train, ("a", "b"), "f", 0.0, simulated=False)
    patch.setattr(release_audit, "load_site", lambda *_: own)
    places = SimpleNamespace(dataset=SimpleNamespace(where=lambda row: f"file {row}"))
    patch.setattr(release_audit, "share", lambda *_: places)


@pytest.mark.parametrize("private", [False, True])
def test_an_audit_states_what_its_attack_found(
    monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    site(monkeypatch)
    seen, steps = list[Trials](), list[tuple[int, int]]()
    monkeypatch.setattr(
        release_audit.membership, "lira", lambda own: (seen.append(own), lira(own))[1]
    )
    budget = {"epsilon": 2.0, "delta": 1e-5, "classes": "a,b"} if private else {}
    run: Run = parse_run({**PLAIN, **budget})
    found = audit_release(run, NODE, 1e9, 12, lambda *each: steps.append(each), seed=3)
    assert steps == [(at, 12) for at in range(1, 13)]
    (own,), ratios, apart = seen, lira(seen[0]), distinct(seen[0])
    assert (own.members[::2] == ~own.members[1::2]).all()
    assert found.attacks == {LIRA: success(ratios, own.members)}
    assert (found.records, found.of, found.releases) == (COUNT, COUNT, 12)
    assert (found.mechanism, found.epsilon) == (("sums", 2.0) if private else ("none", 0.0))
    wanted = largest_excess(ratios, own.members, 2.0, 1e-5) if private else None
    assert found.excess == {LIRA: wanted}
    assert found.allowed == allowed_auc(found.epsilon, 1e-5 * private)
    assert found.proven == proven_epsilon(own, 1e-5 * private)
    labels = np.arange(COUNT) % 2
    for at, name in enumerate("ab"):
        rows = labels == at
        area = roc_auc_score(own.members[:, rows].ravel(), ratios[:, rows].ravel())
        assert found.per_class[name] == (COUNT // 2, pytest.approx(area))
    order = [int(n) for n in np.argsort(-apart) if apart[n] > STANDS_OUT]
    assert private or order
    assert found.standing_out_count == len(order)
    shown = [(each.row, each.class_name, each.where, each.distance) for each in found.standing_out]
    assert shown == [(n + 100, "ab"[n % 2], f"file {n + 100}", float(apart[n])) for n in order[:20]]


@pytest.mark.parametrize(("seconds", "most", "made"), [(0.0, 64, 8), (1e9, 12, 12), (0.0, 4, 4)])
def test_after_its_time_an_audit_has_eight_releases(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int, made: int
) -> None:
    site(monkeypatch)
    assert audit_release(parse_run(PLAIN), NODE, seconds, most, seed=1).releases == made


def test_four_units_are_enough_and_three_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    site(monkeypatch, units=4)
    found = audit_release(parse_run(PLAIN), NODE, 0.0, seed=1)
    assert (found.releases, found.proven) == (8, 0.0)
    site(monkeypatch, units=3)
    with pytest.raises(DataError, match=r"^3 units of training records; an audit needs four$"):
        audit_release(parse_run(PLAIN), NODE, 0.0, seed=1)


def test_pictures_of_records_are_small_and_only_of_images(tmp_path: Path) -> None:
    for row in range(4):
        file = tmp_path / "ab"[row % 2] / f"{row}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (300, 150), (10 * row, 0, 0)).save(file)
    node = NodeConfig(site="north", data="imagefolder", data_dir=str(tmp_path))
    # In the order of their folders: a/0, a/2, b/1, b/3.
    found = pictures_of(parse_run({}), node, [1, 2])
    for content, red in zip(found, (20, 10), strict=True):
        with Image.open(BytesIO(content)) as shown:
            assert (shown.format, shown.size) == ("PNG", (96, 48))
            assert shown.getpixel((0, 0)) == (red, 0, 0)
    assert pictures_of(parse_run(PLAIN), hospital(tmp_path / "features", [4, 4]), [1]) == []
