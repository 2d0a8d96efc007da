"""The coordinator's state of a model that is trained in rounds: requests, expected updates, and
checkpoints.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError, largest_parameter
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier, Head, Network
from fedsurrogate.common.models.generators import fresh_generator, tensors_of
from fedsurrogate.common.models.networks import fresh, of_target, parameters_of
from fedsurrogate.common.models.parameters import CONTROL, Parameters, Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import DPCVAESettings
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.target import Answering, Target
from fedsurrogate.common.wire.model_proto import MOST_NUMBERS, pack_parameters

FORMAT = 2
# Flower's log line for every round repeats what is in the run folder.
logging.getLogger("flwr").addFilter(lambda record: not str(record.msg).startswith("%s: Received"))


@dataclass
class Training:
    """The state of a training in rounds.

    Attributes:
        config: of the run.
        classes: of the model, in order.
        fingerprint: of the backbone.
        inputs: number of features.
        model: after `round` rounds (32-bit).
        memory: of the aggregator.
        round: number of rounds that are done.
        asked: rounds with a request to the sites, including failed ones, which are also charged
            under privacy.
        lineage: an id shared by this run and the runs that resume it.
        history: facts about each round.
        confirmed: for each site, the last round that used its update.
        frame: of the columns of the features, in bytes; empty for features as they are.
    """

    config: Run
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
    frame: bytes = b""

    @classmethod
    def begin(
        cls,
        config: Run,
        classes: tuple[str, ...],
        fingerprint: str,
        inputs: int,
        frame: bytes = b"",
    ) -> Training:
        """State before the first round. The model depends only on the seed.

        Args:
            config: of the run.
            classes: of the model, in order.
            fingerprint: of the backbone.
            inputs: number of features.
            frame: of their columns; empty for features as they are.

        Raises:
            ConfigError: for features that do not fit a convnet.
            RunError: for a model that no site would read.
        """
        if start := config.plan.training.start:
            # Constants of modules that are imported without memory would have no numbers.
            load(start)
        # Sites state how many features and classes there are. Without memory first.
        with torch.device("meta"):
            size = sum(each.numel() for each in _fresh(config, len(classes), inputs).values())
        if size > MOST_NUMBERS:
            raise RunError(
                f"a model of {size} numbers for {inputs} features and {len(classes)} classes, "
                f"which the sites have stated; they read at most {MOST_NUMBERS}; set classes, "
                "or a smaller model"
            )
        model = _fresh(config, len(classes), inputs)
        return cls(config, classes, fingerprint, inputs, model, {}, frame=frame)

    def payload(self) -> bytes:
        """Payload for the sites in the next round: the model and SCAFFOLD's control variate, if
        any.
        """
        control = {name: tensor for name, tensor in self.memory.items() if name.startswith(CONTROL)}
        return pack_parameters(Parameters(self.header(), self.round + 1, {**self.model, **control}))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors in an update."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.items()}
        if any(name.startswith(CONTROL) for name in self.memory):
            shapes |= {CONTROL + name: shape for name, shape in shapes.items()}
        return shapes

    def unsendable(self) -> str:
        """Why sites would refuse the model, or the next round could not use the memory; empty if
        the model can be sent.
        """
        largest = largest_parameter(bool(self.config.settings.epsilon))
        for name, tensor in {**self.model, **self.memory}.items():
            if not tensor.isfinite().all():
                return f"{name} is not finite"
            sent = name in self.model or name.startswith(CONTROL)
            # At 16 bits a number may grow by a thousandth.
            if sent and tensor.numel() and 1.001 * float(tensor.abs().max()) >= largest:
                return f"{name} has a number beyond {largest:g}"
        return ""

    def finish_round(self, used: Iterable[str]) -> None:
        """Count the round as done, and note the sites whose replies were used."""
        self.round += 1
        self.confirmed |= dict.fromkeys(used, self.round)

    def classifier(self) -> Classifier:
        """The model as a classifier."""
        settings = self.config.trained
        assert not isinstance(
            settings, DPCVAESettings
        )  # a generator is no classifier; a head is trained on its embeddings
        kind = settings.kind
        if kind == "linear":
            # FedLAP and private training normalise every record's features to norm one.
            clip = (
                0.0
                if self.config.settings.epsilon or self.config.plan.training.unit_features
                else None
            )
            if self.config.objective is not None:
                assert self.config.target is not None
                made = self.config.objective.answering(self.model)
                return target_head(made, self.header(), self.config.target, clip)
            return Head(self.header(), self.model["weight"], self.model["bias"], clip)
        return Network(self.header(), kind, self.inputs, self.model)

    def header(self) -> Header:
        """The header of the model."""
        return Header(
            self.config.settings.method,
            self.config.digest,
            "coordinator",
            self.fingerprint,
            self.classes,
            self.frame,
        )

    def save(self) -> bytes:
        """A checkpoint: tensors in safetensors format, the other state as JSON in its metadata."""
        from safetensors.torch import save

        tensors = {"model." + name: tensor.contiguous() for name, tensor in self.model.items()}
        tensors |= {"memory." + name: tensor.contiguous() for name, tensor in self.memory.items()}
        state = {"format": FORMAT, "run": self.config.digest} | {
            name: getattr(self, name) for name in _Facts.OF_TRAINING
        }
        if self.frame:
            state["frame"] = base64.b64encode(self.frame).decode()
        content: bytes = save(tensors, {"state": json.dumps(state)})
        return content

    @classmethod
    def load(cls, config: Run, content: bytes, name: str) -> Training:
        """Load a checkpoint of `save`.

        Args:
            config: of the run that continues.
            content: of the checkpoint.
            name: of the file, for error messages.

        Raises:
            RunError: for another kind of file, or a run with other settings.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            length = int.from_bytes(content[:8], "little")
            facts = _Facts.model_validate_json(
                json.loads(content[8 : 8 + length])["__metadata__"]["state"]
            )
            distinct_names(facts.classes, "class")
            frame = base64.b64decode(facts.frame, validate=True)
            if frame:
                Frame.of(frame).check(facts.inputs)
            parts: dict[str, dict[str, Tensor]] = {"model": {}, "memory": {}}
            for key, tensor in load(content).items():
                kind, _, rest = key.partition(".")
                parts[kind][rest] = tensor.to(torch.float32)
        # RuntimeError: torch cannot represent a side of zero next to a huge one; RecursionError.
        except (
            ValueError,
            TypeError,
            LookupError,
            RuntimeError,
            SafetensorError,
            SurrogateError,
        ) as error:
            raise RunError(f"{name} is not a valid checkpoint ({type(error).__name__})") from None
        if facts.format != FORMAT or facts.run != config.digest:
            raise RunError(
                f"{name} is of a run with other settings, or of another version "
                f"({facts.run[:64]}), not {config.digest}"
            )
        own = {name: getattr(facts, name) for name in _Facts.OF_TRAINING}
        return cls(config=config, frame=frame, **own, model=parts["model"], memory=parts["memory"])


