"""The store of a site's models without any run: its index on the disk, which model is in use and which
was before, and what each refusal says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsurrogate.client_app.model_use.store import (
    go_back,
    keep_model,
    keep_received,
    open_model,
    read_index,
    trusted_keys,
    use_model,
)
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, SealError, StateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    SignedModel,
    make_signed_model,
    save_signed_model,
)
from tests.client_app.model_use.test_decisions import KEY, head, renamed

NAMES = tuple(f"2026010{at}-fedpft-{letter}" for at, letter in enumerate("abc"))


@pytest.fixture(scope="module")
def models() -> tuple[SignedModel, ...]:
    made = make_signed_model(head(1), parse_run({}), None, "17", 2, KEY)
    return tuple(renamed(made, name) for name in NAMES)


@pytest.fixture
def node(tmp_path: Path) -> NodeConfig:
    return NodeConfig(state_dir=str(tmp_path / "state"))


def index_file(node: NodeConfig) -> Path:
    return node.state / "models" / "index.json"


def test_another_model_of_a_kept_name_is_refused(
    node: NodeConfig, models: tuple[SignedModel, ...]
) -> None:
    keep_model(node, models[0], "run")
    other = renamed(make_signed_model(head(2), parse_run({}), None, "18", 2, KEY), NAMES[0])
    file = node.state / "models" / f"{NAMES[0]}{SUFFIX}"
    before = file.read_bytes()
    with pytest.raises(StateError, match=f"has another model called '{NAMES[0]}'; remove it"):
        keep_model(node, other, "run")
    # Nor is one kept whose file cannot be read as it was.
    for damaged in (b"", save_signed_model(other)):
        file.write_bytes(damaged)
        with pytest.raises(StateError, match="has another model"):
            keep_model(node, models[0], "run")
    file.write_bytes(before)
    keep_model(node, models[0], "run")


def test_only_a_model_of_the_coordinators_key_is_kept(
    node: NodeConfig, models: tuple[SignedModel, ...]
) -> None:
    own = node.model_copy(update={"coordinator_key": public_key(KEY).hex()})
    stranger = node.model_copy(update={"coordinator_key": public_key(new_key()).hex()})
    with pytest.raises(SealError, match=f"signed by key {models[0].signer}..., not by"):
        keep_model(stranger, models[0], "run")
    assert not index_file(node).exists()
    assert trusted_keys(node) == frozenset()
    keep_model(own, models[0], "run")
    assert trusted_keys(own) == trusted_keys(node) == {public_key(KEY)}
    assert trusted_keys(stranger) == {bytes.fromhex(stranger.coordinator_key)}


def test_going_back_to_a_model_that_is_gone_changes_nothing(
    node: NodeConfig, models: tuple[SignedModel, ...]
) -> None:
    for model in models[:2]:
        keep_model(node, model, "run")
        use_model(node, model.manifest.name)
    file = node.state / "models" / f"{NAMES[0]}{SUFFIX}"
    file.unlink()
    with pytest.raises(StateError, match=r"cannot be read \(No such file.*; add it again"):
        go_back(node)
    with pytest.raises(StateError, match=r"cannot be read \(No such file"):
        use_model(node, NAMES[0])
    file.write_bytes(b"other")
    with pytest.raises(SealError, match="was changed after it was kept; get it again"):
        go_back(node)
    assert read_index(node).in_use == NAMES[1]


def test_a_model_is_opened_by_its_file_its_name_or_its_use(
    node: NodeConfig, models: tuple[SignedModel, ...], tmp_path: Path
) -> None:
    loose, named = tmp_path / "loose", tmp_path / f"x{SUFFIX}"
    loose.write_bytes(save_signed_model(models[2]))
    named.write_bytes(save_signed_model(models[2]))
    for file in (loose, named):
        for where in (None, node):
            assert open_model(str(file), where).manifest.name == NAMES[2]
    stranger = node.model_copy(update={"coordinator_key": public_key(new_key()).hex()})
    with pytest.raises(SealError):
        open_model(str(loose), stranger)
    with pytest.raises(ConfigError, match="'in-use' is no file; to name a model"):
        open_model("in-use", None)
    for model in models[:2]:
        keep_model(node, model, "run")
    use_model(node, NAMES[1])
    assert open_model("in-use", node).manifest.name == NAMES[1]
    assert open_model(NAMES[0], node).manifest.name == NAMES[0]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "5",
        "[]",
        "[" * 100_000,
        '{"in_use": 5}',
        '{"models": {"../x": {"sha256": "", "key": "", "arrived": "", "source": ""}}}',
        '{"models": {"NAME": {"sha256": "", "key": "xy", "arrived": "", "source": ""}}}',
        '{"models": {}}',
    ],
)
def test_a_damaged_index_is_named(node: NodeConfig, content: str) -> None:
    file = index_file(node)
    file.parent.mkdir(parents=True)
    file.write_text(content.replace("NAME", NAMES[0]))
    with pytest.raises(StateError, match=r"index\.json cannot be read \(\w+\); remove it, and add"):
        read_index(node)
    file.unlink()
    file.mkdir()
    with pytest.raises(StateError, match=r"cannot be read \(IsADirectoryError\)"):
        read_index(node)


def test_the_model_of_a_run_is_kept_where_the_site_took_part_and_has_room(
    node: NodeConfig, models: tuple[SignedModel, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for took_part, room in ((False, 1e3), (True, 1e-3)):
        keep_received(node, models[0], took_part, room)
        assert not read_index(node).models
    assert "in which this site has taken no part, is not kept" in caplog.text
    keep_received(node, models[0], True, 1e3)
    assert read_index(node).models[NAMES[0]].source == "run"
    index_file(node).write_text("{")
    keep_received(node, models[0], True, 1e3)
    assert caplog.messages[-1].startswith("the model of run 17 is not kept: ")
