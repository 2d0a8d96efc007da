"""A labelled folder is judged as a whole: no copy and no class of it is passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from sklearn.metrics import accuracy_score

from fedsurrogate.client_app.datasets.dataset import DataSource, load_all
from fedsurrogate.client_app.model_use.calibration import Wish
from fedsurrogate.client_app.model_use.evaluation import evaluate
from fedsurrogate.client_app.model_use.held_out import Source, held_out
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import make_signed_model
from tests.client_app.model_use.test_decisions import KEY, head

CLASSES = ("a", "b", "c")


def write(folder: Path, name: str, labels: list[int], classes: str, kinds: int) -> np.ndarray:
    """Features of a few kinds, so that many records are copies of others."""
    x = torch.randn(kinds, 6, generator=torch.Generator().manual_seed(0))
    x = x[torch.arange(len(labels)) % kinds].contiguous()
    metadata = {"classes": classes, "fingerprint": "f" * 64}
    save_file({"x": x, "y": torch.tensor(labels)}, folder / f"{name}.safetensors", metadata)
    return head(1).scores(x).argmax(1).numpy()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=4, max_size=40),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["", "a,b,c", "c,a,b"]),
    st.integers(0, 3),
)
def test_all_records_are_judged_whatever_the_split_and_the_copies(
    labels: list[int], kinds: int, in_parts: bool, named: str, seed: int
) -> None:
    run = parse_run({"seed": seed} | ({"classes": named} if named else {}))
    model = make_signed_model(head(1), run, None, "1", 2, KEY)
    with TemporaryDirectory() as folder:
        # As a run has them: one file, or one to train and one to test.
        parts = {"train": labels[::2], "test": labels[1::2]} if in_parts else {"all": labels}
        decided = [write(Path(folder), name, own, "a,b,c", kinds) for name, own in parts.items()]
        held = held_out(model, NodeConfig(), Source(folder, "safetensors", simulated=run))
    found = evaluate(model, held, wish=Wish(draws=10)).report
    assert found is not None
    truth = np.concatenate([*map(np.array, parts.values())])
    assert found.records == len(labels)
    value = found.averages["accuracy"].value
    assert value == pytest.approx(accuracy_score(truth, np.concatenate(decided)))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=60).filter(lambda y: min(y) < 3))
def test_numbers_without_records_of_other_classes_say_so_and_how_many(labels: list[int]) -> None:
    model = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)
    truth = np.array(labels)
    with TemporaryDirectory() as folder:
        decided = write(Path(folder), "all", labels, "a,b,c,d,e", 20)
        source = Source(folder, "safetensors", known_only=True)
        held = held_out(model, NodeConfig(), source)
    found = evaluate(model, held, wish=Wish(draws=5))
    known = truth < 3
    assert found.report is not None
    assert (found.report.records, held.left_out) == (known.sum(), 0)
    value = found.report.averages["accuracy"].value
    assert value == pytest.approx(accuracy_score(truth[known], decided[known]))
    others = f"of the model's classes only (it is wrong for all others: {(~known).sum()} of classes"
    assert (others in found.content["records"]) == (not known.all())
    assert (others in found.page.replace("&#39;", "'")) == (not known.all())


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("named", ["", "a,b,c"])
@pytest.mark.parametrize("other", ["A", "other", "0"])
def test_a_class_that_the_model_does_not_know_is_named(
    named: str, other: str, simulated: bool, tmp_path: Path
) -> None:
    run = parse_run({"classes": named} if named else {})
    model = make_signed_model(head(1), run, None, "1", 2, KEY)
    source = Source(str(tmp_path), "safetensors", simulated=run if simulated else None)
    write(tmp_path, "all", [0, 1, 2] * 5, f"{other},b,c", 15)
    with pytest.raises(DataError, match=f"5 records of classes .* not know: {other}; it knows a,"):
        held_out(model, NodeConfig(), source)
    held = held_out(model, NodeConfig(), replace(source, known_only=True))
    assert (len(held.labels), held.left_out) == (10, 0)
    assert "of the model's classes only (it is wrong for all others: 5 of classes" in held.where


def test_records_of_other_classes_in_a_simulation_are_named_as_well(tmp_path: Path) -> None:
    """Its data are read with the classes of the run, so these records never come so far."""
    data = {"data": "safetensors", "data-dir": str(tmp_path)}
    run = parse_run(data | {"classes": "a,b,c"})
    model = make_signed_model(head(1), run, None, "1", 2, KEY)
    write(tmp_path, "all", [0, 1, 2, 3] * 5, "a,b,c,d", 20)
    held = held_out(model, NodeConfig(), Source(simulated=run))
    others = "5 records are of no class of the run: 'd' (5)"
    assert f"of the model's classes only (it is wrong for all others: {others})" in held.where
    assert held.left_out == 0


def test_a_column_that_is_not_there_is_named_by_its_option(tmp_path: Path) -> None:
    model = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)
    write(tmp_path, "all", [0, 1, 2] * 5, "a,b,c", 15)
    source = Source(str(tmp_path), "safetensors", columns=("ward",))
    with pytest.raises(DataError, match=r"^--by = 'ward': safetensors files .*; leave it out"):
        held_out(model, NodeConfig(), source)
    (tmp_path / "all.safetensors").unlink()
    Image.new("RGB", (2, 2)).save(tmp_path / "1.png")
    (tmp_path / "labels.csv").write_text("path,label\n1.png,a\n")
    by = DataSource("imagefolder", str(tmp_path), site_column="ward", whole=True)
    with pytest.raises(DataError, match=r"'ward'.*correct --by"):
        load_all(by, 0)
    (tmp_path / "labels.csv").write_text("path,label,ward\n1.png,a,\n")
    with pytest.raises(DataError, match=r"1 of 1 records have no value for --by \('ward'"):
        load_all(by, 0)
