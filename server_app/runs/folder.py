"""What a run leaves behind: one folder, complete even when the run fails half-way."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from errno import ENOSPC
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config.run_config import RunConfig, run_digest
from common.errors import RunError
from common.models.classifiers import Classifier, Ensemble, Head, Network
from server_app.runs.card import run_card
from server_app.runs.privacy_card import privacy_card
from strategies.base.outcome import Outcome

PACKAGES = (
    "fedsurrogate",
    "flwr",
    "torch",
    "torchvision",
    "open_clip_torch",
    "timm",
    "numpy",
    "scikit-learn",
    "protobuf",
)
# Bytes that are kept free for saying why a run failed: metrics, one event, a report.
RESERVE = 2**18


class RunFolder:
    """Writes a run's files as the run goes; implements `strategies.base.collection.Recorder`."""

    def __init__(self, config: RunConfig, flower_run_id: int) -> None:
        self.config = config
        self.started = datetime.now(UTC)
        name = f"{self.started:%Y%m%dT%H%M%SZ}-{config.method}-{secrets.token_hex(3)}"
        self.path = Path(config.output_dir).expanduser().absolute() / name
        (self.path / "surrogates").mkdir(parents=True)
        self._manifest: dict[str, Any] = {
            "config": flatten(config.model_dump(by_alias=True, mode="json")),
            "versions": _versions(),
            "seed": config.seed,
            "run": run_digest(config),
            "flower_run_id": str(flower_run_id),
            "git_commit": _git_commit(),
            "started": self.started.isoformat(timespec="seconds"),
        }
        self._reserve = self.path / ".reserve"
        self._write("manifest.json", self._manifest)
        self._ended: tuple[str, str] = ("running", "")
        self._total: float | None = None
        self.finish(Outcome(), "running")
        self._reserve.write_bytes(bytes(RESERVE))

    def event(self, event: str, **fields: object) -> None:
        """Append one line to events.jsonl, whole or not at all. Raises OSError."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event} | fields
        content = json.dumps({key: value for key, value in line.items() if value is not None}) + "\n"
        with (self.path / "events.jsonl").open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(content.encode()) != len(content):
                    raise OSError(ENOSPC, "the disk took only a part of an event")
            except OSError:
                file.truncate(size)
                raise

    def fail(self, outcome: Outcome, reason: str) -> None:
        """Say that the run failed, and why; on a full disk too, where the model is given up before that."""
        self._reserve.unlink(missing_ok=True)
        self.event("failed", reason=reason)
        try:
            self.finish(outcome, "failed", reason)
        except Exception:
            self.finish(replace(outcome, model=None, surrogates=[]), "failed", reason)

    def surrogate(self, site: str, payload: bytes) -> None:
        """Keep a site's surrogate as it arrived, so that a head can be learned again without the site."""
        self.keep(f"surrogates/{site}.pb", payload)

    def keep(self, name: str, content: bytes) -> None:
        """Keep something else that is needed to learn again, or to go on: a public centre, a checkpoint. In one step."""
        with self._whole(name) as temporary:
            temporary.write_bytes(content)

    def discard(self, site: str) -> None:
        """Drop a site's surrogate, so that nothing is ever learned from what was refused."""
        (self.path / "surrogates" / f"{site}.pb").unlink(missing_ok=True)

    def finish(self, outcome: Outcome, status: str, failure: str = "") -> None:
        """Write metrics, model, manifest and picture data from what there is."""
        simulated = any(site.simulated for site in outcome.sites.values())
        trained = {site.name: site.claim for site in outcome.sites.values() if site.claim is not None}
        total = (datetime.now(UTC) - self.started).total_seconds() if self._total is None else self._total
        names = "" if simulated and outcome.names == "claimed" else outcome.names
        metrics: dict[str, Any] = {
            "schema": 1,
            "method": self.config.method,
            "status": status,
            "sites": {"invited": len(outcome.sites)}
            | {fate: outcome.count(fate) for fate in ("used", "rejected", "dropped")},
            "card": run_card(outcome.sites.values(), self.config.sites, outcome.absent, names),
            "accuracy": outcome.accuracy
            | {"per_site": {site.name: site.correct / site.tested for site in outcome.sites.values() if site.tested}},
            "bytes": {
                "up": sum(site.bytes_up for site in outcome.sites.values()),
                "down": sum(site.bytes_down for site in outcome.sites.values()),
                "up_per_site": {site.name: site.bytes_up for site in outcome.sites.values()},
                "compare": outcome.compare_bytes,
            },
            "privacy": privacy_card(self.config, outcome.surrogates, outcome.model, simulated, trained),
            "rounds": outcome.rounds,
            "seconds": {key: round(value, 3) for key, value in outcome.seconds.items()} | {"total": round(total, 3)},
        }
        metrics |= _downstream(outcome)
        if outcome.parameters:
            metrics["parameters"] = outcome.parameters
        if failure:
            metrics["failure"] = failure
        if outcome.stopped:
            metrics["stopped"] = outcome.stopped
            if metrics["privacy"] and outcome.rounds and outcome.rounds[-1].get("epsilon"):
                # Less was spent than promised.
                metrics["privacy"]["epsilon"] = outcome.rounds[-1]["epsilon"]
        if outcome.hops:
            metrics["hops"] = outcome.hops
        if outcome.model is not None:
            with self._whole("model.safetensors") as temporary:
                save_model(outcome.model, temporary)
            header = outcome.model.header
            self._manifest |= {"fingerprint": header.fingerprint, "classes": list(header.classes)}
            self._write("manifest.json", self._manifest)
            once = {"round": 1, "accuracy": outcome.accuracy.get("model"), "seconds": round(total, 3)}
            metrics["rounds"] = outcome.rounds or [once]
            if outcome.points:
                points = {kind: asdict(cloud) for kind, cloud in outcome.points.items()}
                self._write("projection.json", {"classes": header.classes} | points)
        self._write("metrics.json", metrics)
        self._reserve.unlink(missing_ok=True)
        if status != "running":
            self._ended, self._total = (status, failure), total

    def update(self, outcome: Outcome) -> None:
        """Write the same end once more, for what has come in since."""
        self.finish(outcome, *self._ended)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with self._whole(name) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")

    @contextmanager
    def _whole(self, name: str) -> Iterator[Path]:
        """What to write so that it becomes a file in one step: a reader never sees half of it, a full disk keeps nothing."""
        file = self.path / name
        temporary = file.with_name(f".{file.name}.new")
        try:
            yield temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(file)


