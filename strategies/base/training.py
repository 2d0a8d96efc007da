"""A model that is trained in rounds, at the coordinator: what goes out, what comes in, and what a checkpoint holds."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config.run_config import RunConfig, run_digest
from common.config.sections import DPCVAEConfig
from common.errors import RunError
from common.models.classifiers import Classifier, Head, Network
from common.models.generators import fresh_generator, tensors_of
from common.models.networks import fresh, parameters_of
from common.models.parameters import CONTROL, Parameters, Tensors
from common.surrogates.surrogates import Header
from common.wire.model_proto import pack_parameters

FORMAT = 2
# What Flower's strategies say of every round is in the run folder anyway.
logging.getLogger("flwr").addFilter(lambda record: not str(record.msg).startswith("%s: Received"))


@dataclass
class Training:
    """The model after `round` rounds (32-bit), what its aggregator remembers, and the story so far.

    asked: rounds that sites were asked for, those that failed included: under privacy they are paid for as well. lineage:
    what this run and those that resume it have in common. confirmed: the last round in which each site's update was used.
    """

    config: RunConfig
    classes: tuple[str, ...]
    fingerprint: str
    inputs: int
    model: Tensors
    memory: Mapping[str, Tensor]
    round: int = 0
    asked: int = 0
    lineage: str = field(default_factory=lambda: secrets.token_hex(8))
    history: list[dict[str, Any]] = field(default_factory=list)
    confirmed: dict[str, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, config: RunConfig, classes: tuple[str, ...], fingerprint: str, inputs: int) -> Training:
        """Before the first round. The model depends on the seed alone. Raises ConfigError for features no convnet takes."""
        settings = config.trained
        if isinstance(settings, DPCVAEConfig):
            model = tensors_of(fresh_generator(config, len(classes), inputs))
        else:
            model = parameters_of(fresh(settings.model, inputs, len(classes), settings.width, config.seed))
        return cls(config, classes, fingerprint, inputs, model, {})

    def question(self) -> bytes:
        """What the sites are sent for the next round: the model, and beside it SCAFFOLD's control variate."""
        control = {name: tensor for name, tensor in self.memory.items() if name.startswith(CONTROL)}
        return pack_parameters(Parameters(self.header(), self.round + 1, {**self.model, **control}))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What an update must look like."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.items()}
        if any(name.startswith(CONTROL) for name in self.memory):
            shapes |= {CONTROL + name: shape for name, shape in shapes.items()}
        return shapes

    def finish_round(self, used: Iterable[str]) -> None:
        """A round is over, in which these sites' replies were used."""
        self.round += 1
        self.confirmed |= dict.fromkeys(used, self.round)

    def classifier(self) -> Classifier:
        """The model as it is used."""
        settings = self.config.trained
        assert not isinstance(settings, DPCVAEConfig)  # a generator is no classifier; a head is trained on what it makes
        kind = settings.model
        if kind == "linear":
            # FedLAP and private training bring every record's features to norm one.
            clip = 0.0 if self.config.epsilon or self.config.spec.unit_features else None
            return Head(self.header(), self.model["weight"], self.model["bias"], clip)
        return Network(self.header(), kind, self.inputs, self.model)

    def header(self) -> Header:
        """Whose model it is."""
        return Header(self.config.method, run_digest(self.config), "coordinator", self.fingerprint, self.classes)

    def save(self) -> bytes:
        """A checkpoint: safetensors, the rest as JSON in its metadata."""
        from safetensors.torch import save

        tensors = {"model." + name: tensor.contiguous() for name, tensor in self.model.items()}
        tensors |= {"memory." + name: tensor.contiguous() for name, tensor in self.memory.items()}
        state = {
            "format": FORMAT,
            "run": run_digest(self.config),
            "classes": self.classes,
            "fingerprint": self.fingerprint,
            "inputs": self.inputs,
            "round": self.round,
            "asked": self.asked,
            "lineage": self.lineage,
            "history": self.history,
            "confirmed": self.confirmed,
        }
        content: bytes = save(tensors, {"state": json.dumps(state)})
        return content

    @classmethod
    def load(cls, config: RunConfig, content: bytes, name: str) -> Training:
        """Undo `save`. Raises RunError for a file that is none, or of a run with other settings."""
        from safetensors.torch import load

        try:
            length = int.from_bytes(content[:8], "little")
            state: dict[str, Any] = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["state"])
            tensors = load(content)
        except Exception as error:
            raise RunError(f"{name} is no checkpoint ({type(error).__name__})") from None
        if (state.get("format"), state.get("run")) != (FORMAT, run_digest(config)):
            raise RunError(f"{name} is of a run with other settings ({state.get('run')}); this one is {run_digest(config)}")
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "memory": {}}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            parts[kind][rest] = tensor.to(torch.float32)
        place = (tuple(state["classes"]), state["fingerprint"], state["inputs"])
        story = (state["round"], state["asked"], state["lineage"], state["history"], state["confirmed"])
        return cls(config, *place, parts["model"], parts["memory"], *story)


def read_kept(folder: str, name: str) -> bytes:
    """A file an earlier run has left to go on from. Raises RunError."""
    file = Path(folder).expanduser() / name
    try:
        return file.read_bytes()
    except OSError as error:
        what = type(error).__name__
        raise RunError(f"resume = {folder!r}: {name} cannot be read ({what}); name the folder of an earlier run") from None
