"""A large site: work that a kill interrupts continues at the last shard, and features in a file
give what memory gives.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.features.on_disk import written
from fedsurrogate.client_app.features.parts import Part
from fedsurrogate.client_app.features.shards import SHARD, ShardWriter
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.fedpft.private_surrogate import Clipped, noisy_sums
from fedsurrogate.client_app.methods.sums import class_moments, released_sums
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import statistics
from tests.examples import class_sums_run

ROOT = Path(__file__).parents[3]
IMAGES = 6 * SHARD
# What a site does for its surrogate, with the arguments: folder of the data, cache, result.
WORK = """
import logging
import sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.fedpft.surrogate import fedpft_surrogate
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run

data, cache, result = sys.argv[1:]
node = parse_node_config({"data": "parquet", "data-dir": data, "cache-dir": cache, "features-in-memory-mib": 1})
run = parse_run({"fedpft.components": 3, "fedpft.covariance": "diag"})
found = load_site(run, node, policy_of(node).cache_mib)
assert found.train.folder, found.train.x.shape
Path(result).write_bytes(fedpft_surrogate(Task(run, node, "a", found)).payload)
"""


def bitmap(seed: int) -> bytes:
    """An image of 6 x 6 pixels: it is decoded faster than a PNG, and all training records need more
    than one MiB.
    """
    grey = np.random.default_rng(seed).integers(0, 256, 36, dtype=np.uint8)
    return b"P5 6 6 255\n" + grey.tobytes()


def begin(folder: Path, cache: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-c",
        WORK,
        str(folder / "data"),
        str(folder / cache),
        str(folder / f"{cache}.surrogate"),
    ]
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )


def shards(cache: Path) -> int:
    notes = list(cache.glob("features/*.partial/shards.jsonl"))
    return len(notes[0].read_text().splitlines()) - 1 if notes else 0


@pytest.mark.slow
def test_a_site_that_was_killed_continues_at_the_last_shard_and_gives_the_same_surrogate(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    table = {"image": [bitmap(i) for i in range(IMAGES)], "label": [i % 3 for i in range(IMAGES)]}
    pq.write_table(pa.table(table), tmp_path / "data" / "x.parquet")
    whole = begin(tmp_path, "whole")
    log = whole.communicate()[1].decode()
    assert whole.returncode == 0, log

    process = begin(tmp_path, "killed")
    while shards(tmp_path / "killed") < 2:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 2 <= (complete := shards(tmp_path / "killed")) < 6
    process = begin(tmp_path, "killed")
    log = process.communicate()[1].decode()
    assert process.returncode == 0, log
    assert f"{complete * SHARD} of {IMAGES} records are done already" in log
    assert (tmp_path / "killed.surrogate").read_bytes() == (
        tmp_path / "whole.surrogate"
    ).read_bytes()
    assert not list((tmp_path / "killed").glob("features/*.partial"))


COUNT, FOLDER = 3 * SHARD - 5, "a.partial"


def shard(number: int, count: int = COUNT) -> range:
    return range(number * SHARD, min((number + 1) * SHARD, count))


def parts(rows: range, broken: int = 0) -> list[Part]:
    """Records with their row as the feature; the first are broken."""
    good = list(rows[broken:])
    bad = [] if not broken else [Part([], None, [(row, "broken") for row in rows[:broken]])]
    values = torch.tensor(good)[:, None].expand(-1, 4).half()
    return [
        *bad,
        Part(good[:100], None, [], values[:100], (1, 4)),
        Part(good[100:], None, [], values[100:], (1, 4)),
    ]


def put(writer: ShardWriter, added: list[Part]) -> None:
    for part in added:
        writer.add(part, None if part.features is None else torch.ones(len(part.rows)).bool())


def missing(folder: Path, count: int = COUNT) -> list[range]:
    return ShardWriter.resumed(folder / FOLDER, count).missing()


def test_shards_that_are_damaged_are_computed_again(tmp_path: Path) -> None:
    writer = ShardWriter.resumed(tmp_path / FOLDER, COUNT)
    for number in (2, 0):
        put(writer, parts(shard(number)))
    assert missing(tmp_path) == [shard(1)]
    notes = (tmp_path / FOLDER / "shards.jsonl").read_text()
    with (tmp_path / FOLDER / "x.npy").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"abcd")
    assert missing(tmp_path) == [shard(1), shard(2)]
    assert missing(tmp_path, 5 * SHARD) == [shard(number, 5 * SHARD) for number in range(5)]
    # The line of the shard that is computed again counts.
    put(ShardWriter.resumed(tmp_path / FOLDER, COUNT), parts(shard(2), broken=1))
    assert missing(tmp_path) == [shard(1)]
    (tmp_path / FOLDER / "shards.jsonl").write_text(notes)
    assert missing(tmp_path) == [shard(1), shard(2)]


def test_a_line_that_was_not_finished_costs_its_shard_only(tmp_path: Path) -> None:
    put(ShardWriter.resumed(tmp_path / FOLDER, COUNT), parts(shard(0)))
    with (tmp_path / FOLDER / "shards.jsonl").open("a") as file:
        file.write('{"begin": 2048, "end": 40')
    writer = ShardWriter.resumed(tmp_path / FOLDER, COUNT)
    assert writer.missing() == [shard(1), shard(2)]
    put(writer, parts(shard(1)))
    assert missing(tmp_path) == [shard(2)]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        # A power failure may leave a file that is empty.
        ("x.npy", None, b""),
        # One bit of its header each: numpy raises TokenError, and reads the numbers in another
        # order of bytes.
        ("x.npy", b"}  ", b"} ("),
        ("x.npy", b"<f2", b">f2"),
        ("shards.jsonl", b'"dimension": 4', b'"dimension": 4000000000000000'),
        ("shards.jsonl", b'"dimension": 4', b'"dimension": Infinity'),
    ],
)
def test_shards_whose_files_are_damaged_begin_again(
    tmp_path: Path, name: str, old: bytes | None, new: bytes
) -> None:
    put(ShardWriter.resumed(tmp_path / FOLDER, COUNT), parts(shard(0)))
    file = tmp_path / FOLDER / name
    content = file.read_bytes()
    file.write_bytes(new if old is None else content.replace(old, new))
    assert file.read_bytes() != content
    writer = ShardWriter.resumed(tmp_path / FOLDER, COUNT)
    assert (writer.done, writer.dimension) == (0, 0)
    put(writer, [part for number in range(3) for part in parts(shard(number))])
    assert writer.missing() == []
    assert torch.from_numpy(np.load(tmp_path / FOLDER / "x.npy"))[:, 3].equal(
        torch.arange(COUNT).half()
    )


def test_invalid_bytes_in_a_line_cost_its_shard_only(tmp_path: Path) -> None:
    put(
        ShardWriter.resumed(tmp_path / FOLDER, COUNT),
        [part for number in range(3) for part in parts(shard(number))],
    )
    notes = tmp_path / FOLDER / "shards.jsonl"
    notes.write_bytes(notes.read_bytes().replace(b'"begin": 2048', b'"begin": \xb2048'))
    assert missing(tmp_path) == [shard(1)]


def test_a_full_disk_costs_no_complete_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ShardWriter.resumed(tmp_path / FOLDER, COUNT), parts(shard(0)))
    notes = tmp_path / FOLDER / "shards.jsonl"
    with notes.open("a") as file:
        file.write('{"begin": 2048, "end": 40')
    opened = Path.open

    def full(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        if mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *more, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        missing(tmp_path)
    monkeypatch.undo()
    assert missing(tmp_path) == [shard(1), shard(2)]


def test_shards_are_complete_in_any_order_and_mixed(tmp_path: Path) -> None:
    writer = ShardWriter.resumed(tmp_path / FOLDER, COUNT)
    one, other = parts(shard(1), broken=3), parts(shard(2))
    put(writer, [Part([], None, [(row, "broken") for row in shard(0)]), one[0], other[0], one[1]])
    assert (writer.done, writer.missing()) == (SHARD, [shard(1), shard(2)])
    put(writer, [other[1], one[2]])
    assert (writer.done, writer.missing()) == (COUNT, [])
    expected = [row >= SHARD + 3 for row in range(COUNT)]
    assert writer.ok().tolist() == expected
    x = torch.from_numpy(np.load(tmp_path / FOLDER / "x.npy"))
    assert torch.equal(x[:, 3], torch.where(torch.tensor(expected), torch.arange(COUNT), 0).half())


def test_complete_shards_of_an_earlier_version_are_used_if_they_are_shards_now(
    tmp_path: Path,
) -> None:
    put(
        ShardWriter.resumed(tmp_path / FOLDER, COUNT),
        [part for number in range(3) for part in parts(shard(number))],
    )
    notes = tmp_path / FOLDER / "shards.jsonl"
    head, *lines = notes.read_text().splitlines()
    # It wrote no first rows, as each shard began where the one before ended.
    before = [
        json.dumps({key: json.loads(line)[key] for key in ("end", "sha256")}) for line in lines
    ]
    notes.write_text("\n".join([head, *before]) + "\n")
    assert missing(tmp_path) == []
    notes.write_text("\n".join([head, before[0], before[2]]) + "\n")
    assert missing(tmp_path) == [shard(1), shard(2)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Features with three classes, of more than one MiB in single precision, some of them too large
    for a power of 2.
    """
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(3, (14000,), generator=rng)
    x = torch.randn(14000, 40, generator=rng) + y[:, None]
    (tmp_path / "data").mkdir()
    save_file({"x": x, "y": y}, tmp_path / "data" / "a.safetensors")
    return tmp_path


