"""Write the run folder: all files of a run with the manifest of facts that repeat it, complete even
when the run fails.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from errno import ENOSPC
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedsurrogate.common.files import OWNER_ONLY, READABLE, replace_file, replacing
from fedsurrogate.common.flower.environment import COMMAND_BEGAN
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.run import Run
from fedsurrogate.common.signed_models.signed_model import SUFFIX
from fedsurrogate.common.version import NAME, own_version
from fedsurrogate.common.wire.model_proto import save_model
from fedsurrogate.strategies.base.outcome import Outcome

from .metrics import End, make_metrics, make_projection
from .writer_lock import WriterLock

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


# Bytes reserved on the disk, so that a failed run can write its reason: metrics, one event, a
# report.
RESERVE = 2**18


class RunWriter:
    """Writes a run's files during the run; implements `fedsurrogate.strategies.base.collection.Recorder`.

    Args:
        config: the run.
        flower_run_id: the number of the run in Flower.
        simulated: whether all sites run on the coordinator's machine, with the run's own data.

    Attributes:
        config: the run.
        path: the new run folder. Its name begins with its creation time.
    """

    def __init__(self, config: Run, flower_run_id: int, simulated: bool = False) -> None:
        self.config = config
        self._began = datetime.now(UTC)
        self._manifest: dict[str, Any] = {
            "config": (settings := config.settings.flat()),
            "versions": _versions(),
            "seed": settings["seed"],
            "run": config.digest,
            "flower_run_id": str(flower_run_id),
            "git_commit": _git_commit(),
            "simulated": simulated,
            "started": self._began.isoformat(timespec="seconds"),
        }
        self._end: End | None = None
        self._counts: dict[str, Mapping[str, float]] = {}
        name = f"{self._began:%Y%m%dT%H%M%SZ}-{config.method.name}-{secrets.token_hex(3)}"
        self.path = Path(config.settings.output_dir).expanduser().absolute() / name
        try:
            (self.path / "surrogates").mkdir(parents=True)
            # As the mode of a new folder is: without the permissions that this process removes.
            self._mode = READABLE & self.path.stat().st_mode
            self._lock = WriterLock(self.path)
            self._reserve = self.path / ".reserve"
            self._write_manifest()
            self.finish(Outcome(), "running")
            self._reserve.write_bytes(bytes(RESERVE))
        except OSError:
            # Otherwise it would stay as one that is running.
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def event(self, event: str, **fields: object) -> None:
        """Append one line to events.jsonl, completely or not at all.

        Args:
            event: name of the event.
            fields: its other entries; those that are None are left out.

        Raises:
            OSError: the line cannot be written.
        """
        if isinstance(counts := fields.get("counts"), Mapping) and "site" in fields:
            self._counts[str(fields["site"])] = counts
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
        } | fields
        content = (
            json.dumps({key: value for key, value in line.items() if value is not None}) + "\n"
        )
        with (self.path / "events.jsonl").open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(content.encode()) != len(content):
                    raise OSError(ENOSPC, "the disk took only a part of an event")
            except OSError:
                file.truncate(size)
                raise

    def end_early(self, outcome: Outcome, status: str, reason: str) -> None:
        """Record that the run did not succeed, and why. On a full disk the model is dropped to make
        space for this.

        Args:
            outcome: sites and results so far.
            status: "failed" or, where a person or the machine interrupted it, "interrupted".
            reason: for people.
        """
        self._reserve.unlink(missing_ok=True)
        self.event(status, reason=reason)
        try:
            self.finish(outcome, status, reason)
        except Exception:
            self.finish(replace(outcome, model=None, surrogates=[]), status, reason)

    def surrogate(self, site: str, payload: bytes) -> Callable[[], bytes]:
        """Store a site's surrogate as it arrived, so that a head can be learned again without the
        site. Other accounts of this machine cannot read it.

        Args:
            site: its name.
            payload: its bytes.

        Returns:
            A function that reads the stored bytes.
        """
        # Without waiting for the disk: there may be thousands.
        file = self.path / "surrogates" / f"{site}.pb"
        replace_file(file, payload, durable=False)
        return file.read_bytes

    def keep(self, name: str, content: bytes) -> None:
        """Store another file: for learning again or for resuming, such as a checkpoint, for this
        account only; or the signed model. Atomic and durable.

        Args:
            name: of the file in the run folder.
            content: its bytes.
        """
        mode = READABLE if name.endswith(SUFFIX) else OWNER_ONLY
        replace_file(self.path / name, content, mode=mode)

    def discard(self, site: str) -> None:
        """Delete a site's surrogate, so that nothing is learned from a refused surrogate."""
        (self.path / "surrogates" / f"{site}.pb").unlink(missing_ok=True)

    def finish(self, outcome: Outcome, status: str, failure: str = "") -> None:
        """Write model, manifest, plot data and metrics from the outcome so far.

        Args:
            outcome: sites and results so far.
            status: "running", "ok", "failed" or "interrupted", see `End`.
            failure: why the status is not "ok".
        """
        end = self._ended(status, failure)
        metrics, projection = (
            make_metrics(self.config, outcome, end, self._counts),
            make_projection(outcome),
        )
        if outcome.model is not None:
            with replacing(self.path / "model.safetensors", mode=self._mode) as temporary:
                save_model(outcome.model, temporary)
            self._write_manifest(outcome.model)
        if projection:
            self._write("projection.json", projection)
        self._write("metrics.json", metrics)
        self._reserve.unlink(missing_ok=True)
        if status != "running":
            self._end = end
            self._lock.close()

    def _ended(self, status: str, failure: str) -> End:
        """The end of the run: the present, or the first time that the run ended."""
        if self._end is not None:
            return replace(self._end, status=status, failure=failure)
        now = datetime.now(UTC)
        begun = os.environ.get(COMMAND_BEGAN)
        command = now.timestamp() - float(begun) if begun else None
        return End(status, failure, (now - self._began).total_seconds(), command)

    def update(self, outcome: Outcome) -> None:
        """Write the result again with the same end, after late replies."""
        end = self._end or End()
        self.finish(outcome, end.status, end.failure)

    def _write_manifest(self, model: Classifier | None = None) -> None:
        """With fingerprint and classes if there is a model."""
        header = None if model is None else model.header
        known = (
            {"fingerprint": header.fingerprint, "classes": list(header.classes)} if header else {}
        )
        self._write("manifest.json", self._manifest | known)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        replace_file(self.path / name, json.dumps(content, indent=2) + "\n", mode=READABLE)
