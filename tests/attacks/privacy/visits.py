"""All requests that a coordinator can send to a hospital in a private run, through the site's real
entry point.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.registrations import parse_receipt
from fedsurrogate.common.security.sealing import SEED_BYTES
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import INFO, Info, to_record
from fedsurrogate.strategies.base.training import Training
from tests.attacks.privacy.neighbours import DIMENSION, FINGERPRINT, Data, write
from tests.grid import FIRST_NODE, InProcessGrid, Scalar, default_run_config, open_new

POLICY = "epsilon-per-run = 5.0\nepsilon-total = 50.0\ndelta = 0.001\nmechanisms = ['*']\n"
DEFAULTS = default_run_config()
PRIVATE: dict[str, Scalar] = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "image-size": 4,
    "device": "cpu",
    "classes": "a,b",
}
ROUNDS: dict[str, Scalar] = {
    "fedavg.rounds": 1,
    "fedavg.sample-rate": 1.0,
    "fedavg.local-epochs": 1,
}
GENERATED: dict[str, Scalar] = {
    "dpcvae.rounds": 2,
    "dpcvae.local-epochs": 1,
    "dpcvae.latent": 2,
    "dpcvae.synthetic": 4,
}
CHAIN: dict[str, Scalar] = {"fedpft.topology": "chain", "head.min-steps": 2, "head.epochs": 1}
# Every method that takes epsilon, with little work.
METHODS: dict[str, dict[str, Scalar]] = {
    **{
        f"sums {name}": {"fedpft.covariance": name}
        for name in ("spherical", "diag", "full", "lowrank")
    },
    "dp-em": {"fedpft.components": 2},
    "chain": CHAIN,
    "sealed chain": {"fedpft.seal": True, **CHAIN},
    "dp-fedavg": {"method": "dp-fedavg", **ROUNDS},
    "dp-fedprox": {"method": "dp-fedprox", "fedavg.model": "mlp", "fedavg.width": 2, **ROUNDS},
    "fedlap": {
        "method": "fedlap",
        "fedlap.model": "linear",
        "fedlap.rounds": 1,
        "fedlap.image-steps": 2,
    },
    "dpcvae": {"method": "dpcvae", **GENERATED},
    "dpcgan": {"method": "dpcgan", **GENERATED},
    "survey": {"counting.kind": "survey"},
    "evaluation": {"counting.kind": "evaluation", "counting.bins": 4, "counting.digest": "0" * 64},
}
EDEMA: dict[str, Scalar] = {"task": "multilabel", "label-columns": "edema", "classes": ""}
# The same for every other target than classes.
TARGETS: dict[str, dict[str, Scalar]] = {
    "number": {
        "task": "regression",
        "value-columns": "age",
        "target-range": "0,100",
        "classes": "",
    },
    "labels": EDEMA,
    # A record that is not annotated for all of its set is left out alone.
    "capped": EDEMA | {"label-sets": "clinic=edema"},
    "cells": {
        "task": "survival",
        "time-column": "time",
        "event-column": "event",
        "time-unit": "years",
        "horizon": 6.0,
        "classes": "",
    },
}
TARGETS |= {
    f"survey of {name}": run | {"counting.kind": "survey", "counting.bins": 4}
    for name, run in list(TARGETS.items())
}
TARGETS["residuals"] = TARGETS["cells"] | {"time-head": "residuals"}
# By design it does not protect class sizes or the set of classes, so only its uncharged replies are
# compared.
EXCEPTION: dict[str, Scalar] = {"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"}


@dataclass
class Visit:
    """All replies of a hospital, by request. uncharged: whole replies, byte for byte. charged: the
    parts of a reply, of its ledger entry and of its files that must not depend on records.
    """

    uncharged: dict[str, dict[str, bytes]] = field(default_factory=dict)
    charged: dict[str, object] = field(default_factory=dict)

    def differences(self, other: Visit) -> list[str]:
        """Differences between two visits that an observer could see although privacy must hide
        them.
        """
        pairs = ((self.uncharged, other.uncharged), (self.charged, other.charged))
        return [
            name
            for one, two in pairs
            for name in sorted(one.keys() | two.keys())
            if one.get(name) != two.get(name)
        ]


class Hospital:
    """A site with its own data in a fresh folder, and a coordinator that can send it any request."""

    def __init__(self, home: Path, kind: str, records: Data, **settings: Scalar) -> None:
        self.home, self.data = home, home / "data"
        self.node = set_up(home) | write(kind, self.data, records) | settings
        write(kind, home / "held-out", records)
        self.node["held-out-dir"] = str(home / "held-out")
        open_new(self.node)
        self.run_id = 76
        # Precomputed features define their own backbone.
        self.place = (FINGERPRINT, DIMENSION) if kind == "features" else _backbone()

    def ask(self, kind: str, run: dict[str, Scalar], content: RecordDict) -> RecordDict:
        """The reply to one message."""
        grid = InProcessGrid([self.node], run_id=self.run_id)
        grid.run_config = DEFAULTS | run
        (reply,) = grid.pull_messages(grid.push_messages([Message(content, FIRST_NODE, kind)]))
        assert not reply.has_error()
        return reply.content

    def entries(self) -> list[dict[str, Any]]:
        """The releases in its ledger."""
        ledger = Ledger(
            self.home / "state" / "ledgers", dataset_id(str(self.node["data"]), str(self.data))
        )
        return [entry for entry in ledger.entries() if entry["kind"] == "release"]

    def visit(self, settings: dict[str, Scalar], exception: bool = False) -> Visit:
        """Send all requests that a run with these settings could send, allowed or not."""
        self.run_id += 1
        run = PRIVATE | settings
        visit, judged_model = Visit(), judged_head(parse_run(PRIVATE), *self.place)
        if "counting.digest" in run:
            run["counting.digest"] = sha256(judged_model).hexdigest()
        config = parse_run(run)
        model = judged_model if config.plan.counts else judged_head(config, *self.place)
        bare = to_record(None, {"run": config.digest})
        judged = to_record(model, {"bytes": len(model)})
        for name, kind, content in (
            ("hello", "query.hello", bare),
            ("compare", "query.compare", judged),
            ("head", "query.head", bare),
            ("another run", "train", to_record(None, {"run": "another"})),
            ("evaluate", "evaluate", judged),
            ("evaluate nothing", "evaluate", bare),
        ):
            visit.uncharged[name] = _bytes(self.ask(kind, run, content))
        for name, more in (
            ("hello without classes", {"classes": ""}),
            ("hello for a rare class", {"classes": "x"}),
            ("hello at the images' size", {"image-size": 0}),
            ("hello for more than the policy allows", {"epsilon": 9.0}),
        ):
            visit.uncharged[name] = _bytes(self.ask("query.hello", run | more, bare))
        if exception:
            return visit
        training = _training(config, *self.place)
        self.judged = model if config.settings.counting.digest else None
        last = 1 if config.plan.messages.first is None else 2
        for number in range(1, last + 1):
            self._train(visit, run, config, training, number)
        if training is not None:
            model = training.payload()
            trained = to_record(model, {"bytes": len(model)})
            visit.uncharged["evaluate after"] = _bytes(self.ask("evaluate", run, trained))
        spent = {"epsilon": 5.0} | {key: value for key, value in run.items() if key != "epsilon"}
        beyond = parse_run(spent)
        asked = question(beyond, _training(beyond, *self.place), 1, self.judged)
        _take_in(visit, "train beyond the budget", self.ask("train", spent, asked), config)
        visit.charged["ledger"] = [_facts(entry) for entry in self.entries()]
        kept = [self.home / "state" / name for name in ("runs", "generators")]
        visit.charged["files"] = sorted(
            str(p.relative_to(self.home)) for at in kept for p in at.rglob("*") if p.is_file()
        )
        return visit

    def _train(
        self, visit: Visit, run: dict[str, Scalar], config: Run, training: Training | None, at: int
    ) -> None:
        reply = self.ask("train", run, question(config, training, at, self.judged))
        _take_in(visit, f"train {at}", reply, config)
        if training is not None:
            training.finish_round(["clinic"])


def set_up(home: Path) -> dict[str, Scalar]:
    """Make the folders and the policy of a hospital, for all hospitals of these tests."""
    (home / "state" / "keys").mkdir(parents=True)
    (home / "policy.toml").write_text(POLICY)
    # The same key at all hospitals: a site may report its key, which does not depend on records.
    (home / "state" / "keys" / "clinic.key").write_bytes(bytes(range(SEED_BYTES)))
    node: dict[str, Scalar] = {"site": "clinic", "policy": str(home / "policy.toml")}
    node["target-columns"] = "age,edema,time,event"
    return node | {"state-dir": str(home / "state"), "cache-dir": str(home / "cache")}


def close_logs() -> None:
    """Close the logs: one process runs all hospitals, and none may write into another's log."""
    log = logging.getLogger("fedsurrogate.site")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


