"""What a method is (`Method`), and what it does under the settings of a run (`Plan`), with the
parts of both; the check of a parsed message against its fields; and any method whose combination is a sum
over sites, as one whose coordinator sees only the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SurrogateError
from ..privacy.mechanism import DISTRIBUTED_SUMS, MechanismRecipe
from ..privacy.shares import ALL, KEPT, KEPT_OF_FEW, OwnParts, stated
from ..settings import FedAvgSettings, Settings
from ..settings.heads import FEWEST_MEAN, FEWEST_OWN
from ..targets.target import Target
from ..terms import NOT_SIGNED, Term

if TYPE_CHECKING:
    from torch import Tensor

# one-shot: every site sends once. chain: every site extends the previous site's chain message. rounds: all
# sites send many times. alone: only metrics leave a site.
Kind = Literal["one-shot", "chain", "rounds", "alone"]
# Sizes by symbol: C classes, d dimension of the features, n records of a site, and the method's own
# symbols.
Sizes = Mapping[str, int]
# Number of records whose gradients are held in memory at a time under privacy.
GRADIENTS = 128
# `Combination.site` of a method whose `site_sums` make what is sent.
MESSAGE = "fedsurrogate.client_app.methods.sums:message"


@dataclass(frozen=True)
class Field:
    """One tensor that a site sends.

    Attributes:
        name: of the tensor.
        shape: a symbol for each axis, such as "C d".
        low: the least value of its numbers.
        high: the largest value of its numbers.
        bits: of each number in a message.
        prefix: for a field that stands for all tensors of a network together, as one axis, which
            the schema does not name one by one: the start of their names. None for one tensor of
            the field's name.
        optional: whether a parsed message may lack it: of a covariance whose form depends on the
            dimension.
        degree: of a sum of features as in `Term`, -1 for what multiplies features, 0 for what does
            not move with them; None for a point among them if its last axis is "d".
        count: of a sum as in `Term`; of degree 0, for what is added to the product of features and
            this tensor.
    """

    name: str
    shape: str
    low: float = float("-inf")
    high: float = float("inf")
    bits: int = 16
    prefix: str | None = None
    optional: bool = False
    degree: int | None = field(default=None, metadata=NOT_SIGNED)
    count: str = field(default="", metadata=NOT_SIGNED)

    def sizes(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(sizes[symbol] for symbol in self.shape.split())


def fields_of(terms: Iterable[Term], most: float = math.inf, bits: int = 16) -> tuple[Field, ...]:
    """The tensors of a message that holds these sums.

    Args:
        terms: the sums.
        most: largest magnitude of a number in those that features are no factor of.
        bits: of each number.
    """
    limits = ((each, math.inf if each.degree else most) for each in terms)
    return tuple(
        Field(t.name, t.shape, -limit, limit, bits, degree=t.degree, count=t.count)
        for t, limit in limits
    )


@dataclass(frozen=True)
class Work:
    """The work and memory that a run's settings require of one site in a round.

    Attributes:
        steps: training steps.
        passes: passes over the training records.
        rounds: rounds of the run.
        synthetic: synthetic records.
        numbers: numbers in model, gradients and statistics.
        width: units of the widest layer.
        components: Gaussians of a class.
        rank: columns of a thin factor.
    """

    steps: int = 0
    passes: int = 0
    rounds: int = 1
    synthetic: int = 0
    numbers: int = 0
    width: int = 0
    components: int = 0
    rank: int = 0


def no_more_symbols(classes: int, dimension: int, records: int) -> Sizes:
    """The symbols of a message whose shapes need C, d and n only."""
    return {}


@dataclass(frozen=True)
class Messages:
    """What travels between a site and the coordinator.

    Attributes:
        sends: a site's message in a round.
        receives: the payload of the request.
        result: the payload at the end.
        parsed: the tensors of a parsed message, if they differ from what is sent.
        first: a site's message in the first round, if different.
        symbols: sizes of the symbols in these besides C, d and n, from C, d and n; a symbol that is
            not here may have any size.
        all_classes: whether a site's message has every class that the run names, with or without
            records.
        identifies: whether sites first report backbone and classes.
        signs: whether the coordinator signs the final model for the sites.
        member_bytes: what a site sends and receives for each site of secure aggregation, apart from its
            vector; 0 for other runs.
    """

    sends: tuple[Field, ...] = ()
    receives: tuple[Field, ...] = ()
    result: tuple[Field, ...] = ()
    parsed: tuple[Field, ...] | None = None
    first: tuple[Field, ...] | None = None
    symbols: Callable[[int, int, int], Sizes] = no_more_symbols
    all_classes: bool = False
    identifies: bool = True
    signs: bool = True
    member_bytes: tuple[int, int] = (0, 0)

    def sizes(self, classes: int, dimension: int, records: int) -> Sizes:
        """Sizes of all symbols in `sends`."""
        return {"C": classes, "d": dimension, "n": records} | dict(
            self.symbols(classes, dimension, records)
        )

    def leaving(
        self, classes: int, dimension: int, records: int, first: bool = False
    ) -> tuple[Field, ...]:
        """The tensors in `sends` that have numbers at these sizes; first: in the first round."""
        sizes = self.sizes(classes, dimension, records)
        sends = self.first if first and self.first is not None else self.sends
        return tuple(field for field in sends if count([field], sizes))

    def schema(self, first: bool = False) -> tuple[Field, ...]:
        """The tensors of a parsed message of a site; first: in the first round."""
        if first and self.first is not None:
            return self.first
        return self.sends if self.parsed is None else self.parsed


@dataclass(frozen=True)
class Combination:
    """Who makes a site's message, and what the coordinator does with all of them.

    Attributes:
        site: "module:function" at the site, which makes the message.
        strategy: "module:class" at the coordinator.
        evaluate: "module:function" at the site, which evaluates the final model.
        personal: "module:function" at the site, which makes the classifier of its own that is
            evaluated; empty where all sites have the received model.
        learn: "module:function" at the coordinator, which learns from what all sites sent: class
            sums or heads; empty where the strategy itself learns.
        tested: what each site evaluates on its own test records, in words.
        stored: whether replies are stored, so that a model can be learned again without the sites.
        samples: whether the coordinator can draw features from what it learned.
        makes_surrogates: whether messages represent data, and are not models trained on labels.
        keeps_result: whether sites keep the result in any run, such as a generator.
        sums: the tensors of which the coordinator needs only the sum over all sites; empty where
            the combination is no sum.
        first_sums: those of the first round, if different.
        site_sums: "module:function" at the site, which makes the sums, however they travel.
        from_sums: "module:function" at the coordinator, which learns from the sum; for training in
            rounds, which finishes a round with it; for counts, which makes the result. Empty for a
            method that never is a sum.
        sum_strategy: "module:class" at the coordinator in secure aggregation, if none of the general ones
            serves.
    """

    site: str
    strategy: str
    evaluate: str = "fedsurrogate.client_app.methods.evaluation:received_model"
    personal: str = ""
    learn: str = ""
    tested: str = "the model of the run"
    stored: bool = False
    samples: bool = False
    makes_surrogates: bool = False
    keeps_result: bool = False
    sums: tuple[Term, ...] = ()
    first_sums: tuple[Term, ...] | None = None
    site_sums: str = ""
    from_sums: str = ""
    sum_strategy: str = ""

    def sums_in(self, round: int) -> tuple[Term, ...]:
        """The tensors that secure aggregation adds up in a round, counted from one."""
        return self.sums if round > 1 or self.first_sums is None else self.first_sums


# With more sites harm is not measured: each has too little weight. Of 1,000, the worst lie that was found
# costs 0.75 points without a defence (CIFAR-10, 64 columns), and harm counts from three on.
# With fewer, nothing tells which one is wrong.
FEWEST_JUDGED, MOST_JUDGED = 3, 1000


def measures_harm(rule: str, sites: int) -> bool:
    """Whether the defence `rule` measures what each of so many sites costs the others."""
    return rule == "harm" and FEWEST_JUDGED <= sites <= MOST_JUDGED


@dataclass(frozen=True)
class Defences:
    """Defences against hostile sites.

    Attributes:
        available: the values of `defence` that are defined, without "auto".
        reason: why the others are not defined, as the end of a sentence.
        fewest: number of sites from which a defence can tell who is wrong.
        gap: what one hostile site can do whatever the defence, as a sentence; empty for nothing that
            is worth a warning before the start.
    """

    available: tuple[str, ...] = ("none",)
    reason: str = ""
    fewest: int = 0
    gap: str = ""

    def chosen(self, given: str) -> str:
        """The defence of a run. "auto" becomes "harm" if it is available, otherwise "none"."""
        if given != "auto":
            return given
        return "harm" if "harm" in self.available else "none"

    def gaps(self, chosen: str, sites: int) -> list[str]:
        """Warnings before a run: what its defence does not limit, a sentence each.

        Args:
            chosen: the defence of the run.
            sites: their number; 0 if it is not known.

        Example:
            >>> Defences(("none", "harm"), fewest=4, gap="a chain").gaps("harm", 10)
            ['a chain']
        """
        many = f"{sites:,} sites: each has too little weight to harm; of more than {MOST_JUDGED:,} none is judged"
        few = {
            2: "2 sites: nothing tells which one is wrong, and no weight is capped; each of them can "
            "decide the model",
            3: "3 sites: one hostile site cannot be distinguished from an outlier; what it changes is "
            "bounded, and it can still spoil the model; four or more sites are safer",
        }
        warn = sites < self.fewest and sites in few
        unjudged = chosen == "harm" and sites > MOST_JUDGED
        found = few[sites] if warn else many if unjudged else ""
        return [each for each in (found, self.gap) if each]


# Of methods whose sites send statistics of their records by class.
BY_HARM = Defences(("none", "harm"), fewest=4)
# Of updates and heads the coordinator knows only that honest ones resemble each other. Those of hospitals
# that differ do not, so nothing is left out unless a person asks for "screen".
UPDATE_DEFENCES = Defences(
    ("none", "median", "trimmed", "screen"),
    fewest=4,
    gap="updates and heads are bounded in length and weight, not in direction: one hostile site of four "
    "can cost more than half of the accuracy; defence = 'screen' leaves out those that are far from or "
    "opposed to the others, which honest sites of another kind may be, too",
)
# Probabilities and votes have no median, and that of sparse updates would be zero almost
# everywhere.
VOTE_DEFENCES = replace(UPDATE_DEFENCES, available=("none", "screen"))


@dataclass(frozen=True)
class ModelTraining:
    """How a site trains the model of a run in rounds.

    Attributes:
        section: of the settings, for the model and its training.
        unit_features: whether records are normalised to norm one also without privacy.
        proximal: whether its loss has FedProx's term, fedavg.mu.
        single_step: whether a site takes one step in a round, as in FedSGD.
        sparse: whether a site sends only the largest changes, the share fedavg.keep of them.
        adaptive: whether the coordinator steps with FedYogi's moments, by
            fedavg.server-learning-rate.
        frames: whether sites train in a common frame of the columns of their features, where these
            need one (common/surrogates/mixtures.py).
        rounds: their number, where the section does not say it; 0 where it does.
        start: "module:class" that is made of a run, and whose `start` makes the first model for a
            number of features; empty for a network of the section.
    """

    section: Literal["fedavg", "fedlap", "dpcvae"] = "fedavg"
    unit_features: bool = False
    proximal: bool = False
    single_step: bool = False
    sparse: bool = False
    adaptive: bool = False
    frames: bool = True
    rounds: int = 0
    start: str = ""

    @property
    def generates(self) -> bool:
        """Whether the model is a generator."""
        return self.section == "dpcvae"


@dataclass(frozen=True)
class Plan:
    """What a method does in one run: values that follow from the settings of the run alone.

    Attributes:
        kind: who sends when.
        messages: what travels.
        combination: who makes messages, and who learns from them.
        work: the work of a site, from the numbers of classes and dimensions.
        privacy: the mechanism of differential privacy; None without a budget.
        defences: against hostile sites.
        training: how the model is trained, for methods in rounds.
        refusal: why the method does not support the settings; empty if it does.
        allows: settings of section fedpft that are for chains only.
        variant: text after the name in tables.
        head: how the coordinator finds the head, in words; empty if the method has no choice.
        counts: whether sites count records and nothing is learned.
        sent_by_solver: whether the head's solver decides what sites send.
        mean_over_columns: whether sites give the mean over a feature's own columns, and its length, a small
            weight before they clip it, where it has enough columns.
        ranges: whether sites may move and scale features from public ranges first.
        judging_packages: optional packages that a site needs to evaluate the result.
    """

    kind: Kind
    messages: Messages
    combination: Combination
    work: Callable[[int, int], Work]
    privacy: MechanismRecipe | None = None
    defences: Defences = Defences()
    training: ModelTraining = ModelTraining()
    refusal: str = ""
    allows: frozenset[str] = frozenset()
    variant: str = ""
    head: str = ""
    counts: bool = False
    sent_by_solver: bool = False
    mean_over_columns: bool = False
    ranges: bool = False
    judging_packages: tuple[str, ...] = ()

    def mean_over_columns_weight(self, dimension: int) -> OwnParts:
        """What features keep of the mean over their own columns and of their length before sites clip
        them. Of very few columns they keep all.

        Args:
            dimension: of the features.
        """
        if not self.mean_over_columns or dimension < FEWEST_MEAN:
            return ALL
        return KEPT if dimension >= FEWEST_OWN else KEPT_OF_FEW

    def subtracted(self, dimension: int, centre: str = "") -> str:
        """What a claim states was subtracted from features before their clip.

        Args:
            dimension: of the features.
            centre: digest of the public mean, or empty.
        """
        return stated(self.mean_over_columns_weight(dimension), centre)

    @property
    def mechanism_name(self) -> str:
        """The privacy mechanism at the sites, or "none"."""
        return "none" if self.privacy is None else self.privacy.name

    @property
    def releases_once(self) -> bool:
        """Whether a site can compute its message before it receives anything."""
        alone = self.kind == "one-shot" and not any(self.messages.member_bytes)
        return alone or (self.kind == "chain" and self.combination.makes_surrogates)

    @property
    def answers_files(self) -> bool:
        """Whether sites without a network connection can take part, by offline exchange of files."""
        return self.kind == "one-shot" and self.combination.stored


def unchanged(settings: Settings) -> Settings:
    """Settings of a method without "auto" values that depend on the method."""
    return settings


@dataclass(frozen=True)
class Method:
    """A method in the registry: what never changes, and how its plan follows from the settings of a
    run.

    Attributes:
        name: in the settings.
        title: in documents.
        paper: its source.
        plan: the plan of a run; it never fails, see `Plan.refusal`.
        reads: sections of the settings that sites use, besides `features`.
        learns: those that the coordinator alone uses, to learn from what it has.
        shown: section that the first event of a run shows; empty for none.
        needs_budget: whether the method runs only under privacy.
        fill: replaces "auto" values that depend on the method.
        adversarial: whether sites train the shared generator against a critic.
        coded: the plan for another target than classes, where it is learned from coded sums.
        trains: the same where sites train its model in rounds: from the plan for classes and the
            settings of the training. A method that has neither learns classes only.
    """

    name: str
    title: str
    paper: str
    plan: Callable[[Settings], Plan]
    reads: tuple[str, ...] = ()
    learns: tuple[str, ...] = ()
    shown: str = ""
    needs_budget: bool = False
    fill: Callable[[Settings], Settings] = unchanged
    adversarial: bool = False
    coded: Callable[[Settings, Target], Plan] | None = None
    trains: Callable[[Plan, FedAvgSettings, Target], Plan] | None = None

    @property
    def sections(self) -> frozenset[str]:
        """The sections of the settings that the method uses."""
        return frozenset(("features", *self.reads, *self.learns))

    @cached_property
    def usual(self) -> Plan:
        """The plan under the default settings, without a budget."""
        return self.plan(self.fill(Settings(method=self.name)))

    @cached_property
    def private(self) -> bool:
        """Whether the method has a mechanism of differential privacy."""
        settings = Settings(method=self.name, epsilon=1.0, delta=1e-5)
        return self.plan(self.fill(settings)).privacy is not None

    @property
    def summable(self) -> bool:
        """Whether its combination can be securely aggregated, under some settings."""
        return bool(self.usual.combination.from_sums)


def load(target: str) -> Any:
    """Import the target "module:name" of a plan. Imported on first use, so that unused methods cost
    nothing.
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def count(fields: Iterable[Field], sizes: Sizes) -> int:
    """Total number of entries in the fields."""
    return sum(prod(each.sizes(sizes)) for each in fields)


