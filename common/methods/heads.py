"""Methods whose sites train a head on their own records, and what all methods with linear heads
share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..settings import HeadSettings, Settings
from . import method

HEAD = (
    method.Field("weight", "C d", degree=-1),
    method.Field("bias", "C", degree=0, count="weight"),
)
HEADS = (method.Field("weight", "S C d"), method.Field("bias", "S C"))


def symbols(sites: int, classes: int, dimension: int, records: int) -> method.Sizes:
    """S: number of sites, if the settings give it."""
    return {"S": max(1, sites)}


def work(head: HeadSettings, private: bool, classes: int, dimension: int) -> method.Work:
    """The work of training one head."""
    gradients = method.GRADIENTS if private else 4
    return method.Work(head.min_steps, head.epochs, numbers=dimension * classes * gradients)


# A chain message replaces the one before it, and no other has what the earlier sites have.
CHAIN_GAP = (
    "in a chain one hostile site can replace all that the sites before it have passed on, and nothing "
    "finds it; use it among sites that trust each other"
)


def chain_work(head: HeadSettings, private: bool, classes: int, dimension: int) -> method.Work:
    """The work of training one head, with sampled records."""
    return replace(work(head, private, classes, dimension), synthetic=head.max_samples)


def plan(settings: Settings) -> method.Plan:
    """The plan of a method whose sites train a head and send it once."""
    return method.Plan(
        kind="one-shot",
        messages=method.Messages(
            HEAD, (), HEAD, symbols=partial(symbols, settings.site_count), identifies=False
        ),
        combination=method.Combination(
            site="fedsurrogate.client_app.methods.local_training:own_head",
            strategy="fedsurrogate.strategies.heads:Heads",
            learn="fedsurrogate.strategies.heads:average_head",
            stored=True,
        ),
        work=partial(work, settings.head, bool(settings.epsilon)),
        defences=method.UPDATE_DEFENCES,
    )


def _learned_by(plan: method.Plan, function: str) -> method.Plan:
    learn = f"fedsurrogate.strategies.heads:{function}"
    return replace(plan, combination=replace(plan.combination, learn=learn))


def ensemble_plan(settings: Settings) -> method.Plan:
    """The plan of an ensemble: the result is all heads."""
    own = _learned_by(plan(settings), "ensemble")
    return replace(own, messages=replace(own.messages, result=HEADS), defences=method.VOTE_DEFENCES)


def highest_plan(settings: Settings) -> method.Plan:
    """The plan of an ensemble that takes the highest probability over all heads."""
    return _learned_by(ensemble_plan(settings), "highest_ensemble")


def local_plan(settings: Settings) -> method.Plan:
    """The plan of sites that train alone."""
    own = plan(settings)
    alone = replace(
        own.combination,
        strategy="fedsurrogate.strategies.heads:Local",
        evaluate="fedsurrogate.client_app.methods.evaluation:own_model",
        personal="fedsurrogate.client_app.methods.local_training:local_head",
        learn="",
        tested="the site's own head, trained alone",
        stored=False,
    )
    messages = replace(own.messages, sends=(), result=(), identifies=True)
    nothing = method.Defences(reason=", which combines nothing")
    return replace(own, kind="alone", messages=messages, combination=alone, defences=nothing)


def _head_method(
    name: str, title: str, paper: str, own: Callable[[Settings], method.Plan]
) -> method.Method:
    return method.Method(name, title, paper, own, reads=("head", "baseline"), shown="baseline")


AVERAGE = _head_method("average", "The average of heads", "one round of FedAvg", plan)
ENSEMBLE = _head_method("ensemble", "The ensemble of heads", "Guha et al. 2019", ensemble_plan)
HIGHEST = _head_method(
    "ensemble-max",
    "The ensemble of heads by the highest probability",
    "Beitollahi et al. 2024, section 5.1",
    highest_plan,
)
LOCAL = _head_method("local", "Training alone", "no federation", local_plan)
