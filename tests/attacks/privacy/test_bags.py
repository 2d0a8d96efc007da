"""A bag changes each sum before noise by at most its bound, whatever is in it, and one image more or
less changes one bag.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.client_app.datasets.left_out import NoRecordsError
from fedsurrogate.client_app.features.site_features import SiteFeatures, load_site
from fedsurrogate.client_app.governance.release import without_records
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import class_moments, coded_moments
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.wire.surrogate_proto import pack_map

DIMENSION = 3
UNCHANGED = PublicMap()
PRIVATE: dict[str, Any] = {
    "epsilon": 2.0,
    "delta": 1e-5,
    "device": "cpu",
    "secure-aggregation": True,
    "features.bag": "mean",
}
# What is learned, and the columns of a file that hold it.
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "class": ({"classes": "0,1", "fedpft.covariance": "gram"}, ("y",)),
    "number": ({"task": "regression", "target-range": "-1,1", "value-columns": "age"}, ("age",)),
    "labels": ({"task": "multilabel", "label-columns": "edema,mass"}, ("edema", "mass")),
    "time": (
        {"task": "survival", "horizon": 3.0, "bins": 3, "time-column": "t", "event-column": "e",
         "time-unit": "years"},
        ("t", "e"),
    ),
}  # fmt: skip
CELLS: dict[str, st.SearchStrategy[tuple[float, ...]]] = {
    "class": st.tuples(st.sampled_from([0.0, 1.0])),
    "number": st.tuples(st.floats(-1e6, 1e6)),
    "labels": st.tuples(*2 * [st.sampled_from([0.0, 1.0, float("nan")])]),
    "time": st.tuples(st.floats(0, 5), st.sampled_from([0.0, 1.0])),
}
numbers = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
images = st.lists(st.tuples(*DIMENSION * [numbers]), min_size=1, max_size=5)
searched = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
# A bag: patient, features of its images, and its target.
Bag = tuple[int, list[tuple[float, ...]], tuple[float, ...]]


def run_of(kind: str) -> Run:
    return parse_run(PRIVATE | KINDS[kind][0])


def site_of(kind: str, bags: list[Bag], unit: str) -> SiteFeatures:
    """A site with these bags, as it reads them from its file."""
    rows = [(who, at, x, cells) for at, (who, own, cells) in enumerate(bags) for x in own]
    content: dict[str, Tensor] = {
        "x": torch.tensor([row[2] for row in rows]).reshape(-1, DIMENSION),
        "patient": torch.tensor([row[0] for row in rows], dtype=torch.int64),
        "bag": torch.tensor([row[1] for row in rows], dtype=torch.int64),
    }
    for at, name in enumerate(KINDS[kind][1]):
        column = torch.tensor([row[3][at] for row in rows], dtype=torch.float64)
        content[name] = column.long() if kind == "class" else column
    with TemporaryDirectory() as home:
        save_file(content, Path(home) / "f.safetensors")
        node = {
            "data": "safetensors",
            "data-dir": home,
            "cache-dir": f"{home}/cache",
            "state-dir": f"{home}/state",
            "patient-column": "patient",
            "bag-column": "bag",
            "unit": unit,
            "target-columns": "" if kind == "class" else ",".join(KINDS[kind][1]),
        }
        run, own = run_of(kind), parse_node_config(node)
        try:
            return load_site(run, own, 100.0)
        except NoRecordsError:
            # Two whole copies with different targets are both left out.
            return without_records(run, own)


def sums_of(kind: str, site: SiteFeatures, public: PublicMap = UNCHANGED) -> dict[str, Tensor]:
    """What the site adds to secure aggregation before noise, as multiples of the bounds of its claim."""
    run = run_of(kind)
    job = Job(run, parse_node_config({}), "a", site, payload=pack_map(public))
    made = (class_moments if kind == "class" else coded_moments)(job)
    assert made.claim is not None
    return {name: made.values[name] / bound for name, (_, bound) in made.claim.noise.items()}


def changes(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((value - other[name]).norm()) for name, value in one.items()}


@pytest.mark.parametrize("unit", ["bag", "patient"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_changes_each_sum_by_its_bound_at_most_whatever_is_in_its_bags(
    kind: str, unit: str
) -> None:
    @searched
    @given(data=st.data())
    def bounded(data: st.DataObject) -> None:
        bags = st.tuples(st.integers(0, 2), images, CELLS[kind])
        base: list[Bag] = data.draw(st.lists(bags, min_size=1, max_size=3))
        of_unit = 1 if unit == "bag" else 3
        more = data.draw(st.lists(st.tuples(images, CELLS[kind]), min_size=1, max_size=of_unit))
        new: list[Bag] = [(9, own, cells) for own, cells in more]
        moved = changes(
            sums_of(kind, site_of(kind, base + new, unit)),
            sums_of(kind, site_of(kind, base, unit)),
        )
        assert max(moved.values()) <= 1 + 1e-9, moved

    bounded()


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_more_is_at_most_a_bag_that_goes_and_one_that_comes(kind: str) -> None:
    @searched
    @given(data=st.data())
    def bounded(data: st.DataObject) -> None:
        bags = st.tuples(st.integers(0, 2), images, CELLS[kind])
        base: list[Bag] = data.draw(st.lists(bags, min_size=1, max_size=3))
        who, own, cells = base[0]
        grown: list[Bag] = [(who, [*own, data.draw(st.tuples(*DIMENSION * [numbers]))], cells)]
        moved = changes(
            sums_of(kind, site_of(kind, grown + base[1:], "bag")),
            sums_of(kind, site_of(kind, base, "bag")),
        )
        assert max(moved.values()) <= 2 + 1e-9, moved

    bounded()


@pytest.mark.parametrize("images_of_one", [1, 10, 1000])
def test_a_large_bag_counts_as_a_small_one(images_of_one: int) -> None:
    x = [(3.0, 4.0, 0.0)] * images_of_one
    site = site_of("class", [(0, x, (0.0,)), (1, [(0.0, 0.0, 2.0)], (1.0,))], "bag")
    made = sums_of("class", site)
    assert len(site.train.labels) == 2
    torch.testing.assert_close(
        made["sums"], torch.tensor([[0.6, 0.8, 0], [0, 0, 1]]).double(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_feature_of_a_bag_is_clipped_after_the_mean_and_the_public_map(kind: str) -> None:
    """Two long images of which one is longer: the mean of clipped ones would have another direction."""
    public = PublicMap(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]), torch.tensor([1.0, 0, 0]))
    own = torch.tensor([[30.0, 0.0, 1.0], [0.0, 2.0, 5.0]])
    cells = {"class": (0.0,), "number": (0.5,), "labels": (1.0, 0.0), "time": (1.0, 1.0)}[kind]
    site = site_of(kind, [(0, [tuple(row) for row in own.tolist()], cells)], "bag")
    clipped, _ = clip(public.apply(own).mean(0)[None].double(), 1.0)
    made = sums_of(kind, site, public)
    found = made["sums"].reshape(-1, 2)
    directions = found[found.norm(dim=1) > 0]
    assert len(directions)
    for row in directions / directions.norm(dim=1, keepdim=True):
        assert abs(float(row @ clipped[0])) == pytest.approx(1.0, abs=1e-5)
