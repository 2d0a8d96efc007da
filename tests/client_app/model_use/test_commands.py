"""The `site models list` commands as a hospital types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.signed_models.signed_model import (
    SignedModel,
    make_signed_model,
    save_signed_model,
)
from tests.client_app.model_use.hospitals import site
from tests.common.signed_models.test_signed_model import KEY, PRIVATE, head

PUBLIC = public_key(KEY).hex()


def write(folder: Path, dimension: int = 6, key: bytes = KEY) -> tuple[Path, SignedModel]:
    model = make_signed_model(head(dimension), PRIVATE, None, "1", 2, key)
    file = folder / f"{dimension}.fedsurrogate"
    file.write_bytes(save_signed_model(model))
    return file, model


@pytest.fixture
def node(tmp_path: Path) -> tuple[str, str]:
    return "--node-config", f'site="north" state-dir="{tmp_path}/state" coordinator-key="{PUBLIC}"'


def test_models_are_added_listed_used_and_left_again(tmp_path: Path, node: tuple[str, str]) -> None:
    first, second = write(tmp_path), write(tmp_path, 7)
    for file, model in (first, second):
        done = site("models", "add", file, *node)
        assert (done.code, done.stdout.strip()) == (0, f"kept as {model.manifest.name}")
    assert site("models", "add", first[0], *node).code == 0, "the same file twice is no error"
    listed = json.loads(site("models", "list", *node, "--json").stdout)["models"]
    assert not any(each["in_use"] for each in listed), "no person has decided yet"
    assert f"`site models use {second[1].manifest.name}`" in site("models", "list", *node).stdout
    several = site("models", "use", *node)
    assert (several.code, "name one of them" in several.stderr) == (1, True)
    done = site("models", "add", first[0], "--use", *node)
    assert done.stdout.splitlines()[1] == f"in use: {first[1].manifest.name}"
    listed = json.loads(site("models", "list", *node, "--json").stdout)["models"]
    assert [(each["name"], each["in_use"], each["state"]) for each in listed] == [
        (first[1].manifest.name, True, "intact"),
        (second[1].manifest.name, False, "intact"),
    ]
    assert site("models", "use", second[1].manifest.name, *node).code == 0
    shown = site("models", "list", *node)
    assert shown.code == 0
    assert "a, b, c" in shown.stdout
    assert "epsilon 2" in " ".join(shown.stdout.split())
    back = site("models", "back", *node)
    assert back.stdout.strip() == f"in use: {first[1].manifest.name}"
    assert "no model was in use before" in site("models", "back", *node).stderr


def test_a_file_of_another_coordinator_is_not_added(tmp_path: Path, node: tuple[str, str]) -> None:
    file, _ = write(tmp_path, key=new_key())
    done = site("models", "add", file, *node)
    assert done.code == 1
    assert "not a coordinator's key that this site knows" in done.stderr
    unpinned = ("--node-config", f'site="north" state-dir="{tmp_path}/state"')
    assert "could come from anyone" in site("models", "add", file, *unpinned).stderr
    assert "must be the digits" in site("models", "add", file, "--signer", "xyz", *unpinned).stderr
    own, _ = write(tmp_path)
    assert site("models", "add", own, "--signer", PUBLIC, *unpinned).code == 0


def test_a_changed_model_is_shown_as_changed(tmp_path: Path, node: tuple[str, str]) -> None:
    site("models", "add", write(tmp_path)[0], *node)
    (kept,) = (tmp_path / "state" / "models").glob("*.fedsurrogate")
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x00\x01")
    (row,) = json.loads(site("models", "list", *node, "--json").stdout)["models"]
    assert "was changed after it was kept" in row["state"]
    assert site("models", "list", *node).code == 0
