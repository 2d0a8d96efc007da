"""Whether this site would take part in a run, and what that costs: the one answer of gate, doctor and
`site check`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.privacy.accounting import budget_warnings
from fedsurrogate.common.run import Run

from ..methods.job import SiteRequest
from ..node_config import NodeConfig
from .gate import Gate
from .release import planned


@dataclass(frozen=True)
class Verdict:
    """The gate's answer to a run.

    Attributes:
        refusal: why it would refuse the run; empty if it would let it begin.
        spent: the part of epsilon-total that is spent.
        total: epsilon-total.
        runs_left: such runs that fit; None without privacy.
        warnings: of budget, in words.
    """

    refusal: str
    spent: float
    total: float
    runs_left: int | None
    warnings: tuple[str, ...]

    @property
    def left(self) -> float:
        """The part of epsilon-total that is left."""
        return max(0.0, self.total - self.spent)


def verdict(run: Run, gate: Gate, node: NodeConfig, records: int = 0) -> Verdict:
    """Ask the gate what it does with each request of a run, and before each release.

    Nothing is computed, charged or sent. It depends on settings, policy and ledger, never on records.

    Args:
        run: of the coordinator.
        gate: of this site.
        node: the site's settings.
        records: number of training records, for a warning about delta; 0 if it is not known.

    Raises:
        LedgerError: the ledger cannot be trusted.
    """
    own, refusal, left = run.settings, "", None
    try:
        gate.check_request(run)
        gate.check_planned(planned(SiteRequest(run, node, node.site, flower_run="check", info={})))
    except FedSurrogateError as error:
        refusal = str(error)
    warnings = budget_warnings(own.epsilon, own.delta, records)
    if run.mechanism is not None:
        left = gate.runs_left(run.mechanism.events)
        if not left and not refusal:
            warnings = ["some of its rounds would be refused: ask for a smaller epsilon", *warnings]
    return Verdict(refusal, gate.spent(), gate.policy.epsilon_total, left, tuple(warnings))