def tasks(folder: Path, run: Run) -> tuple[Task, Task]:
    """The same site with its features in memory, and in a file."""
    found = []
    for mib in (256, 1):
        settings = {
            "data": "safetensors",
            "data-dir": str(folder / "data"),
            "cache-dir": str(folder / "cache"),
        }
        node = parse_node_config({**settings, "features-in-memory-mib": mib})
        found.append(Task(run, node, "a", load_site(run, node, policy_of(node).cache_mib)))
    assert [task.found.train.folder is None for task in found] == [True, False]
    return found[0], found[1]


def test_features_in_a_file_are_those_in_memory(data: Path) -> None:
    memory, file = tasks(data, parse_run({"classes": "0,2"}))
    for ours, theirs in (
        (file.found.train, memory.found.train),
        (file.found.test, memory.found.test),
    ):
        assert torch.equal(ours.features, theirs.features)
        assert torch.equal(ours.labels, theirs.labels)
    for ours, theirs in zip(
        file.training_data(("2", "0")), memory.training_data(("2", "0")), strict=True
    ):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(file.training_data(("2",)), memory.training_data(("2",)), strict=True):
        assert torch.equal(ours, theirs)
    assert not list((data / "cache").iterdir())


def test_statistics_of_features_in_a_file_are_those_in_memory_bit_for_bit(data: Path) -> None:
    memory, file = tasks(data, class_sums_run())
    assert released_sums(file).payload == released_sums(memory).payload
    memory, file = tasks(
        data, parse_run({"secure-sum": True, "classes": "0,1,2", "fedpft.covariance": "gram"})
    )
    for ours, theirs in zip(
        class_moments(file)[0].values(), class_moments(memory)[0].values(), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["diag", "full", "spherical"])
