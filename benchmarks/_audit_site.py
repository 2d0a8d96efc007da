"""Canaries for an audit, and what an attacker sees of a run at a site that has some of them."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from flwr.app import Context, Message
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.client_app.clientapp import app
from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.counted import EDGE
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app.deployment.local_engine import LocalGrid, quiet
from fedsurrogate.server_app.serverapp import federate

LARGEST = 2**30
# Of a site's backbone, and of the column that holds a label.
FINGERPRINT, LABEL = "a" * 16, "finding"
LIMITS = (
    'epsilon-per-run = 100.0\nepsilon-total = 100.0\nmechanisms = ["*"]\nsmallest-colluding = 0.0\n'
)


@dataclass(frozen=True)
class Canaries:
    """m records x (m, d) with labels y (m,), each in the data by a coin toss, `included` (m,).
    classes: of the run.

    copies: records of one canary, all of one patient, or images of one bag.
    bags: whether they are images of a bag.
    """

    x: Tensor
    y: Tensor
    classes: int
    included: Tensor
    copies: int = 1
    bags: bool = False


@dataclass(frozen=True)
class Seen:
    """What the coordinator sees of the audited site: each request's payload and the reply's; and
    its own run folder.
    """

    run: Run
    rounds: list[tuple[bytes | None, bytes]]
    totals: list[bytes] = field(default_factory=list)


# Each other site has the first canaries, so these are in a sum of all sites in any case.
OTHERS = 2
# Makes `count` canaries.
Maker = Callable[[int, torch.Generator], Canaries]


def one_a_class(count: int, generator: torch.Generator, dimension: int = 8) -> Canaries:
    """Each canary alone in a class of its own: counts and sums show it."""
    x = 30 * torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator))
    return Canaries(x, torch.arange(count), count, torch.rand(count, generator=generator) < 0.5)


def alone(count: int, generator: torch.Generator) -> Canaries:
    """Each canary alone in a class and along an axis: counts, sums and second moments show it."""
    return Canaries(
        30 * torch.eye(count),
        torch.arange(count),
        count,
        torch.rand(count, generator=generator) < 0.5,
    )


def patients(count: int, generator: torch.Generator) -> Canaries:
    """The same, but each is a patient with eight records that are nearly alike."""
    made = one_a_class(count, generator)
    return Canaries(made.x, made.y, made.classes, made.included, copies=8)


def long_patients(count: int, generator: torch.Generator) -> Canaries:
    """Patients with eight records that are nearly alike, in two classes along the axes."""
    return replace(long(count, generator), copies=8)


def bags(count: int, generator: torch.Generator) -> Canaries:
    """The same, but each is a bag of eight images that are nearly alike."""
    return replace(patients(count, generator), bags=True)


def orthogonal(count: int, generator: torch.Generator, length: float = 1.0) -> Canaries:
    """Canaries in two classes along the axes: each is alone in its direction, which no other record
    uses.
    """
    y = torch.randint(2, (count,), generator=generator)
    return Canaries(length * torch.eye(count), y, 2, torch.rand(count, generator=generator) < 0.5)


def long(count: int, generator: torch.Generator) -> Canaries:
    """The same, but thirty times as long: without the clip, each would add thirty times as much."""
    return orthogonal(count, generator, 30.0)


def in_own_bins(count: int, generator: torch.Generator) -> Canaries:
    """Canaries along axes of their own, for a head that puts each into bins of its own."""
    return replace(orthogonal(count, generator), y=torch.zeros(count, dtype=torch.int64))


class Wire(LocalGrid):
    """A grid that keeps what the first node receives and sends in training."""

    def __init__(self, nodes: Sequence[dict[str, Scalar]]) -> None:
        super().__init__(app, nodes)
        self.rounds: list[tuple[bytes | None, bytes]] = []

    def _answer(self, message: Message, context: Context) -> Message:
        reply = super()._answer(message, context)
        first = message.metadata.dst_node_id == next(iter(self.node_configs))
        if first and message.metadata.message_type == "train" and reply.has_content():
            question, payload = (from_record(each.content, LARGEST)[0] for each in (message, reply))
            if payload:
                self.rounds.append((question, payload))
        return reply


def seen_of(canaries: Canaries, settings: dict[str, Scalar], sites: int = 1) -> Seen:
    """What is seen of a run in which the first site has these canaries. Raises the run's error if
    the site sends nothing.

    sites: all sites; the others have the first two canaries each.
    """
    with tempfile.TemporaryDirectory(prefix="audit-") as name:
        folder = Path(name)
        classes = ",".join(f"c{label:04d}" for label in range(canaries.classes))
        nodes = [
            _site(
                folder / f"site{index}", canaries, classes, bool(index), "counting.kind" in settings
            )
            for index in range(sites)
        ]
        # Public features that change nothing, for a run that needs some.
        save_file({"x": torch.zeros(2, canaries.x.shape[1])}, folder / "public.safetensors")
        if "fedpft.public" in settings:
            settings = settings | {"fedpft.public": f"{name}/public.safetensors"}
        settings = settings | {
            "classes": "" if "task" in settings else classes,
            "output-dir": f"{name}/runs",
            "quorum": 0.1,
            "device": "cpu",
        }
        wire, failure = Wire(nodes), None
        if "counting.kind" in settings:
            return _judged(canaries, settings, wire)
        wire.run_config = settings
        run = parse_run(settings)
        try:
            with quiet():
                federate(run, wire, 77, report=False)
        except FedSurrogateError as error:
            # So small a federation learns no model; the release is what counts.
            failure = error
        if not wire.rounds and failure is not None:
            raise failure
        return Seen(run, wire.rounds, [file.read_bytes() for file in folder.glob("runs/*/sum.pb")])


# Bins of a histogram, and those that a head has for each canary: by fours, a hostile one adds a norm of
# two where one is charged.
JUDGED_BINS, OWN_BINS = 256, 4


def _judged(canaries: Canaries, settings: dict[str, Scalar], wire: Wire) -> Seen:
    """What is seen of an evaluation of labels. The coordinator sends a head that names its label as
    often as a canary has bins; and where the site refuses it, one that names it once.
    """
    count = len(canaries.x)
    width = 2 * EDGE / JUDGED_BINS
    for outputs in (OWN_BINS, 1):
        place = OWN_BINS * torch.arange(count)[None] + torch.arange(outputs)[:, None] + 0.5
        weight = (width * place - EDGE) @ torch.linalg.pinv(canaries.x).T
        header = Header("fedpft", "", "coordinator", FINGERPRINT, (LABEL,) * outputs)
        facts = json.dumps({"name": "multilabel", "columns": [LABEL]})
        model = pack_classifier(Head(header, weight, torch.zeros(outputs), target=facts))
        asked = settings | {
            "counting.digest": hashlib.sha256(model).hexdigest(),
            "counting.bins": JUDGED_BINS,
            "label-columns": LABEL,
        }
        wire.run_config, run = asked, parse_run(asked)
        info = {"run": run.digest, "round": 1, "confirmed": 0, "lineage": "audit"}
        content = to_record(model, info | {"bytes": len(model)})
        node = next(iter(wire.node_configs))
        list(wire.pull_messages(wire.push_messages([Message(content, node, "train")])))
        if wire.rounds:
            break
    return Seen(run, wire.rounds)


def _site(
    folder: Path, canaries: Canaries, classes: str, other: bool, judged: bool = False
) -> dict[str, Scalar]:
    """The node-config of a site with those canaries that are included, or of another site; judged:
    they are held out.
    """
    folder.mkdir()
    first = torch.arange(len(canaries.x)) < OTHERS
    held = folder / "held-out"
    held.mkdir()
    parts = {
        folder / "f-train.safetensors": first if other or judged else canaries.included,
        folder / "f-test.safetensors": first,
        held / "f.safetensors": canaries.included if judged else first,
    }
    for file, rows in parts.items():
        part = file.stem.removeprefix("f-")
        whose = rows.nonzero()[:, 0].repeat_interleave(1 if part == "test" else canaries.copies)
        # Exact copies of a record would count once.
        x = canaries.x[whose] + (
            1e-4 * torch.randn(len(whose), canaries.x.shape[1]) if canaries.copies > 1 else 0
        )
        content = {
            "x": x.contiguous(),
            "y": canaries.y[whose].contiguous(),
            LABEL: torch.ones(len(whose)),
            "patient": whose.contiguous(),
            # No bag lies in both parts.
            "bag": whose + (len(canaries.x) if part == "test" else 0),
        }
        save_file(content, file, {"classes": classes, "fingerprint": FINGERPRINT})
    (folder / "policy.toml").write_text(LIMITS)
    node: dict[str, Scalar] = {
        "site": folder.name,
        "data": "safetensors",
        "data-dir": str(folder),
        "held-out-dir": str(held),
        "target-columns": LABEL,
        "dataset": "f",
    }
    node |= {
        "policy": f"{folder}/policy.toml",
        "state-dir": f"{folder}/state",
        "cache-dir": f"{folder}/cache",
    }
    if canaries.bags:
        node |= {"bag-column": "bag", "unit": "bag"}
    elif canaries.copies > 1:
        node["patient-column"] = "patient"
    open_ledger(parse_node_config(node))
    return node
