"""A coordinator that begins run after run, so that a site keeps files without end: those between
rounds, received models, and generators.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.work_limits import has_room, remove_oldest
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import INFO, to_record
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import with_memory
from tests.attacks.privacy.neighbours import DIMENSION, FINGERPRINT, Record
from tests.attacks.privacy.visits import Hospital

SCAFFOLD: dict[str, Any] = {"method": "scaffold", "classes": "a,b", "fedavg.rounds": 1}


def size_of(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.rglob("*") if file.is_file()]


@pytest.mark.parametrize("one_lineage", [False, True])
def test_files_between_rounds_take_no_more_than_the_policy_says(
    tmp_path: Path, one_lineage: bool
) -> None:
    records = tuple(Record(each, grey=level) for level in range(3) for each in "ab")
    site = Hospital(tmp_path / "h", "features", records)
    policy = "without-dp = true\nsmallest-class = 1\n"
    policy += "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
    (tmp_path / "h" / "policy.toml").write_text(policy)
    (tmp_path / "h" / "limits.toml").write_text("kept-mib = 0.001\n")
    config = parse_run(SCAFFOLD)
    training = with_memory(Training.begin(config, ("a", "b"), FINGERPRINT, DIMENSION))
    statuses = []
    for number in range(12):
        site.run_id += 1
        training.round = number if one_lineage else 0
        payload = training.payload()
        asked = {"run": config.digest, "round": training.round + 1, "bytes": len(payload)}
        lineage = "one" if one_lineage else f"run{number}"
        content = to_record(
            payload, asked | {"lineage": lineage, "confirmed": number * one_lineage}
        )
        statuses.append(site.ask("train", SCAFFOLD, content).config_records[INFO]["status"])
    sizes = size_of(tmp_path / "h" / "state" / "runs")
    assert statuses == ["ok"] * 12, "the newest file, which the next round needs, is there"
    assert sizes
    assert sum(sizes) <= 0.001 * 2**20 + max(sizes)


@settings(max_examples=30, deadline=None)
@given(
    files=st.lists(
        st.tuples(st.sampled_from(["runs/a", "runs/b", "models", "generators"]), st.integers(0, 9)),
        max_size=9,
    ),
    most=st.integers(1, 20),
    more=st.integers(0, 9),
)
def test_only_old_files_between_rounds_go_and_only_what_fits_is_kept(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, int]], most: int, more: int
) -> None:
    state = tmp_path_factory.mktemp("state")
    node: NodeConfig = parse_node_config({"site": "s", "state-dir": str(state)})
    written = []
    for number, (folder, size) in enumerate(files):
        file = state / folder / f"{number}.x"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
        os.utime(file, ns=(10**18 + number, 10**18 + number))
        written.append(file)
    received = sum(size for folder, size in files if not folder.startswith("runs"))
    assert has_room(node, most / 2**20, more) == (received + more <= most)
    remove_oldest(node, most / 2**20)
    between = [file for file in written if "runs" in file.parts]
    assert all(file.exists() for file in written if file not in between)
    left = [file for file in between if file.exists()]
    assert left == between[len(between) - len(left) :], "the oldest go first"
    assert left or not between
    sizes = [file.stat().st_size for file in left]
    assert sum(sizes) <= most or len(left) == 1
