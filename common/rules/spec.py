"""The description of a method, `MethodSpec`, which all parts of the system use, and the fields of its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from common.config.run_config import RunConfig
    from common.config.sections import Model

# one-shot: every site sends once. chain: every site extends the previous site's relay. rounds: all sites send many times.
# alone: only metrics leave a site.
Kind = Literal["one-shot", "chain", "rounds", "alone"]
# Sizes by symbol: C classes, d dimension of the features, n records of a site, and the method's own symbols.
Sizes = Mapping[str, int]
# Number of records whose gradients are held in memory at a time under privacy.
GRADIENTS = 128
# Defences of methods whose parameters have a median.
ALL_DEFENCES = ("none", "median", "trimmed", "screen")


@dataclass(frozen=True)
class Field:
    """One tensor that a site sends.

    shape: a symbol for each axis, such as "C d". low, high: the range of its numbers. bits: of each number in a message.
    prefix: for a field that stands for all tensors of a network together, as one axis, which the schema does not name one
    by one: the start of their names. None for one tensor of the field's name.
    """

    name: str
    shape: str
    low: float = float("-inf")
    high: float = float("inf")
    bits: int = 16
    prefix: str | None = None

    def sizes(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(sizes[symbol] for symbol in self.shape.split())


@dataclass(frozen=True)
class Summed:
    """One tensor whose sum over all sites is all that a coordinator needs of it.

    shape: as in `Field`. degree: a record adds at most the largest feature to this power to an entry; 0 for counts.
    """

    name: str
    shape: str
    degree: int


@dataclass(frozen=True)
class Work:
    """The work and memory that a run's settings require of one site in a round.

    steps: training steps. passes: passes over the training records. synthetic: synthetic records. numbers: numbers in
    model, gradients and statistics. width, components, rank: size of the model.
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
    """Import the target "module:name" of a `MethodSpec`. Imported on first use, so that unused methods cost nothing."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def count(fields: Iterable[Field], sizes: Sizes) -> int:
    """Total number of entries in the fields."""
    return sum(prod(field.sizes(sizes)) for field in fields)


def byte_count(fields: Iterable[Field], sizes: Sizes) -> int:
    """Total bytes of the numbers in the fields."""
    return sum((prod(field.sizes(sizes)) * field.bits + 7) // 8 for field in fields)


Fields = Callable[["RunConfig"], tuple[Field, ...]]


@dataclass(frozen=True)
class MethodSpec:
    """A method in the registry. Callables take the run's settings.

    trained: section of the settings for the model and its training. configured: section that the first event of a run
    shows. digest: by section, the settings that determine a site's messages. reads: further sections that the method uses.
    site, evaluate: "module:function" at the site, which makes the message, and evaluates the final model. strategy:
    "module:class" at the coordinator. personal: "module:function" at the site, which makes the classifier of its own that is
    evaluated; empty where all sites have the received model. network: the network of fedavg.model = "auto".
    sends, receives, result: a site's message in a round, the payload of the request, and the payload at the end.
    first_round: a site's message in the first round, if different. parsed: the tensors of a parsed message, if they differ
    from what is sent. symbols: sizes of the symbols in these besides C, d and n; takes (settings, C, d, n); a symbol that
    is not here may have any size. introduces: whether sites first report backbone and classes.
    work: takes (settings, C, d). variant: text after the name in tables.
    mechanisms: mechanisms of differential privacy, empty if there are none. mechanism: the one that the settings select.
    needs_budget: whether the method runs only under privacy. refusal: why the method does not support the settings, or "".
    defences: defences against hostile sites, without "auto". undefended: why there are none.
    allows: settings of section fedpft for chains only. stored: whether replies are stored, so that a model can be learned
    again without the sites. makes_surrogates: whether messages represent data, and are not models trained on labels.
    unit_features: whether records are normalised to norm one also without privacy. adversarial: whether the site trains
    the shared generator against a critic. proximal: whether its loss has FedProx's term, fedavg.mu.
    head: how the coordinator finds the head, in words; empty if the method has no choice.
    tested: what each site evaluates on its own test records, in words.
    member_bytes: what a site sends and receives for each site of a secure sum, apart from its vector; 0 for other methods.
    summed: the tensors of which the coordinator needs only the sum over all sites; empty where the combination is no sum.
    first_summed: those of the first round, if different. sum_strategy: "module:class" at the coordinator in secure sums, if
    none of the general ones serves.
    site_sums, from_sums: "module:function" at the site, which makes them and their claim, and at the coordinator, which
    learns from the sum; for training in rounds, which finishes a round with it; for counts, which makes the result.
    all_classes: whether a site's message has every class that the run names, with or without records. signs: whether the
    coordinator signs the final model for the sites. keeps_result: whether sites keep the result in any run, such as a
    generator. samples: whether it can draw features from what it learned. counts: whether sites count records and nothing is
    learned.
    packages: optional packages that a site needs for the settings. judging_packages: those it needs to evaluate the result.
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
    personal: str = ""
    network: Model = "linear"
    mechanisms: tuple[str, ...] = ()
    mechanism: Callable[[RunConfig], str] = lambda config: "dp-sgd"
    needs_budget: bool = False
    refusal: Callable[[RunConfig], str] = lambda config: ""
    variant: Callable[[RunConfig], str] = lambda config: ""
    head: Callable[[RunConfig], str] = lambda config: ""
    default_defence: str = "none"
    undefended: str = ""
    reads: tuple[str, ...] = ()
    allows: frozenset[str] = frozenset()
    stored: bool = False
    makes_surrogates: bool = False
    introduces: bool = True
    first_round: Fields | None = None
    parsed: Fields | None = None
    unit_features: bool = False
    adversarial: bool = False
    proximal: bool = False
    tested: str = "the model of the run"
    member_bytes: tuple[int, int] = (0, 0)
    summed: Callable[[RunConfig], tuple[Summed, ...]] = lambda config: ()
    first_summed: Callable[[RunConfig], tuple[Summed, ...]] | None = None
    site_sums: str = ""
    from_sums: str = ""
    sum_strategy: str = ""
    all_classes: Callable[[RunConfig], bool] = lambda config: False
    signs: bool = True
    keeps_result: bool = False
    samples: bool = False
    counts: bool = False
    packages: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()
    judging_packages: tuple[str, ...] = ()

    def sizes(self, config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
        """Sizes of all symbols in `sends`."""
        return {"C": classes, "d": dimension, "n": records} | dict(self.symbols(config, classes, dimension, records))

    def sums(self, config: RunConfig, round: int) -> tuple[Summed, ...]:
        """The tensors that a secure sum adds up in a round, counted from one."""
        first = self.first_summed if round == 1 else None
        return (first or self.summed)(config)

    def schema(self, config: RunConfig, first: bool = False) -> tuple[Field, ...]:
        """The tensors of a parsed message of a site; first: in the first round."""
        if first and self.first_round is not None:
            return self.first_round(config)
        return (self.parsed or self.sends)(config)

    @property
    def sections(self) -> frozenset[str]:
        """The sections of the settings that the method uses."""
        return frozenset(("features", *self.digest, *self.reads))

    @property
    def releases_once(self) -> bool:
        """Whether a site can compute its message before it receives anything."""
        alone = self.kind == "one-shot" and not any(self.member_bytes)
        return alone or (self.kind == "chain" and "sums" in self.mechanisms)

    @property
    def answers_files(self) -> bool:
        """Whether sites without a network connection can take part, by offline exchange of files."""
        return self.kind == "one-shot" and self.stored