def target_head(made: Answering, header: Header, target: Target, clip: float | None = None) -> Head:
    """The model of another target than classes.

    Args:
        made: what it answers.
        header: of the coordinator.
        target: of the run.
        clip: of features, as in `Head`.
    """
    public = json.dumps({**target.public, **made.public}, sort_keys=True)
    named = replace(header, classes=made.outputs)
    return Head(named, made.weight.float(), made.bias.float(), clip, target=public)


def _fresh(config: Run, classes: int, inputs: int) -> Tensors:
    """The model before the first round."""
    if start := config.plan.training.start:
        made: Tensors = load(start)(config).start(inputs)
        return made
    settings = config.trained
    if isinstance(settings, DPCVAESettings):
        return tensors_of(
            fresh_generator(config.settings, config.method.adversarial, classes, inputs)
        )
    if config.objective is not None:
        return parameters_of(of_target(config.objective, inputs))
    seed = config.settings.seed
    return parameters_of(fresh(settings.kind, inputs, classes, settings.width, seed))


class _Facts(BaseModel):
    """What a checkpoint states next to its tensors."""

    model_config = ConfigDict(strict=True)
    # Attributes of a training of the same names, in the order of the file.
    OF_TRAINING: ClassVar = (
        *("classes", "fingerprint", "inputs", "round", "asked", "lineage", "history", "confirmed"),
    )

    format: int
    run: str
    classes: tuple[str, ...]
    fingerprint: str
    inputs: int
    round: int
    asked: int
    lineage: str
    history: list[dict[str, Any]]
    confirmed: dict[str, int]
    frame: str = ""


def read_kept(folder: str, name: str) -> bytes:
    """A stored file of an earlier run, to resume from.

    Args:
        folder: of the run.
        name: of the file.

    Raises:
        RunError: when it cannot be read.
    """
    file = Path(folder).expanduser() / name
    try:
        return file.read_bytes()
    except OSError as error:
        what = type(error).__name__
        raise RunError(
            f"resume = {folder!r}: {name} cannot be read ({what}); name the folder of an earlier "
            "run"
        ) from None
