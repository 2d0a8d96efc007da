"""A run that counts in a secure sum: the coordinator sees the counts of all sites together, and of
no single one.
"""

from __future__ import annotations

from flwr.serverapp import Grid

from fedsurrogate.common.methods.method import load
from fedsurrogate.common.secure_sum.words import Words
from fedsurrogate.strategies.base.introductions import Group
from fedsurrogate.strategies.counting.evaluated import evaluated_payload
from fedsurrogate.strategies.counting.results import keep_result
from fedsurrogate.strategies.secure_sum.strategy import SecureSum


class SecureCounting(SecureSum):
    """The sum of all sites' counts. The result is the file `evaluation.json` or `survey.json`.

    What needs a single site's counts is not in it.
    """

    def evaluate(self, grid: Grid, deadline: float) -> float | None:
        """There is no model to send to the sites."""
        return None

    def _agreed_payload(self, group: Group) -> tuple[bytes, int]:
        """The model that is evaluated, the same for all sites: a sum with zeros of all others would
        show one site's.
        """
        return evaluated_payload(
            self.config.settings.counting, self.recorder
        ) or b"", group.dimension

    def _learn(self, summed: list[str], numbers: Words) -> None:
        total, self.outcome.learning = self._total(summed, numbers)
        keep_result(
            self.recorder,
            self.config.settings,
            len(summed),
            load(self.config.plan.combination.from_sums)(total, self.config),
        )
        self.recorder.event("counted", sites=len(summed))