def _downstream(outcome: Outcome) -> dict[str, Any]:
    """How well a generator serves at the sites, and how like their embeddings its own are."""
    rows = {site.name: site.downstream for site in outcome.sites.values() if site.downstream}
    if not rows:
        return {}
    told = [row for row in rows.values() if "sliced" in row and "sinkhorn" in row]
    if not told:
        return {"downstream": rows}
    return {
        "downstream": rows,
        "fidelity": {name: sum(row[name] for row in told) / len(told) for name in ("sliced", "sinkhorn")},
    }


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one of a run's JSON files. Raises RunError when it is not there or is no JSON object."""
    try:
        content = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} is no run folder: {name} cannot be read ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise RunError(f"{folder / name} does not hold a JSON object")
    return content


def read_payloads(folder: Path) -> list[bytes]:
    """What sites have sent, as far as a run has kept it, by site. Raises RunError when there is nothing."""
    files = sorted((folder / "surrogates").glob("*.pb"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise RunError(f"{folder} holds no surrogates")
    return [path.read_bytes() for path in files]


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested sections into the flat dotted keys of a run-config; lists become comma-separated."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = ",".join(value) if isinstance(value, list | tuple) else value
    return flat


def save_model(model: Classifier, path: Path) -> None:
    """Write a model as 32-bit safetensors, its classes and backbone fingerprint in the file's metadata.

    A linear head is `weight` (C, d) and `bias` (C,); an ensemble of M heads has both once more, (M, C, d) and (M, C). With
    `clip` in the metadata features x are divided by max(|x|, clip) before they are multiplied; with a tensor `centre` that
    is subtracted before. A network has `kind` and `inputs` in the metadata; see common/models/networks.py.
    """
    from safetensors.torch import save_file

    metadata = {"classes": json.dumps(model.header.classes), "fingerprint": model.header.fingerprint}
    tensors: dict[str, Tensor] = {}
    match model:
        case Head():
            tensors = {"weight": model.weight, "bias": model.bias}
            if model.centre is not None:
                tensors["centre"] = model.centre
            if model.clip is not None:
                metadata["clip"] = f"{model.clip:g}"
        case Ensemble():
            tensors = {name: torch.stack([getattr(head, name) for head in model.heads]) for name in ("weight", "bias")}
        case Network():
            tensors = dict(model.tensors)
            metadata |= {"kind": model.kind, "inputs": str(model.inputs)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git_commit() -> str:
    """The commit of the working folder, when there is one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
