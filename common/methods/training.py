"""Methods that train in rounds: FedAvg and its relatives, and generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from ..errors import LARGEST_COUNT
from ..privacy.mechanism import DISTRIBUTED_SUMS, SGD, NoisyRounds
from ..privacy.shares import DISTRIBUTED_STEP, budget_shares
from ..settings import DPCVAESettings, FedAvgSettings, FedLAPSettings, Model, Settings
from ..settings.settings import PrivacyBudget
from ..targets.target import Objective, Target
from ..terms import Term
from .method import (
    GRADIENTS,
    UPDATE_DEFENCES,
    UPDATES,
    VOTE_DEFENCES,
    Combination,
    Field,
    Messages,
    Method,
    ModelTraining,
    Plan,
    Sizes,
    Work,
)

MODEL = (Field("parameters", "P", prefix=""),)
BODY = (Field("parameters", "B", prefix=""),)
# A control variate has the names of the parameters, after a prefix: CONTROL in
# common/models/parameters.py.
MODEL_AND_CONTROL = (*MODEL, Field("control", "P", prefix="control."))
# Records of a site, and the sum of their gradients of all parameters, each shortened to norm one.
GRADIENT_SUMS = (Term("records", "1"), Term("gradients", "P"))
# Rounds for fedavg.rounds = 0. With distributed noise a round is a single step, and small noise allows
# more of them. Measured in benchmarks/secure_aggregation.py, on the test images of its table.
USUAL_ROUNDS, NOISY_ROUNDS, DISTRIBUTED_ROUNDS, SMALL_NOISE = 10, 20, 30, 2.0
# DSFL sends the largest entries, and one bit for every entry.
SPARSE_UPDATE = (Field("parameters", "k"), Field("mask", "m"))


def model_numbers(settings: FedAvgSettings | FedLAPSettings, classes: int, dimension: int) -> int:
    """Number of parameters of the trained model."""
    return _parameters(settings.kind, settings.width, classes, dimension)


@cache
def _parameters(kind: Model, width: int, classes: int, dimension: int) -> int:
    if kind == "linear":
        return classes * (dimension + 1)
    from ..models.networks import fresh

    return sum(
        parameter.numel() for parameter in fresh(kind, dimension, classes, width).parameters()
    )


def variant_of(model: Model) -> str:
    """The model's kind, for tables; empty for a linear model."""
    return "" if model == "linear" else f"of a {model}"


def numbers_held(settings: FedAvgSettings | FedLAPSettings, classes: int, dimension: int) -> int:
    """Numbers of model and activations in a training step."""
    if settings.kind == "linear":
        return dimension * classes
    return settings.width * (dimension + classes + 27 * settings.width)


