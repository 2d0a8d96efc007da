"""The manifest: all facts needed to repeat a run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.version import NAME, own_version

PACKAGES = (
    "flwr",
    "torch",
    "torchvision",
    "open_clip_torch",
    "timm",
    "numpy",
    "scikit-learn",
    "protobuf",
)


@dataclass(frozen=True)
class Start:
    """Time and software versions at a run's start.

    Attributes:
        flower_run_id: the number of the run in Flower.
        time: of the start.
        versions: of each installed package, by its name.
        git_commit: of the working folder, "" if it is not a repository.
        simulated: whether all sites ran on the coordinator's machine, with the run's own data.
    """

    flower_run_id: int
    time: datetime
    versions: dict[str, str]
    git_commit: str
    simulated: bool = False

    @classmethod
    def now(cls, flower_run_id: int, time: datetime, simulated: bool = False) -> Start:
        """The start of a run with the software of this process.

        Args:
            flower_run_id: the number of the run in Flower.
            time: of the start.
            simulated: see `Start`.

        Returns:
            The start, with this process's versions and the git commit of its working folder.
        """
        return cls(flower_run_id, time, _versions(), _git_commit(), simulated)


def make_manifest(
    settings: Mapping[str, Any], digest: str, start: Start, model: Classifier | None = None
) -> dict[str, Any]:
    """The content of manifest.json.

    Args:
        settings: of the run, flat.
        digest: of the run.
        start: its time and software.
        model: the learned model; None before a model has been learned.

    Returns:
        The content, with fingerprint and classes if there is a model.
    """
    manifest: dict[str, Any] = {
        "config": settings,
        "versions": start.versions,
        "seed": settings["seed"],
        "run": digest,
        "flower_run_id": str(start.flower_run_id),
        "git_commit": start.git_commit,
        "simulated": start.simulated,
        "started": start.time.isoformat(timespec="seconds"),
    }
    if model is not None:
        manifest |= {"fingerprint": model.header.fingerprint, "classes": list(model.header.classes)}
    return manifest


@cache
def _versions() -> dict[str, str]:
    versions = {NAME: own_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _git_commit() -> str:
    """The git commit of the working folder, or ""."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