@cache
def _backbone() -> tuple[str, int]:
    backbone = load_backbone("pixels", "", int(PRIVATE["image-size"]), "cpu")
    return backbone.fingerprint, backbone.dim


def _training(config: Run, fingerprint: str, dimension: int) -> Training | None:
    if config.settings.method == "fedpft":
        return None
    training = Training.begin(config, config.settings.classes, fingerprint, dimension)
    training.lineage = "abc"
    return training


def question(
    config: Run, training: Training | None, number: int, judged: bytes | None
) -> RecordDict:
    question = judged if training is None else training.payload()
    reported: Info = {"run": config.digest, "round": number, "lineage": "abc", "hop": 1}
    reported |= {"confirmed": number - 1, "keys": "{}", "readers": ""}
    reported |= {} if question is None else {"bytes": len(question)}
    return to_record(question, reported)


def judged_head(config: Run, fingerprint: str, dimension: int) -> bytes:
    """A model of this run that a coordinator might send to its sites."""
    classes = config.settings.classes
    header = Header(config.settings.method, config.digest, "coordinator", fingerprint, classes)
    return pack_classifier(
        Head(header, torch.zeros(len(classes), dimension), torch.zeros(len(classes)), 0.0)
    )


def _take_in(visit: Visit, name: str, reply: RecordDict, config: Run) -> None:
    info = dict(reply.config_records[INFO])
    if info["status"] != "ok":
        visit.uncharged[name] = _bytes(reply)
        return
    if _shaped_by_noise(config.plan.mechanism_name, config.settings.method):
        info["bytes"] = 0
    if "receipt" in info:
        # Name, time and tag of a receipt are random or vary with time; its number of entries is
        # not.
        info["receipt"] = str(parse_receipt(info["receipt"]).length)
    visit.charged[name] = (info, sorted(reply))


def _bytes(record: RecordDict) -> dict[str, bytes]:
    """A reply as bytes on the wire."""
    return {name: each.deflate() for name, each in get_all_nested_objects(record).items()}


def _facts(entry: dict[str, Any]) -> dict[str, Any]:
    """A ledger entry's facts on a release, except its time, sizes shaped by noise, and facts that
    stay at the site.
    """
    shaped = {"time", "hash", "previous", "sha256", "facts"}
    shaped |= {"bytes"} if _shaped_by_noise(entry["mechanism"], entry["method"]) else set()
    return {key: value for key, value in entry.items() if key not in shaped}


def _shaped_by_noise(mechanism: str, method: str) -> bool:
    """Whether the budget covers a release's size: components that stand out from the noise, or
    non-zero entries.
    """
    return mechanism == "dp-em" or method == "dpcgan"
