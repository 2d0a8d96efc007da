"""What every part of the system needs to know of a method: one frozen description, and how bytes follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from common.errors import SurrogateError

if TYPE_CHECKING:
    from torch import Tensor

    from common.config.run_config import RunConfig

# one-shot: every site sends once. chain: every site adds to what the one before sent. rounds: all sites, many times.
# alone: nothing but numbers leaves a site.
Kind = Literal["one-shot", "chain", "rounds", "alone"]
# By symbol: C classes, d dimension of the features, n records of a site, and what a method adds.
Sizes = Mapping[str, int]
BYTES_OF_A_NUMBER = 2
# Gradients of so many records are held at a time under privacy.
GRADIENTS = 128


@dataclass(frozen=True)
class Field:
    """One tensor that a site sends.

    shape: a symbol for each axis, such as "C d". low, high: the range of its numbers.
    """

    name: str
    shape: str
    low: float = float("-inf")
    high: float = float("inf")

    def sizes(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(sizes[symbol] for symbol in self.shape.split())


@dataclass(frozen=True)
class Work:
    """What a run makes one site do in a round, and hold, as far as settings decide it.

    steps: of training. passes: over the training records. synthetic: records that are not real. numbers: of model,
    gradients and statistics. width, components, rank: of the model.
    """

    steps: int = 0
    passes: int = 0
    rounds: int = 1
    synthetic: int = 0
    numbers: int = 0
    width: int = 0
    components: int = 0
    rank: int = 0


def load(target: str) -> Any:
    """What a target of a `MethodSpec`, "module:name", stands for. Imported late, so that unused methods cost nothing."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def count(fields: Iterable[Field], sizes: Sizes) -> int:
    """How many numbers fields hold."""
    return sum(prod(field.sizes(sizes)) for field in fields)


def check_fields(fields: Iterable[Field], tensors: Mapping[str, Tensor], sizes: Sizes) -> Sizes:
    """Raise SurrogateError unless these are the tensors that a site sends: names, shapes, finite numbers, ranges.

    sizes: of the symbols that are known; those of others follow from the first tensor that has them, and are returned too.
    """
    wanted, known = {field.name: field for field in fields}, dict(sizes)
    if tensors.keys() != wanted.keys():
        raise SurrogateError(f"tensors {', '.join(sorted(tensors))[:200]}; expected {', '.join(wanted)}")
    for name, field in wanted.items():
        tensor, symbols = tensors[name], field.shape.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(symbols) or any(known.setdefault(s, n) != n for s, n in zip(symbols, shape, strict=True)):
            raise SurrogateError(f"{name} of shape {shape[:4]}; expected ({', '.join(symbols)}) with {known}")
        if tensor.numel() and not (tensor.isfinite().all() and field.low <= tensor.min() and tensor.max() <= field.high):
            raise SurrogateError(f"{name} holds a number that is not finite, or outside {field.low:g} to {field.high:g}")
    return known


Fields = Callable[["RunConfig"], tuple[Field, ...]]


@dataclass(frozen=True)
class MethodSpec:
    """A method as the registry knows it. Callables take the run's settings.

    trained: section of the settings that describes the model and its training. configured: section that the first event of
    a run shows. digest: by section, the settings that decide what a site sends.
    site, evaluate: "module:function" of the site, which makes what is sent, and judges what comes at the end. strategy:
    "module:class" of the coordinator.
    sends, receives, result: what a site sends in a round, what comes with the request, and what comes at the end. opening:
    what it sends in the first round instead. symbols: sizes of the symbols in these beyond C, d and n; takes (settings, C,
    d, n). introduces: whether sites are first asked for backbone and classes.
    work: takes (settings, C, d). variant: what tables show after the name.
    mechanisms: of differential privacy, empty where there are none. mechanism: the one that settings lead to. needs_budget:
    whether the method runs under privacy only. refusal: why settings do not fit the method, empty where they do.
    defences: against hostile sites, without "auto". undefended: why there are none.
    allows: settings of section fedpft that only chains know. stored: whether what sites send is kept, so that a model can be
    learned again without asking them. makes_surrogates: whether what is sent stands for data, and is no model trained on
    labels. unit_features: whether every record is brought to norm one without privacy too.
    """

    name: str
    title: str
    paper: str
    kind: Kind
    trained: str
    configured: str
    digest: Mapping[str, tuple[str, ...]]
    site: str
    strategy: str
    sends: Fields
    receives: Fields
    result: Fields
    symbols: Callable[[RunConfig, int, int, int], Sizes]
    work: Callable[[RunConfig, int, int], Work]
    defences: Callable[[RunConfig], tuple[str, ...]]
    evaluate: str = "client_app.methods.evaluation:received_model"
    mechanisms: tuple[str, ...] = ()
    mechanism: Callable[[RunConfig], str] = lambda config: "dp-sgd"
    needs_budget: bool = False
    refusal: Callable[[RunConfig], str] = lambda config: ""
    variant: Callable[[RunConfig], str] = lambda config: ""
    default_defence: str = "none"
    undefended: str = ""
    allows: frozenset[str] = frozenset()
    stored: bool = False
    makes_surrogates: bool = False
    introduces: bool = True
    opening: Fields | None = None
    unit_features: bool = False

    def sizes(self, config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
        """What the symbols of `sends` stand for."""
        return {"C": classes, "d": dimension, "n": records} | dict(self.symbols(config, classes, dimension, records))

    @property
    def releases_once(self) -> bool:
        """Whether a site can say what it would send before it was sent anything."""
        return self.kind == "one-shot" or (self.kind == "chain" and "sums" in self.mechanisms)

    @property
    def answers_files(self) -> bool:
        """Whether sites without a network connection can take part, with files that people carry."""
        return self.kind == "one-shot" and self.stored
