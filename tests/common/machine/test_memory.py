"""Memory that is available: of the machine, of containers under both versions of cgroups, of the
shell.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as some

from fedsurrogate.common import machine
from fedsurrogate.common.machine import MIB, available_memory, no_room

MACHINE = 8000 * MIB


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=1000 * MIB))


def cgroup(folder: Path, most: object, used: int, freeable: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit, use, name = machine.FILES[0 if version == 2 else 1]
    (folder / limit).write_text(f"{most}\n")
    (folder / use).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{name} {freeable}\n")


def member(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{line}\n")


def test_without_cgroups_the_machine_decides_and_the_swap_counts_only_on_request(
    tmp_path: Path,
) -> None:
    assert available_memory(root=tmp_path) == MACHINE
    assert available_memory(swap=True, root=tmp_path) == MACHINE + 1000 * MIB


@pytest.mark.parametrize("path", ["/", "/docker/1234"])
def test_the_limit_of_a_container_counts_without_what_the_kernel_can_free(
    tmp_path: Path, path: str
) -> None:
    """Docker with cgroups v2: the container's own folder is mounted; the path may be the host's."""
    member(tmp_path, f"0::{path}")
    cgroup(tmp_path / "sys/fs/cgroup", 2000 * MIB, 900 * MIB, 400 * MIB)
    assert available_memory(root=tmp_path) == 1500 * MIB
    assert available_memory(swap=True, root=tmp_path) == 1500 * MIB


def test_every_cgroup_above_counts(tmp_path: Path) -> None:
    """systemd and Kubernetes: the limit may be on a folder above."""
    member(tmp_path, "0::/user.slice/run.scope")
    cgroup(tmp_path / "sys/fs/cgroup/user.slice", 3000 * MIB, 1000 * MIB)
    cgroup(tmp_path / "sys/fs/cgroup/user.slice/run.scope", "max", 500 * MIB)
    assert available_memory(root=tmp_path) == 2000 * MIB


@pytest.mark.parametrize("path", ["/", "/docker/1234"])
def test_version_1_is_read_and_its_largest_number_is_no_limit(tmp_path: Path, path: str) -> None:
    member(tmp_path, f"7:cpu:/x\n5:memory:{path}")
    cgroup(tmp_path / "sys/fs/cgroup/memory", 1024 * MIB, 1000 * MIB, 300 * MIB, version=1)
    assert available_memory(root=tmp_path) == 324 * MIB
    cgroup(tmp_path / "sys/fs/cgroup/memory", 9223372036854771712, 1000 * MIB, version=1)
    assert available_memory(root=tmp_path) == MACHINE


def test_a_full_cgroup_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    cgroup(tmp_path / "sys/fs/cgroup", 100 * MIB, 101 * MIB)
    assert available_memory(root=tmp_path) == 0


@given(some.text(max_size=40))
def test_files_of_any_content_do_no_harm(content: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        member(root, content.replace("\0", ""))
        mounted = root / "sys/fs/cgroup"
        mounted.mkdir(parents=True)
        for name in ("memory.max", "memory.current", "memory.stat"):
            (mounted / name).write_text(content)
        assert 0 <= available_memory(root=root) <= MACHINE


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_an_error_of_a_small_address_space_names_ulimit(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert no_room(error) == ""
    monkeypatch.setattr(
        resource, "getrlimit", lambda what: (1_500_000 * 1024, resource.RLIM_INFINITY)
    )
    assert "`ulimit -v` = 1500000" in no_room(error)
    assert "\n" not in no_room(error)
    assert no_room(ImportError("No module named 'x'")) == ""
