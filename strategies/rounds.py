"""FedAvg and its relatives at the coordinator: rounds of training with a checkpoint after each."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from common.checks import Expectation, check_header
from common.claims import check_claim
from common.config import run_digest
from common.errors import RunError, SurrogateError
from common.model_frames import unpack_parameters
from common.parameters import Parameters, check_update
from common.wire import Info, to_record
from strategies.collect import Collection, check_quorum, connected_nodes
from strategies.federation import Federation, seconds_told
from strategies.outcome import NO_REPLY, Site
from strategies.training import Training

CHECKPOINT = "checkpoint.safetensors"


class Rounds(Federation):
    """Rounds of `fedavg.rounds`: the model goes out, updates come back. A site that fails a round is asked again."""

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Run all rounds that are left. Raises RunError when a quorum is missed; what was learned by then can be resumed."""
        deadline = deadline or self.config.deadline
        self.summary()
        training = self._begin(grid, deadline)
        self.outcome.rounds = training.history
        started, asked_before = time.perf_counter(), sum(entry["bytes_up"] or 0 for entry in training.history[-1:])
        while training.round < self.config.fedavg.rounds:
            self._round(grid, training, deadline, started, asked_before)
        self.outcome.model = training.classifier()
        self.outcome.seconds["learn"] = time.perf_counter() - started
        return self.evaluate(grid, deadline)

    def summary(self) -> None:
        """Record what is about to happen."""
        self.recorder.event("configured", method=self.config.method, **self.config.fedavg.model_dump())

    def _begin(self, grid: Grid, deadline: float) -> Training:
        """A new model for the backbone and the classes of the connected sites, or the one of an earlier run."""
        group = self.introduce(grid, deadline)
        if self.config.resume:
            training = Training.load(self.config, read_kept(self.config.resume, CHECKPOINT), CHECKPOINT)
            if training.fingerprint != group.fingerprint:
                raise RunError(f"the checkpoint is for backbone {training.fingerprint[:16]}, the sites have another")
            self.recorder.event("resumed", round=training.round)
            return training
        return Training.begin(self.config, group.classes, group.fingerprint, group.dimension)

    def _round(self, grid: Grid, training: Training, deadline: float, started: float, before: float) -> None:
        number, sites = training.round + 1, self.outcome.sites
        nodes = connected_nodes(grid, 0, deadline)
        self._connected = set(nodes)
        for node in nodes:
            # Who came only now, or came back under another number, takes part from here on.
            sites.setdefault(node, Site(name=f"node {node}"))
        for node, site in sites.items():
            if node not in self._connected and site.fate == "used":
                site.fate, site.reason = "dropped", f"gone before round {number}"
                self.recorder.event("dropped", site=site.name, reason=site.reason, round=number)
        asked = [node for node in nodes if not sites[node].barred]
        question = training.question()
        run, lineage = run_digest(self.config), training.lineage
        told: Info = {"run": run, "round": number, "lineage": lineage, "bytes": len(question)}

        def message(node: int) -> Message:
            confirmed = training.confirmed.get(sites[node].name, 0)
            return self._message(MessageType.TRAIN, node, to_record(question, told | {"confirmed": confirmed}))

        updates: list[Parameters] = []
        silent = set(asked)
        for reply in Collection(grid, map(message, asked), deadline):
            silent.discard(self._node(reply))
            if (update := self._update(reply, training)) is not None:
                updates.append(update)
        for node in silent:
            sites[node].fate, sites[node].reason = "dropped", NO_REPLY
            self.recorder.event("dropped", site=sites[node].name, reason=NO_REPLY, round=number)
        try:
            check_quorum(len(updates), len(asked), self.config.sites, self.config.quorum)
        except RunError as error:
            raise RunError(f"round {number}: {error}; go on from its checkpoint with resume") from None
        # The same order whoever was faster, so that sums agree to the last bit.
        updates.sort(key=lambda update: (len(update.header.site), update.header.site))
        training.absorb(updates, len([site for site in sites.values() if not site.barred]))
        self.outcome.model = training.classifier()
        accuracy = self._accuracy(grid, deadline)
        bytes_up = before + sum(site.bytes_up for site in sites.values())
        story = {"round": number, "accuracy": accuracy, "bytes_up": bytes_up, "used": len(updates)}
        training.history.append(story | {"seconds": round(time.perf_counter() - started, 3)})
        self.recorder.keep(CHECKPOINT, training.save())
        self.recorder.event("round", **story)

    def _accuracy(self, grid: Grid, deadline: float) -> float | None:
        """Of the model as it is now on all test data, in a simulation where a site answers."""
        if not self._simulated():
            return None
        try:
            judged = self._judged(grid, deadline, {"brief": True}).get("accuracy.model")
        except SurrogateError as error:
            self.recorder.event("comparison-failed", reason=str(error))
            return None
        return judged if isinstance(judged, float) else None

    def _update(self, reply: Message, training: Training) -> Parameters | None:
        """One site's update, checked; None when it is refused, and the site is asked again in the next round."""
        node = self._node(reply)
        site = self.outcome.sites[node]
        config, number = self.config, training.round + 1
        try:
            payload, info = self._read(reply, site)
            if payload is None:
                raise SurrogateError("a reply without an update")
            update = unpack_parameters(payload)
            check_header(update.header, Expectation.of(config, training.classes, training.fingerprint))
            check_update(update, training.shapes(), number, bool(config.epsilon))
            check_claim(update.claim, config)
            if update.header.site != site.name:
                raise SurrogateError(f"an update in the name of {update.header.site[:64]!r}, which is another site")
        except SurrogateError as error:
            self._reject(node, str(error), number)
            return None
        site.fate, site.reason, site.simulated, site.claim = "used", "", info.get("simulated") is True, update.claim
        told = {"payload": len(payload), "seconds": seconds_told(info, "fit")}
        self.recorder.event("replied", site=site.name, round=number, **told)
        return update


def read_kept(folder: str, name: str) -> bytes:
    """A file an earlier run has left to go on from. Raises RunError."""
    file = Path(folder).expanduser() / name
    try:
        return file.read_bytes()
    except OSError as error:
        what = type(error).__name__
        raise RunError(f"resume = {folder!r}: {name} cannot be read ({what}); name the folder of an earlier run") from None