def _symbols(own: FedAvgSettings, named: int, classes: int, dimension: int, records: int) -> Sizes:
    """P: parameters; B: those below the head; k: those that DSFL sends; m: 16-bit words of DSFL's
    mask.
    """
    total = max(classes, named)
    numbers = model_numbers(own, total, dimension)
    # The head has as many parameters for each class: what grows with the number of classes.
    body = numbers - total * (model_numbers(own, total + 1, dimension) - numbers)
    return {"P": numbers, "B": body, "k": round(own.keep * numbers), "m": numbers // 16}


def _work(own: FedAvgSettings, private: bool, one_step: bool, classes: int, dimension: int) -> Work:
    """The work of a site: local epochs, or the steps of DP-SGD, or one step with distributed noise."""
    return Work(
        steps=1 if one_step else own.private_steps if private else 0,
        passes=1 if one_step else own.local_epochs,
        rounds=own.rounds,
        numbers=numbers_held(own, classes, dimension) * (GRADIENTS if private else 4),
        width=own.width,
    )


def plan_of_target(usual: Plan, own: FedAvgSettings, target: Target) -> Plan:
    """The plan of a method that trains a linear model of another target than classes.

    Args:
        usual: the method's plan for classes, whose mechanism, combination and defences stay.
        own: settings of the training.
        target: of the run.
    """
    objective = target.objective()
    if objective is None:
        why = f"task = {target.name!r} is learned from sums only; use method = 'fedpft'"
        return replace(usual, refusal=usual.refusal or why)
    linear = (
        ""
        if own.kind == "linear"
        else f"task = {target.name!r} has linear heads only; remove fedavg.model = {own.kind!r}"
    )
    messages = replace(
        usual.messages,
        result=(Field("weight", "o d"), Field("bias", "o")),
        symbols=partial(_coded_symbols, own.keep, target, objective),
    )
    evaluate = "fedsurrogate.client_app.methods.evaluation:received_target_model"
    return replace(
        usual,
        messages=messages,
        combination=replace(usual.combination, evaluate=evaluate),
        refusal=usual.refusal or linear,
        variant=target.name,
        ranges=False,
    )


def _coded_symbols(
    keep: float, target: Target, objective: Objective, classes: int, dimension: int, records: int
) -> Sizes:
    """As `_symbols`; o: what the model answers."""
    numbers = objective.numbers(dimension)
    return {"P": numbers, "k": round(keep * numbers), "m": numbers // 16, "o": len(target.outputs)}


def _has_distributed_noise(settings: Settings) -> bool:
    """Whether DP-FedAvg has one distributed noise: in secure aggregation, unless the settings want DP-SGD at
    every site.
    """
    return (
        bool(settings.epsilon)
        and settings.secure_aggregation
        and settings.fedavg.noise == "distributed"
    )


def fill_for(
    network: Model, distributed: Callable[[Settings], bool], settings: Settings
) -> Settings:
    """Settings with the network for fedavg.model = "auto", and the rounds for fedavg.rounds = 0.

    Args:
        network: of the method.
        distributed: whether a run has one distributed noise.
        settings: as given.
    """
    own = settings.fedavg
    if own.model == "auto":
        own = own.model_copy(update={"model": network})
    if not own.rounds:
        noisy = DISTRIBUTED_ROUNDS if settings.epsilon >= SMALL_NOISE else NOISY_ROUNDS
        own = own.model_copy(update={"rounds": noisy if distributed(settings) else USUAL_ROUNDS})
    return settings if own is settings.fedavg else settings.model_copy(update={"fedavg": own})


def plan(settings: Settings) -> Plan:
    """The plan of FedAvg: all sites train one model, and the coordinator averages the changes."""
    own = settings.fedavg
    return Plan(
        kind="rounds",
        messages=Messages(
            MODEL, MODEL, MODEL, symbols=partial(_symbols, own, len(settings.classes))
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.fedavg.update:update",
            strategy="fedsurrogate.strategies.fedavg:Updates",
            sums=UPDATES,
            site_sums="fedsurrogate.client_app.methods.fedavg.update:weighted_update",
            from_sums="fedsurrogate.strategies.fedavg:absorb_total",
        ),
        work=partial(_work, own, bool(settings.epsilon), False),
        defences=UPDATE_DEFENCES,
        variant=variant_of(own.kind),
        ranges=True,
    )


def proximal_plan(settings: Settings) -> Plan:
    """The plan of FedProx."""
    return replace(plan(settings), training=ModelTraining(proximal=True))


def fedyogi_plan(settings: Settings) -> Plan:
    """The plan of FedYogi."""
    return replace(plan(settings), training=ModelTraining(adaptive=True))


def fedsgd_plan(settings: Settings) -> Plan:
    """The plan of FedSGD."""
    return replace(
        plan(settings),
        training=ModelTraining(single_step=True),
        work=partial(_work, settings.fedavg, False, True),
    )


def sgd_noise(
    own: FedAvgSettings | FedLAPSettings | DPCVAESettings, budget: PrivacyBudget
) -> NoisyRounds:
    """The recipe of DP-SGD in rounds, by a section that has its clip, steps and sample rate."""
    return NoisyRounds(
        SGD,
        budget.epsilon,
        budget.delta,
        own.clip,
        own.rounds,
        own.private_steps,
        own.sample_rate,
        own.noise_multiplier,
    )


def dp_fedprox_plan(settings: Settings) -> Plan:
    """The plan of DP-FedProx: DP-SGD at every site."""
    usual = proximal_plan(settings)
    if not settings.epsilon:
        return usual
    return replace(usual, privacy=sgd_noise(settings.fedavg, settings))


def dp_fedavg_plan(settings: Settings) -> Plan:
    """The plan of DP-FedAvg: DP-SGD at every site, or one step a round with distributed noise in secure
    aggregation.
    """
    own, usual = settings.fedavg, replace(dp_fedprox_plan(settings), training=ModelTraining())
    if not _has_distributed_noise(settings):
        return usual
    privacy = NoisyRounds(
        DISTRIBUTED_SUMS,
        settings.epsilon,
        settings.delta,
        own.clip,
        own.rounds,
        noise_multiplier=own.noise_multiplier,
        step_shares=DISTRIBUTED_STEP,
    )
    return replace(
        usual,
        privacy=privacy,
        combination=replace(usual.combination, sums=GRADIENT_SUMS),
        work=partial(_work, own, True, True),
    )


def _unsummed(settings: Settings) -> Plan:
    """The plan of a method that combines more than a weighted sum of updates."""
    own = plan(settings)
    return replace(own, combination=replace(own.combination, sums=(), site_sums="", from_sums=""))


def scaffold_plan(settings: Settings) -> Plan:
    """The plan of SCAFFOLD: control variates travel with the model."""
    own, momentum = _unsummed(settings), settings.fedavg.momentum
    text = (
        f"fedavg.momentum = {momentum:g}: SCAFFOLD's control variates assume no momentum; set "
        "it to 0"
    )
    messages = replace(own.messages, sends=MODEL_AND_CONTROL, receives=MODEL_AND_CONTROL)
    return replace(own, messages=messages, refusal=text if momentum else "")


def _linear_only(method: str, model: str) -> str:
    """Refuse models that are not linear, for methods that mix or sparsify linear heads."""
    if model == "linear":
        return ""
    return f"method = {method!r} supports linear heads only; remove fedavg.model = {model!r}"


def dsfl_plan(settings: Settings) -> Plan:
    """The plan of DSFL: sparse updates."""
    own = _unsummed(settings)
    messages = replace(own.messages, sends=SPARSE_UPDATE, parsed=MODEL)
    return replace(
        own,
        messages=messages,
        training=ModelTraining(sparse=True),
        defences=VOTE_DEFENCES,
        refusal=_linear_only(settings.method, settings.fedavg.model),
    )


def _personal_plan(own_part: str, settings: Settings) -> Plan:
    """The plan of FedAvg with its model mixed with a part of each site's own at that site."""
    own = _unsummed(settings)
    combination = replace(
        own.combination,
        evaluate=f"fedsurrogate.client_app.methods.fedavg.update:{own_part}",
        tested="the model of the run, mixed with one of the site's own records",
    )
    return replace(
        own, combination=combination, refusal=_linear_only(settings.method, settings.fedavg.model)
    )


def fedrep_plan(settings: Settings) -> Plan:
    """The plan of FedRep: sites share what lies below the head."""
    own = _unsummed(settings)
    combination = replace(
        own.combination,
        site="fedsurrogate.client_app.methods.fedavg.update:update_body",
        strategy="fedsurrogate.strategies.fedavg:Representation",
        evaluate="fedsurrogate.client_app.methods.evaluation:own_model",
        personal="fedsurrogate.client_app.methods.fedavg.update:own_network",
        tested="the site's own head on the shared representation",
    )
    messages = replace(own.messages, sends=BODY, receives=BODY, signs=False)
    text = (
        "fedavg.model = 'linear' has no representation below its head to share; use method = "
        "'local', or 'mlp'"
    )
    refusal = text if settings.fedavg.model == "linear" else ""
    return replace(own, messages=messages, combination=combination, refusal=refusal)


_FILL = partial(fill_for, "linear", lambda settings: False)
FEDAVG = Method(
    name="fedavg",
    title="FedAvg",
    paper="McMahan et al. 2017",
    plan=plan,
    trains=plan_of_target,
    reads=("fedavg", "baseline"),
    shown="fedavg",
    fill=_FILL,
)
FEDPROX = replace(
    FEDAVG, name="fedprox", title="FedProx", paper="Li et al. 2020", plan=proximal_plan
)
FEDYOGI = replace(
    FEDAVG, name="fedyogi", title="FedYogi", paper="Reddi et al. 2021", plan=fedyogi_plan
)
FEDSGD = replace(FEDAVG, name="fedsgd", title="FedSGD", plan=fedsgd_plan)
SCAFFOLD = replace(
    FEDAVG,
    name="scaffold",
    title="SCAFFOLD",
    paper="Karimireddy et al. 2020, algorithm 1",
    plan=scaffold_plan,
)
DSFL = replace(
    FEDAVG,
    name="dsfl",
    title="DSFL",
    paper="sparse updates, as in FedPFT's comparison",
    plan=dsfl_plan,
)
DP_FEDAVG = replace(
    FEDAVG,
    name="dp-fedavg",
    title="DP-FedAvg",
    paper="Abadi et al. 2016, in rounds of FedAvg",
    plan=dp_fedavg_plan,
    needs_budget=True,
    fill=partial(fill_for, "linear", _has_distributed_noise),
)
DP_FEDPROX = replace(
    DP_FEDAVG, name="dp-fedprox", title="DP-FedProx", plan=dp_fedprox_plan, fill=_FILL
)
FEDLAMBDA = replace(
    FEDAVG,
    name="fedlambda",
    title="FedLambda",
    paper="a local head mixed with FedAvg's, as in DP-CVAE's comparison",
    plan=partial(_personal_plan, "with_head"),
    trains=None,
    reads=("fedavg", "baseline", "head"),
)
KNN_PER = replace(
    FEDLAMBDA,
    name="knn-per",
    title="kNN-Per",
    paper="Marfoq et al. 2022",
    plan=partial(_personal_plan, "with_neighbours"),
)
FEDREP = replace(
    FEDAVG,
    name="fedrep",
    title="FedRep",
    paper="Collins et al. 2021, algorithm 1",
    plan=fedrep_plan,
    trains=None,
    reads=("fedavg", "baseline", "head"),
    fill=partial(fill_for, "mlp", lambda settings: False),
)

# In the order of the registry.
TRAINED = (
    *(FEDAVG, FEDPROX, FEDYOGI, FEDSGD, SCAFFOLD, DSFL),
    *(DP_FEDAVG, DP_FEDPROX, FEDLAMBDA, KNN_PER, FEDREP),
)


DECODER = (Field("decoder", "P", prefix=""),)
GAN = (Field("generator", "G", prefix=""),)
CLASSES = (Field("means", "A d"), Field("counts", "A"))
# The weight of a site, and its change of all parameters times that weight.
DECODER_SUMS, GAN_SUMS = ((Term("records", "1"), Term("update", symbol, 1)) for symbol in "PG")


def _decoder_symbols(
    own: DPCVAESettings, names: int, private: bool, classes: int, dimension: int, records: int
) -> Sizes:
    """A: classes that the run names; P: parameters of a decoder; G: parameters of a GAN's
    generator.

    With L latent and h hidden, P is the sum of: (L + A) d of the linear path; d without hidden
    layers, otherwise (L + A + 1) h + (h + 1) h + (h + 1) d; d of the variance; 2 L A of the prior.
    G is (L + A + 1) 512 + 513 * 1024 + 1025 d.
    """
    named = max(classes, names)
    latent, hidden = own.latents(private), own.hidden
    inputs = latent + named
    layers = (
        (inputs + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * dimension
        if hidden
        else dimension
    )
    more = own.learned_variance * dimension + own.class_prior * 2 * latent * named
    return {
        "A": named,
        "P": inputs * dimension + layers + more,
        "G": (inputs + 1) * 512 + 513 * 1024 + 1025 * dimension,
    }


def first_round_shares(own: DPCVAESettings) -> dict[str, float]:
    """Shares of the first round's budget by statistic."""
    return budget_shares("spherical", 1.0) if own.first_round == "sums" else {"counts": 1.0}


def dpcvae_plan(settings: Settings) -> Plan:
    """The plan of DP-CVAE: a first round of class sizes and sums, then the training of decoders."""
    own, head, private = settings.dpcvae, settings.head, bool(settings.epsilon)
    sums = own.first_round == "sums"
    # Noise may make a count negative.
    sizes = Field("counts", "A", -LARGEST_COUNT if private else 0, LARGEST_COUNT)
    width = max(own.hidden, own.latent, 512)

    def work(classes: int, dimension: int) -> Work:
        return Work(
            steps=max(own.private_steps if private else 0, head.min_steps),
            passes=max(own.local_epochs, head.epochs),
            rounds=own.rounds,
            synthetic=own.synthetic * max(1, classes),
            numbers=2 * width * (dimension + classes + 3 * width) * (GRADIENTS if private else 4),
            width=max(own.hidden, own.latent),
        )

    return Plan(
        kind="rounds",
        messages=Messages(
            sends=DECODER,
            receives=(*DECODER, *CLASSES),
            result=(*DECODER, *CLASSES),
            first=(sizes, Field("sums", "A d")) if sums else (sizes,),
            symbols=partial(_decoder_symbols, own, len(settings.classes), private),
            signs=False,
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.dpcvae.training:train_generator",
            strategy="fedsurrogate.strategies.dpcvae:DPCVAE",
            evaluate="fedsurrogate.client_app.methods.dpcvae.downstream:use_generator",
            tested="own and synthetic, mixed: the site's own head and a head on synthetic "
            "embeddings",
            makes_surrogates=True,
            keeps_result=True,
            sums=DECODER_SUMS,
            first_sums=(Term("counts", "A"), *((Term("sums", "A d", 1),) if sums else ())),
            site_sums="fedsurrogate.client_app.methods.dpcvae.training:generator_sums",
            from_sums="fedsurrogate.strategies.dpcvae:absorb_total",
            sum_strategy="fedsurrogate.strategies.dpcvae:SummedGenerators",
        ),
        work=work,
        privacy=_privacy(settings) if private else None,
        defences=UPDATE_DEFENCES,
        training=ModelTraining("dpcvae", frames=False),
        judging_packages=("ot",),
    )


def _privacy(settings: Settings) -> NoisyRounds:
    """DP-SGD after a first round of noisy sums."""
    own = settings.dpcvae
    return replace(
        sgd_noise(own, settings),
        first_share=own.share(settings.epsilon),
        first_shares=first_round_shares(own),
    )


def gan_plan(settings: Settings) -> Plan:
    """The plan of DP-CGAN: the same with an adversarial generator."""
    own, whole = dpcvae_plan(settings), (*GAN, *CLASSES)
    messages = replace(own.messages, sends=GAN, receives=whole, result=whole)
    return replace(own, messages=messages, combination=replace(own.combination, sums=GAN_SUMS))


DPCVAE = Method(
    name="dpcvae",
    title="DP-CVAE",
    paper="Di Salvo et al. 2025",
    plan=dpcvae_plan,
    reads=("dpcvae", "head", "baseline"),
    shown="dpcvae",
)
DPCGAN = replace(
    DPCVAE,
    name="dpcgan",
    title="DP-CGAN",
    paper="a conditional GAN, as in DP-CVAE's comparison",
    plan=gan_plan,
    adversarial=True,
)

# In the order of the registry.
GENERATORS = (DPCVAE, DPCGAN)
