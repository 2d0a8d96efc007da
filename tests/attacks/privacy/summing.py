"""One hospital in secure aggregation without noise, between two sites that the coordinator has made up:
its answer to every step, without the parts that are random.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.protocol import unmask
from fedsurrogate.common.secure_aggregation.rules import context_of, rules_of, shapes_of
from fedsurrogate.common.secure_aggregation.secrets import Words
from fedsurrogate.common.security.sealing import new_key
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import Info, from_record, to_record
from fedsurrogate.strategies.base.training import Training
from tests.attacks.privacy.neighbours import Data, write
from tests.attacks.privacy.visits import DEFAULTS, Hospital
from tests.common.secure_aggregation.parties import Party
from tests.grid import Scalar

# Records that a class needs.
SMALLEST = 3
POLICY = (
    f"without-dp = true\nsmallest-class = {SMALLEST}\nsmallest-cell = {SMALLEST}\n"
    "smallest-colluding = 0.0\nexact-sums-at-models = true\nexact-runs-may-differ = true\n"
)
EXACT: dict[str, Scalar] = {
    "secure-aggregation": True,
    "colluding": 0.0,
    "dropouts": 0.0,
    "classes": "a,b",
    "image-size": 4,
    "device": "cpu",
}
TRAINED: dict[str, Scalar] = {"fedavg.local-epochs": 1, "fedavg.rounds": 1}
JUDGED: dict[str, Scalar] = {"counting.digest": "0" * 64}
# Sums of every kind, and of other classes.
SUMS: dict[str, dict[str, Scalar]] = {
    "survey": {"counting.kind": "survey"},
    "survey of one class": {"counting.kind": "survey", "classes": "a"},
    "survey of a rare class": {"counting.kind": "survey", "classes": "x"},
    "gram": {"fedpft.covariance": "gram"},
    "gram of a rare class": {"fedpft.covariance": "gram", "classes": "a,x"},
    "narrow gram": {
        "fedpft.covariance": "gram",
        "secure-aggregation-range": 1e-3,
        "secure-aggregation-records": 1,
    },
    "fedavg": {"method": "fedavg", **TRAINED},
    "fedsgd": {"method": "fedsgd", "fedavg.model": "mlp", "fedavg.width": 2, **TRAINED},
    "dpcvae": {"method": "dpcvae", "dpcvae.rounds": 2, "dpcvae.latent": 2},
    "evaluation": {"counting.kind": "evaluation", "counting.bins": 4, **JUDGED},
}
# Of a reply: random numbers, and the ledger's receipts, which have a random name.
RANDOM = ("key", "receipt")
OTHERS = ("one", "two")
Answer = tuple[str, dict[str, Any], int]


class Summing(Hospital):
    """A hospital that sums without noise."""

    def __init__(self, home: Path, kind: str, records: Data) -> None:
        super().__init__(home, kind, records)
        self.kind = kind
        (home / "policy.toml").write_text(POLICY)
        # The coordinator remembers its sites: a hospital sums with one set of them only.
        self.others = {name: new_key() for name in OTHERS}
        # Of the last sum, modulo 2^32: as the others add zeros, what the hospital has added.
        self.total: Words | None = None

    def change(self, records: Data) -> None:
        """Replace its records."""
        for folder in (self.data, self.home / "held-out"):
            shutil.rmtree(folder)
            write(self.kind, folder, records)

    def sum(self, settings: Mapping[str, Scalar], number: int = 1) -> list[Answer]:
        """Its answers to the steps of a sum, whether it refuses some or not."""
        self.run_id += 1
        config, model = self._model(settings)
        run, name = parse_run(config), sha256(str(self.run_id).encode()).hexdigest()[:32]
        info: Info = {"run": run.digest, "sum": name, "round": number}
        info |= {"lineage": "abc", "confirmed": number - 1}
        answers: list[Answer] = []

        def ask(kind: str, payload: bytes | None) -> tuple[bytes | None, Info]:
            size = {} if payload is None else {"bytes": len(payload)}
            found, reported = from_record(
                self.ask(kind, config, to_record(payload, info | size)), 2**30
            )
            answers.append(_form(kind, found, reported))
            return found, reported

        key = str(ask("query.hello", None)[1].get("key", ""))
        others = {
            each: Party(each, private, context_of(run, name))
            for each, private in self.others.items()
        }
        members = {each: party.member for each, party in others.items()}
        if key:
            members["clinic"] = surrogate_proto.unpack_member(bytes.fromhex(key))
        public, rules = surrogate_proto.map_digest(model), rules_of(run.settings, 3)
        payload, _ = ask("query.sum_shares", surrogate_proto.pack_members(members.values(), public))
        dealt, masked, signatures = {}, {}, {}
        if payload is not None:
            dealt = {"clinic": surrogate_proto.unpack_dealt(payload)} | {
                each: party.share(members.values(), rules, public=public)
                for each, party in others.items()
            }
        delivery = surrogate_proto.pack_delivery(dealt.values(), "clinic", model) if dealt else b""
        payload, _ = ask("train", delivery)
        if payload is not None:
            dimension = self.place[1]
            shapes = shapes_of(run.plan, len(run.settings.classes), dimension, number)
            count = sum(map(prod, shapes.values()))
            _, masked["clinic"], _ = surrogate_proto.unpack_masked(payload, count)
            zeros = np.zeros(len(masked["clinic"]), np.int64)
            masked |= {each: p.mask(dealt.values(), rules, zeros) for each, p in others.items()}
            signatures = {each: party.agree(masked, rules) for each, party in others.items()}
        ask("query.sum_list", surrogate_proto.pack_list(["clinic", *OTHERS]))
        payload, _ = ask(
            "query.sum_open", surrogate_proto.pack_list(["clinic", *OTHERS], signatures)
        )
        self.total = None
        if payload is not None:
            opened = {each: party.reveal(signatures, rules) for each, party in others.items()}
            opened["clinic"] = surrogate_proto.unpack_revealed(payload)
            self.total = unmask(masked, dealt, members, opened, rules)
        return answers

    def _model(self, settings: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], bytes]:
        """The settings, and the payload that all sites must agree on."""
        config = DEFAULTS | EXACT | dict(settings)
        place = self.place if config["counting.kind"] != "survey" else ("labels-only", 1)
        classes = tuple(str(config["classes"]).split(","))
        if "counting.digest" in settings:
            header = Header("fedpft", "0" * 16, "coordinator", place[0], classes)
            head = Head(header, torch.eye(len(classes), place[1]), torch.zeros(len(classes)), 0.0)
            model = pack_classifier(head)
            return config | {"counting.digest": sha256(model).hexdigest()}, model
        run: Run = parse_run(config)
        if run.plan.counts:
            return config, b""
        if run.plan.kind == "rounds":
            training = Training.begin(run, classes, *place)
            training.lineage, training.asked = "abc", 1
            return config, training.payload()
        return config, surrogate_proto.pack_map(PublicMap())


def _form(kind: str, payload: bytes | None, reported: Info) -> Answer:
    known = {key: len(str(value)) if key in RANDOM else value for key, value in reported.items()}
    return kind, known, -1 if payload is None else len(payload)