def test_private_sums_of_features_in_a_file_are_those_in_memory_bit_for_bit(
    data: Path, family: str
) -> None:
    found = []
    for task in tasks(data, parse_run({})):
        train = task.found.train
        clipped = Clipped.of(
            train.features, train.labels, None, 0.0, lambda rows: rows - 0.1, train.folder
        )
        found.append(statistics(clipped.features, clipped.labels, clipped.weights, 3, family))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.value, theirs.value)


def resident(folder: Path) -> int:
    """Bytes in memory of the files in a folder that are mapped and have no name."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("family", ["spherical", "diag", "lowrank"])
def test_noisy_sums_leave_no_mapped_features_in_memory(family: str, tmp_path: Path) -> None:
    rows, dimension = 20_000, 128
    features = written(iter([torch.randn(rows, dimension)]), dimension, tmp_path)
    labels = torch.randint(3, (rows,))
    run = parse_run(
        {"epsilon": 1.0, "delta": 1e-5, "classes": "a,b,c", "fedpft.covariance": family}
    )
    claim = run.mechanism_for("record", "")
    assert claim is not None
    data = Clipped.of(features, labels, norm=1.0, folder=tmp_path)
    noisy_sums(data, 3, family, claim)
    assert resident(tmp_path) < 0.1 * data.features.nbytes