def byte_count(fields: Iterable[Field], sizes: Sizes) -> int:
    """Total bytes of the numbers in the fields."""
    return sum((prod(each.sizes(sizes)) * each.bits + 7) // 8 for each in fields)


Groups = list[tuple[Field, list["Tensor"]]]


def check_fields(fields: Iterable[Field], tensors: Mapping[str, Tensor], sizes: Sizes) -> Sizes:
    """Check that tensors match fields: names, shapes, finite numbers, ranges.

    Args:
        fields: of the schema.
        tensors: by name.
        sizes: sizes of the known symbols. Other symbols get the size in the first tensor that has
            them.

    Returns:
        The sizes of all symbols.

    Raises:
        SurrogateError: if they do not.
    """
    groups = _grouped(tuple(fields), tensors)
    known = _sizes_in(groups, sizes)
    for spec, each in groups:
        for tensor in each:
            if not tensor.numel():
                continue
            # A NaN makes both ends NaN.
            low, high = (float(end) for end in tensor.aminmax())
            if not (isfinite(low) and isfinite(high)):
                raise SurrogateError(f"{spec.name}: a number that is not finite")
            if low < spec.low or high > spec.high:
                worst = low if low < spec.low else high
                raise SurrogateError(
                    f"{spec.name}: {worst:g} is outside {spec.low:g} to {spec.high:g}"
                )
    return known


def _grouped(fields: tuple[Field, ...], tensors: Mapping[str, Tensor]) -> Groups:
    """The tensors of each field. Raises SurrogateError for a tensor without a field, or a field
    without a tensor.
    """
    own: dict[str, list[Tensor]] = {field.name: [] for field in fields}
    named = {field.name for field in fields if field.prefix is None}
    prefixes = {field.prefix: field.name for field in fields if field.prefix is not None}
    for name, tensor in tensors.items():
        start = max(
            (prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None
        )
        if name not in named and start is None:
            break
        own[name if name in named or start is None else prefixes[start]].append(tensor)
    else:
        if all(own[field.name] or field.optional for field in fields):
            return [(field, own[field.name]) for field in fields if own[field.name]]
    raise SurrogateError(f"tensors {', '.join(sorted(tensors))[:200]}; expected {', '.join(own)}")


def _sizes_in(groups: Groups, sizes: Sizes) -> dict[str, int]:
    """The size of every symbol. Raises SurrogateError for a tensor of another shape."""
    known = dict(sizes)
    for spec, tensors in groups:
        symbols, shape = spec.shape.split(), tuple(tensors[0].shape)
        if spec.prefix is not None:
            shape = (sum(tensor.numel() for tensor in tensors),)
        if len(shape) != len(symbols) or any(
            known.setdefault(s, n) != n for s, n in zip(symbols, shape, strict=True)
        ):
            raise SurrogateError(
                f"{spec.name} of shape {shape[:4]}; expected ({', '.join(symbols)}) with {known}"
            )
    return known


def check_schema(
    messages: Messages,
    tables: Mapping[str, Tensor],
    classes: int,
    dimension: int = 0,
    first: bool = False,
) -> None:
    """Raise SurrogateError unless the tensors of a parsed message match the schema of its method.

    Args:
        messages: of the run's plan.
        tables: the tensors by name.
        classes: number of classes of the message.
        dimension: of the features; 0 if the message decides it.
        first: whether it is the message of the first round.

    Raises:
        SurrogateError: for other tensors.
    """
    fields = messages.schema(first)
    known = {"C": classes} | ({"d": dimension} if dimension else {})
    grouped = _sizes_in(_grouped(fields, tables), known)
    sizes = dict(messages.sizes(classes, grouped.get("d", 1), 1))
    # Only the site knows its number of records.
    del sizes["n"]
    check_fields(fields, tables, sizes)


# Strategies: one sum from which a model is learned, and one in each round of training.
ONCE, ROUNDS = (
    "fedsurrogate.strategies.secure_aggregation.strategy:SecureAggregation",
    "fedsurrogate.strategies.secure_aggregation.strategy:SecureRounds",
)
# Numbers are whole, modulo two to this power.
BITS = 32
# Keys, shares, signatures and revealed shares: measured in benchmarks/secure_aggregation.py.
MEMBER_BYTES = (175, 430)
# Largest share of the records that test.
MOST_TESTED = 0.5
# Records of a site, and its change of all parameters times them.
UPDATES = (Term("records", "1", 0), Term("update", "P", 1))
# In a sum without noise, zero at every site that lets the sum be opened. A refusal would show
# something about the data of the site that refuses; see client_app/governance/release.py.
WITHHELD = Term("withheld", "1", 0)


def with_secure_aggregation(name: str, plan: Plan, settings: Settings) -> Plan:
    """The plan of a method in a run with `secure-aggregation`. Everything generic follows from it.

    Args:
        name: of the method, for errors.
        plan: of the same run without the sum.
        settings: of the run.
    """
    rounds, combination, messages = plan.kind == "rounds", plan.combination, plan.messages
    continues = rounds and plan.mechanism_name == DISTRIBUTED_SUMS
    refusal = plan.refusal or _refusal(name, combination.sums, settings, continues)
    if not settings.epsilon:
        combination = _can_be_withheld(combination)

    def symbols(classes: int, dimension: int, records: int) -> Sizes:
        more = {"T": dimension * (dimension + 1) // 2, "1": 1}
        return {**messages.symbols(classes, dimension, records), **more}

    return replace(
        plan,
        messages=replace(
            messages,
            sends=fields_of(combination.sums, bits=BITS),
            first=None if messages.first is None else fields_of(combination.sums_in(1), bits=BITS),
            receives=messages.receives if rounds or plan.counts else (),
            symbols=symbols,
            identifies=True,
            member_bytes=MEMBER_BYTES,
        ),
        combination=replace(
            combination,
            site="fedsurrogate.client_app.secure_aggregation:masked_sum",
            strategy=combination.sum_strategy or (ROUNDS if rounds else ONCE),
            stored=False,
        ),
        defences=Defences(
            reason=" in secure aggregation, which shows no site's part; each number of a site is only "
            "kept within its range",
            gap="secure aggregation shows no site's part: one hostile site can spoil the model, and "
            "nothing names it; sites keep only each of their own numbers within a range",
        ),
        refusal=refusal,
        variant="secure aggregation",
    )


def _can_be_withheld(combination: Combination) -> Combination:
    first = combination.first_sums
    return replace(
        combination,
        sums=(*combination.sums, WITHHELD),
        first_sums=None if first is None else (*first, WITHHELD),
    )


def _refusal(name: str, sums: tuple[Term, ...], settings: Settings, continues: bool) -> str:
    """Why a run cannot be securely aggregated; empty if it can. continues: whether it keeps its rounds."""
    if not sums:
        return (
            f"secure-aggregation = true, but with these settings what method = {name!r} combines is not a "
            "sum over sites; use method = 'fedpft' with fedpft.covariance = 'gram', "
            "fedpft.components = 1, fedpft.topology = 'star', fedpft.privacy = 'auto' and a head "
            "in closed form (head.solver = 'auto', 'lda' or 'ridge'), or 'fedavg'"
        )
    file = settings.features.given_projection
    if file and "sums" not in {each.name for each in sums}:
        return f"features.projection = {file!r} is for sums of class statistics; remove it"
    if settings.resume and not continues:
        return (
            f"resume = {settings.resume!r}: secure aggregation without distributed noise in rounds keeps nothing "
            "to continue from; remove resume, and start again"
        )
    if not settings.classes:
        return (
            "secure-aggregation = true needs classes: which classes a site has must not be visible"
        )
    if settings.test_fraction > MOST_TESTED:
        return (
            f"test-fraction = {settings.test_fraction:g}: in secure aggregation at most {MOST_TESTED:g}; "
            "with few training records, only one site may have enough of a class, and the sum of "
            "that class would be its own"
        )
    if settings.max_share and settings.max_share != Settings.model_fields["max_share"].default:
        return (
            f"max-share = {settings.max_share:g}: secure aggregation shows no site's weight; remove "
            "max-share, or set 0"
        )
    return ""
