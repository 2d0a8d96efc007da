"""A statistic of a site as its message. How one travels in a secure sum is in client_app/secure_sum."""

from __future__ import annotations

from dataclasses import replace

from fedsurrogate.client_app.methods.task import MethodOutput, SiteStatistic, Task
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.gaussian_mechanism import with_noise
from fedsurrogate.common.wire.model_proto import pack_parameters


def message(task: Task) -> MethodOutput:
    """What the method's function at the site has computed, at 16 bits; with noise under privacy.

    Args:
        task: the request.
    """
    made: SiteStatistic = load(task.run.plan.combination.site_sums)(task)
    header, claim = task.header(made.classes, made.frame), made.claim
    if claim is None:
        sent = Parameters(header, task.round, made.values, made.records)
        return MethodOutput(pack_parameters(sent))
    # Of a claim for several rounds, what this one has.
    noise = {each.name: claim.noise[each.name] for each in made.bounded}
    noisy = with_noise(made.bounded, replace(claim, noise=noise))
    facts = {f"signal-to-noise-{each.name}": each.signal_to_noise() for each in noisy}
    sent = Parameters(header, task.round, {each.name: each.value for each in noisy}, 0, claim)
    return MethodOutput(pack_parameters(sent), claim, facts)
