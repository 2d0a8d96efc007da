"""A large site: work that a kill interrupts continues at the last shard, and features in a file
give what memory gives.
"""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.harness.site_data import clipped
from fedsurrogate.client_app.features.device_processes import Part
from fedsurrogate.client_app.features.extraction import SHARD, ShardWriter, written
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.fedpft.surrogate import noisy_sums
from fedsurrogate.client_app.methods.job import Clipped, Job
from fedsurrogate.client_app.methods.sums import class_moments, message
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
from dataclasses import replace
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.fedpft.surrogate import fedpft_surrogate
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run

data, cache, result = sys.argv[1:]
node = parse_node_config({"data": "parquet", "data-dir": data, "cache-dir": cache, "features-in-memory-mib": 1})
run = parse_run({"fedpft.components": 2, "fedpft.covariance": "spherical"})
found = load_site(run, node, policy_of(node).cache_mib)
assert found.train.folder, found.train.x.shape
Path(result).write_bytes(fedpft_surrogate(Job(run, node, "a", found)).payload)
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
    return len(list(cache.glob("features/*.partial/*.npz")))


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


def shard(number: int) -> range:
    return range(number * SHARD, min((number + 1) * SHARD, COUNT))


def put(folder: Path, *numbers: int) -> ShardWriter:
    """Records with their row as the feature."""
    writer = ShardWriter.resumed(folder / FOLDER, COUNT)
    for number in numbers:
        rows = list(shard(number))
        for own in (rows[:100], rows[100:]):
            values = torch.tensor(own)[:, None].expand(-1, 4).half()
            writer.add(Part(own, None, [], values, (1, 4)), torch.ones(len(own)).bool())
    return writer


@pytest.mark.parametrize(
    "damage",
    [
        # A power failure may leave a file that is empty.
        lambda _: b"",
        lambda content: content[: len(content) // 2],
        # One bit of a feature, and of the header of an array.
        lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
        lambda content: content.replace(b"}  ", b"} ("),
        lambda content: content.replace(b"<f2", b">f2"),
        lambda content: content.replace(b"(2048, 4)", b"(2048, 4000000000000000)"),
        # A whole file of other features.
        lambda _: (lambda file: (np.savez(file, x=np.zeros((SHARD, 5), "<f2"), ok=np.ones(SHARD, bool),
                                          size=np.array([1, 4])), file.getvalue()))(io.BytesIO())[1],
        lambda _: (lambda file: (np.savez(file, x=np.zeros((7, 4), "<f2"), ok=np.ones(7, bool),
                                          size=np.array([1, 4])), file.getvalue()))(io.BytesIO())[1],
    ],
)  # fmt: skip
def test_a_shard_that_is_damaged_is_computed_again_and_no_other(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    assert put(tmp_path, 2, 0).missing() == [shard(1)]
    put(tmp_path, 1)
    file = tmp_path / FOLDER / f"{SHARD}.npz"
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert file.read_bytes() != content
    assert put(tmp_path).missing() == [shard(1)]
    # What a process that ended has not put in its place is not looked at.
    (tmp_path / FOLDER / f".{SHARD}.npz.tmp").write_bytes(b"half")
    writer = put(tmp_path, 1)
    assert writer.missing() == []
    assert writer.finish().all()
    found = torch.from_numpy(np.load(tmp_path / FOLDER / "x.npy"))
    assert found[:, 3].equal(torch.arange(COUNT).half())


def test_a_full_disk_costs_no_complete_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 0)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        put(tmp_path, 1)
    monkeypatch.undo()
    assert put(tmp_path).missing() == [shard(1), shard(2)]


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


def tasks(folder: Path, run: Run) -> tuple[Job, Job]:
    """The same site with its features in memory, and in a file."""
    found = []
    for mib in (256, 1):
        settings = {
            "data": "safetensors",
            "data-dir": str(folder / "data"),
            "cache-dir": str(folder / "cache"),
        }
        node = parse_node_config({**settings, "features-in-memory-mib": mib})
        found.append(Job(run, node, "a", load_site(run, node, policy_of(node).cache_mib)))
    assert [job.found.train.folder is None for job in found] == [True, False]
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
    assert message(file).payload == message(memory).payload
    memory, file = tasks(
        data,
        parse_run({"secure-aggregation": True, "classes": "0,1,2", "fedpft.covariance": "gram"}),
    )
    for ours, theirs in zip(
        class_moments(file).values.values(), class_moments(memory).values.values(), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["diag", "full", "spherical"])
def test_private_sums_of_features_in_a_file_are_those_in_memory_bit_for_bit(
    data: Path, family: str
) -> None:
    found = []
    for job in tasks(data, parse_run({})):
        train = job.found.train
        made = Clipped.of(replace(train, units=None), 0.0, lambda rows: rows - 0.1)
        found.append(statistics(made.features, made.labels, made.weights, 3, family))
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
    data = clipped(features, labels, norm=1.0, folder=tmp_path)
    noisy_sums(data, 3, family, claim)
    assert resident(tmp_path) < 0.1 * data.features.nbytes
