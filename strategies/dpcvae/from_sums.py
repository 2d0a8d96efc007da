"""A round of DP-CVAE or DP-CGAN from a secure sum: class sizes and means, or the mean update of the
generator.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.parameters import Parameters, by_name
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae.generating import (
    check_first_round,
    expected_shapes,
    moved_by,
    with_classes,
)
from fedsurrogate.strategies.pooling.plausibility import false_numbers, weight_of
from fedsurrogate.strategies.pooling.total import Total


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Update the generator with a sum over sites, and finish the round.

    Args:
        total: the sum: class sizes and sums in the first round, weighted updates in the others.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for sums that no records have.
    """
    if training.round == 0:
        tensors = {name: tensor.float() for name, tensor in total.tensors.items()}
        pooled = Parameters(training.header(), 1, tensors, claim=total.claim)
        try:
            check_first_round(
                pooled, training.config.mechanism, training.config.settings.dpcvae, len(summed)
            )
        except SurrogateError as error:
            raise false_numbers(f"sums that no records have: {error}") from None
        training.model = with_classes(training, [pooled], len(summed))
    else:
        weight = weight_of(
            total, len(summed), 0.0 if training.config.settings.dpcvae.weights == "records" else 1.0
        )
        training.model = moved_by(
            training.model, by_name(total.tensors["update"] / weight, expected_shapes(training))
        )
    training.finish_round(summed)
