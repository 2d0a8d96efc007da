"""Models at a site after a run: kept, in use, and back to the one before; changed and foreign files
are refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedsurrogate.client_app.model_use.store import (
    go_back,
    keep_model,
    keep_received,
    open_model,
    read_index,
    read_kept,
    use_model,
)
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import StateError
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    make_signed_model,
    read_signed_model,
)
from tests.client_app.model_use.hospitals import CLASSES, federation
from tests.common.signed_models.test_signed_model import PRIVATE, head


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[NodeConfig, Path]:
    nodes, folder = federation(tmp_path_factory.mktemp("ran"), decided=False)
    return parse_node_config(nodes[0]), folder


@pytest.fixture
def node(ran: tuple[NodeConfig, Path], tmp_path: Path) -> NodeConfig:
    """A hospital after a run, with a copy of its state."""
    shutil.copytree(ran[0].state / "models", tmp_path / "models")
    return ran[0].model_copy(update={"state_dir": str(tmp_path)})


def other(seed: int, key: bytes | None = None) -> SignedModel:
    return make_signed_model(head(6 + seed), PRIVATE, None, str(seed), 3, key or bytes(32))


def test_every_used_site_keeps_the_model_of_its_run(ran: tuple[NodeConfig, Path]) -> None:
    node, folder = ran
    (name,) = read_index(node).models
    kept, at_coordinator = read_kept(node, name), read_signed_model(folder / "model.fedsurrogate")
    assert kept.manifest == at_coordinator.manifest
    assert tuple(kept.manifest.classes) == CLASSES
    assert kept.manifest.privacy is not None
    assert kept.manifest.privacy.epsilon == 8.0
    settings = {
        "backbone": "pixels",
        "image-size": 8,
        "features.power-transform": 1.0,
        "seed": 0,
        "test-fraction": 0.2,
    }
    assert kept.manifest.settings == settings
    assert kept.gaussians is not None
    key = (folder.parent / "signing" / "coordinator.pub").read_text().strip()
    assert kept.key.hex() == key


class ModelsOfASite(RuleBasedStateMachine):
    """Models arrive from runs and from people in any order; a person uses one, or goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.node = NodeConfig(state_dir=self.folder.name)
        self.kept, self.decided = list[str](), list[str]()

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(seed=st.integers(0, 3), source=st.sampled_from(["run", "file"]), took_part=st.booleans())
    def arrives(self, seed: int, source: str, took_part: bool) -> None:
        if source == "run":
            keep_received(self.node, MODELS[seed], took_part, 1e3)
        else:
            keep_model(self.node, MODELS[seed], source)
        if source == "file" or took_part:
            self.kept.append(MODELS[seed].manifest.name)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def a_person_uses_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.kept))))
        use_model(self.node, name)
        if self.decided[-1:] != [name]:
            self.decided.append(name)

    @rule()
    def a_person_goes_back(self) -> None:
        if len(self.decided) > 1:
            self.decided.pop()
            assert go_back(self.node) == self.decided[-1]
        else:
            with pytest.raises(StateError, match="no model was in use before"):
                go_back(self.node)

    @invariant()
    def what_is_in_use_is_what_a_person_decided_last(self) -> None:
        index = read_index(self.node)
        assert set(index.models) == set(self.kept)
        assert index.in_use == (self.decided[-1] if self.decided else "")
        if not self.decided:
            with pytest.raises(StateError, match="no model is in use"):
                open_model("in-use", self.node)
        else:
            assert open_model("in-use", self.node).manifest.name == self.decided[-1]


MODELS = [other(seed) for seed in range(4)]
TestModelsOfASite = ModelsOfASite.TestCase
TestModelsOfASite.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def test_nothing_of_the_sites_is_in_the_file(ran: tuple[NodeConfig, Path]) -> None:
    node, folder = ran
    text = (folder / "model.fedsurrogate").read_bytes()
    for word in (node.data_dir, node.state_dir, "clinic"):
        assert word.encode() not in text
    facts = json.loads(read_signed_model(folder / "model.fedsurrogate").manifest.signed_bytes())
    assert facts["sites"] == 2
