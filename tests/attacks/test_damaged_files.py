"""A file that this machine wrote for itself and that was damaged: it is refused by name, with one
kind of error, or it is read as something that can be used. Nothing else happens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from fedsurrogate.client_app.governance.policy import load_policy
from fedsurrogate.client_app.model_use.adaptation import (
    Adapted,
    adapted_classifier,
    store_adapted,
)
from fedsurrogate.client_app.model_use.calibration import (
    Calibration,
    calibration_file,
    own_gaussians,
    read_calibration,
    store_calibration,
)
from fedsurrogate.client_app.model_use.store import (
    keep_model,
    models_folder,
    read_index,
    read_kept,
    use_model,
)
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import (
    ConfigError,
    FedSurrogateError,
    LedgerError,
    PolicyError,
    RunError,
    SealError,
    StateError,
)
from fedsurrogate.common.security.registrations import (
    Receipt,
    Registration,
    read_table,
    write_table,
)
from fedsurrogate.common.security.sealing import new_key, public_key, read_keys
from fedsurrogate.strategies.base.outcome import FOLDER, stored_receipts
from tests.common.signed_models.test_signed_model import model

DEEP = "deep"
# One value of each kind, and some that are of the right kind and wrong all the same.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2.5, float("nan"), float("inf"), 10**400, "", "x", "\x00", [], [[]], [None], {}, {"": None}, DEEP,
)  # fmt: skip
# Safetensors with a shape that torch cannot hold.
IMPOSSIBLE = json.dumps(
    {"x": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}
).encode()
RAW = (
    len(IMPOSSIBLE).to_bytes(8, "little") + IMPOSSIBLE,
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"a"',
    b"\xff\xfe",
    b"\x00" * 9,
    b"[" * 10**5,
    b"{}\n{}",
)


def damaged(content: bytes) -> Iterator[bytes]:
    """Content without a part, with another value in place of each part, and other bytes."""
    yield from RAW
    yield from (content[:at] for at in range(0, len(content), max(1, len(content) // 9)))
    try:
        tree = json.loads(content)
    except ValueError:
        return
    for *above, last in places(tree):
        for value in VALUES:
            changed = copy.deepcopy({"": tree})
            _inside(changed, above)[last] = value
            text = json.dumps(changed[""])
            yield text.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode()
        if above:
            changed = copy.deepcopy({"": tree})
            del _inside(changed, above)[last]
            yield json.dumps(changed[""]).encode()


def _inside(tree: Any, keys: list[Any]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def places(tree: Any, before: tuple[Any, ...] = ("",)) -> Iterator[tuple[Any, ...]]:
    yield before
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))
        else:
            yield (*before, key)


@dataclass(frozen=True)
class Kept:
    """A file, what reads it and uses what was read, and the errors that may come of it."""

    file: Path
    read: Callable[[], object]
    refuses: tuple[type[FedSurrogateError], ...]


def node_of(folder: Path) -> NodeConfig:
    return NodeConfig(site="north", state_dir=str(folder))


def index(folder: Path) -> Kept:
    node = node_of(folder)
    name = keep_model(node, model(), "run")
    use_model(node, name)

    def read() -> None:
        found = read_index(node)
        for each in found.models:
            read_kept(node, each)

    return Kept(models_folder(node) / "index.json", read, (StateError, SealError))


def calibration(folder: Path) -> Kept:
    node, shared = node_of(folder), model()
    whole = Calibration(2.0, "b", 0.3, "mahalanobis", 4.0, "chosen by a person")
    store_calibration(node, shared, whole)
    classes = tuple(shared.manifest.classes)

    def read() -> None:
        found = read_calibration(node, shared).checked(classes)
        found.decisions(found.probabilities(torch.randn(2, 3)), classes)
        assert isinstance(found.abstain_above, float | None)

    assert read_calibration(node, shared) == whole
    return Kept(calibration_file(node, shared.manifest.name), read, (StateError, ConfigError))


def fitted(folder: Path) -> Kept:
    """The Gaussians of a site's own records, for a model that has none."""
    node, whole = node_of(folder), model()
    bare = replace(whole, gaussians=None)
    store_calibration(node, bare, Calibration(), whole.gaussians)
    (file,) = models_folder(node).glob("*.gaussians.safetensors")

    def read() -> None:
        found = own_gaussians(node, bare)
        assert found is not None
        found.scores(torch.randn(2, 6))

    return Kept(file, read, (SealError,))


