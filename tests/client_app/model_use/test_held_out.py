"""Which records judge a model: of which part, with which classes and columns, and how many are left
out; the sources themselves are replaced by a table in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource
from fedsurrogate.client_app.datasets.partition import SiteShare
from fedsurrogate.client_app.features.extraction import Features
from fedsurrogate.client_app.model_use import held_out as module
from fedsurrogate.client_app.model_use.held_out import Source, bag_column_of, held_out
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.signed_models.signed_model import SignedModel, make_signed_model
from tests.client_app.model_use.test_decisions import KEY, head

NODE = NodeConfig(site="north", data="parquet", partition_id=1, num_partitions=2)
RUN = parse_run({"seed": 6})
PRIVATE = parse_run({"epsilon": 1.0, "delta": 1e-5, "classes": "a,b,c"})
# Classes in another order than the model's, and one that it does not know.
LABELS, CLASSES = torch.tensor([3, 0, 1, 2, 1, 0, 2]), ("b", "a", "c", "other")
TRAIN, TEST = torch.tensor([5, 1, 3]), torch.tensor([4, 0, 6, 2])
WARDS = ("w0", "w1", "w2", "w3", "w4", "w5", "w6")


def model_of(run: Run = RUN) -> SignedModel:
    return make_signed_model(head(1), run, None, "1", 2, KEY)


class Data:
    """A data set of seven records, and what was asked of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.x = torch.arange(42.0).reshape(7, 6)
        self.ok = torch.ones(7, dtype=torch.bool)
        patients = tuple(f"p{at}" for at in range(7))
        is_train = torch.zeros(7, dtype=torch.bool)
        self.dataset = Dataset("own", LABELS, CLASSES, is_train, "key", patients=patients)
        self.origins: list[tuple[str, ...] | None] = [WARDS, tuple(reversed(WARDS))]
        self.fingerprint = "f" * 64

        def all_of(source: DataSource, seed: int) -> list[Dataset]:
            self.asked.append((source, seed))
            if not source.site_column:
                return [self.dataset]
            return [replace(self.dataset, origin=origin) for origin in self.origins]

        def share(run: Run, node: NodeConfig, simulated: bool) -> SiteShare:
            self.asked.append((run.digest, node, simulated))
            return SiteShare(self.dataset, TRAIN, TEST, simulated)

        def features(dataset: Dataset, settings: Any, node: Any, most: float, *more: Any) -> Any:
            self.asked.append(("features", *more))
            return Features(self.x, self.ok, self.fingerprint, 0.0, False)

        patch.setattr(module, "load_all", all_of)
        patch.setattr(module, "share", share)
        patch.setattr(module, "dataset_features", features)
        patch.setattr(module, "site_backbone", lambda settings, node: "backbone")
        patch.setattr(
            module, "check_backbone", lambda model, backbone: self.asked.append(("check", backbone))
        )

    def judged_by_features(self) -> None:
        self.dataset = replace(self.dataset, features=self.x)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Data:
    return Data(monkeypatch)


@pytest.mark.parametrize("part", ["test", "train"])
@pytest.mark.parametrize("simulated", [False, True])
def test_records_of_a_part_have_the_models_classes(data: Data, part: Any, simulated: bool) -> None:
    model, run = model_of(), parse_run({"seed": 8})
    source = Source(known_only=True, columns=("ward",), simulated=run if simulated else None)
    found = held_out(model, NODE, source, part)
    rows = [4, 6, 2] if part == "test" else [5, 1, 3]
    assert found.labels.tolist() == [("a", "b", "c").index(CLASSES[LABELS[at]]) for at in rows]
    assert torch.equal(found.features, data.x[rows])
    assert found.patients == tuple(f"p{at}" for at in rows)
    # The column of the second partition.
    assert found.groups == {"ward": [WARDS[6 - at] for at in rows]}
    assert found.left_out == 0
    words = {"test": "test records", "train": "training records"}[part]
    others = "1 of classes that it does not know"
    only = f", of the model's classes only (it is wrong for all others: {others})"
    where = f"{'the simulation' if simulated else 'this site'}'s {words}"
    assert found.where == where + only * (part == "test")
    assert found.values is None
    used = run if simulated else model.manifest.run_config()
    asked, column, *rest = data.asked
    assert asked == (used.digest, NODE, simulated)
    assert (column[0].site_column, column[1]) == ("ward", used.settings.seed)
    assert rest == [("check", "backbone"), ("features", "backbone")]


def test_records_that_cannot_be_used_are_counted_without_those_of_unknown_classes(
    data: Data,
) -> None:
    data.ok[4] = False
    data.x[2, 3] = torch.nan
    found = held_out(model_of(), NODE, Source(known_only=True, columns=("ward",)))
    assert (found.left_out, found.patients) == (2, ("p6",))
    assert (found.labels.tolist(), found.groups) == ([2], {"ward": [WARDS[0]]})
    data.ok[6] = False
    with pytest.raises(DataError, match=r"^no usable held-out record in 'own'$"):
        held_out(model_of(), NODE, Source(known_only=True))


@pytest.mark.parametrize("origins", [[WARDS, None], [WARDS, WARDS[:6]]])
def test_a_column_has_a_value_for_each_record(
    data: Data, origins: list[tuple[str, ...] | None]
) -> None:
    data.origins = origins
    with pytest.raises(DataError, match="'ward' cannot be read for each of the 7 records"):
        held_out(model_of(), NODE, Source(columns=("ward",)), "train")


def test_no_record_is_no_held_out_record(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "share", lambda *_: SiteShare(data.dataset, TRAIN, TEST[:0], False))
    with pytest.raises(DataError, match="no held-out records in 'own'"):
        held_out(model_of(), NODE, Source(known_only=True))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("simulated", [False, True])
def test_in_a_private_run_without_a_split_of_the_files_all_records_train(
    data: Data, private: bool, drawn: bool, simulated: bool
) -> None:
    data.dataset = replace(data.dataset, drawn=drawn, classes=("b", "a", "c", "a"))
    model = model_of(PRIVATE if private else RUN)
    source = Source(simulated=RUN if simulated else None)
    trained = private and drawn and not simulated
    if trained:
        with pytest.raises(DataError, match=r"^no held-out records: the data name no test split"):
            held_out(model, NODE, source)
    else:
        assert len(held_out(model, NODE, source).labels) == 4
    assert len(held_out(model, NODE, source, "train").labels) == (7 if trained else 3)


def test_a_bag_column_is_for_a_model_of_bags() -> None:
    bags = model_of(parse_run({"features.bag": "mean"}))
    node = NODE.model_copy(update={"bag_column": "stay"})
    assert bag_column_of(bags, "", node) == "stay"
    assert bag_column_of(bags, "visit", node) == "visit"
    assert bag_column_of(model_of(), "", node) is None
    with pytest.raises(
        ConfigError, match=r"--bag-column 'visit': model .* was learned from single"
    ):
        bag_column_of(model_of(), "visit", node)