def named(folder: Path) -> Kept:
    """What names them: without it they are not used."""
    node, whole = node_of(folder), model()
    bare = replace(whole, gaussians=None)
    store_calibration(node, bare, Calibration(), whole.gaussians)

    def read() -> None:
        if own_gaussians(node, bare) is None:
            raise StateError("not used")

    return Kept(calibration_file(node, whole.manifest.name), read, (SealError, StateError))


def adapted(folder: Path) -> Kept:
    node, shared = node_of(folder), model()
    outputs = len(shared.classifier.header.classes)
    own = Adapted(shared.classifier, torch.ones(1), torch.ones(outputs, 6), torch.zeros(outputs))
    store_adapted(node, shared, own, "on own records")

    def read() -> None:
        found = adapted_classifier(node, shared)
        assert found is not None
        assert found.scores(torch.randn(2, 6)).isfinite().all()

    (file,) = models_folder(node).glob("*.adapted.safetensors")
    return Kept(file, read, (SealError,))


def sums(folder: Path) -> Kept:
    node, keys = node_of(folder), [public_key(new_key()) for _ in range(3)]
    with secure_aggregation.fixing(node, "sum", keys, {"training": "a"}, {"training": "b"}):
        pass

    def read() -> None:
        secure_aggregation.why_changed(node, {"training": "a"}, {"training": "b"})
        secure_aggregation.check_summed(node, "sum", keys)

    (file,) = (folder / "sums").glob("*.json")
    return Kept(file, read, (StateError, PolicyError))


def ledger(folder: Path) -> Kept:
    found = Ledger(
        folder / "state", "a" * 16, CheckLog(folder / "seen", "a" * 16, folder / "state")
    )
    found.open()
    return Kept(found.path, found.check, (LedgerError,))


def head(folder: Path) -> Kept:
    kept = ledger(folder)
    return Kept(kept.file.with_suffix(".head"), kept.read, (LedgerError,))


def check_log(folder: Path) -> Kept:
    kept = ledger(folder)
    return Kept(folder / "seen" / f"{'a' * 16}.witness", kept.read, (LedgerError,))


def answered(folder: Path) -> Kept:
    found = CheckLog(folder / "seen", "a" * 16, folder / "state")
    found.begin(1, "b" * 64)
    found.record_answer("c" * 16)
    return Kept(folder / "seen" / f"{'a' * 16}.answered", found.answered, (LedgerError,))


def receipts(folder: Path) -> Kept:
    """Every file that cannot be read is left out; another one is read all the same."""
    (folder / FOLDER).mkdir()
    text = str(Receipt("a" * 32, 5, 3, "b" * 64))
    for name in ("north", "south"):
        content = json.dumps({"node": 7, "receipts": [text, text]})
        (folder / FOLDER / f"{name}.json").write_text(content)

    def read() -> None:
        found = stored_receipts(str(folder))
        assert found["south"] == f"{text},{text}"
        if found.get("north") not in (f"{text},{text}", text, ""):
            raise RunError("not read")

    return Kept(folder / FOLDER / "north.json", read, (RunError,))


def registered(folder: Path) -> Kept:
    write_table(folder / "sites.json", {"north": Registration("ssh-ed25519 AAAA", 7)})

    def read() -> None:
        for name, each in read_table(folder / "sites.json").items():
            assert (type(name), type(each.key), type(each.node)) == (str, str, int)

    return Kept(folder / "sites.json", read, (RunError,))


def peers(folder: Path) -> Kept:
    file = folder / "peers.toml"
    file.write_text(f'north = "{public_key(new_key()).hex()}"\n')
    return Kept(file, lambda: read_keys(file), (ConfigError,))


def policy(folder: Path) -> Kept:
    file = folder / "policy.toml"
    file.write_text('epsilon-total = 2\nmethods = ["fedpft"]\n')
    return Kept(file, lambda: load_policy(str(file)), (ConfigError, PolicyError))


KEPT: dict[str, Callable[[Path], Kept]] = {
    "adapted model": adapted,
    "answered requests": answered,
    "calibration": calibration,
    "end of the ledger": head,
    "index of models": index,
    "name of Gaussians": named,
    "own Gaussians": fitted,
    "keys of other sites": peers,
    "ledger": ledger,
    "policy": policy,
    "receipts of sites": receipts,
    "registered sites": registered,
    "sites of earlier sums": sums,
    "check-log": check_log,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_damaged_file_is_refused_with_its_name_or_can_be_used(tmp_path: Path, name: str) -> None:
    kept = KEPT[name](tmp_path)
    content = kept.file.read_bytes()
    kept.read()
    refused = 0
    for each in damaged(content):
        kept.file.write_bytes(each)
        try:
            kept.read()
        except kept.refuses:
            refused += 1
    assert refused
    kept.file.write_bytes(content)
    kept.read()
