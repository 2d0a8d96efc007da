"""A run that counts: one request to every site, its tables checked and added up; nothing is
learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedsurrogate.common.counting.counts import Counts
from fedsurrogate.common.counting.counts_proto import check_counts, unpack_counts
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.counting import tables_in
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.one_shot import Learned, OneShot
from fedsurrogate.strategies.counting.evaluated import evaluated_payload
from fedsurrogate.strategies.counting.results import (
    Json,
    PooledCounts,
    keep_result,
    pooled,
    records_counted,
    result_of,
    survey_of_sites,
)


class Counting(OneShot[Counts]):
    """Counts of all sites. The result is the file `evaluation.json` or `survey.json` of the run
    folder.
    """

    def parse(self, payload: bytes) -> Counts:
        """Parse the counts of a site. Raises SurrogateError."""
        return unpack_counts(payload)

    def check(self, sent: Counts) -> None:
        """Check that some records and honest noise can give these counts. Raises SurrogateError."""
        check_counts(sent, self.config, "")

    def dimension(self, sent: Counts) -> int:
        """Counts have no features."""
        return 1

    def records(self, sent: Counts) -> int:
        """Number of counted records, noisy under privacy."""
        if self.config.target is not None:
            return records_counted(sent.tables, self.config.settings.counting, self.config.target)
        first = tables_in(self.config.settings.counting, len(self.config.settings.classes), None)[0]
        return max(0, int(sent.tables[first.name].sum()))

    def learn(self, sent: Sequence[Counts], classes: Sequence[str]) -> Learned:
        """Nothing is learned from counts. Raises RunError."""
        raise RunError("this run counted records; nothing can be learned from counts")

    def defend(self, sent: Sequence[Counts], classes: tuple[str, ...]) -> Defended[Counts]:
        """No site is excluded: every site's counts are as good as its word."""
        return Defended(list(sent))

    def restricted(self, sent: Counts, classes: Sequence[str]) -> Counts | None:
        """Counts of some classes only do not exist."""
        return None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the counts of every site, and add them up.

        Args:
            server_round: not used.
            replies: of the sites.

        Returns:
            None: there is no model, and the result is a file.

        Raises:
            RunError: when the sites that can be used are too few.
        """
        for reply in replies:
            self._receive(reply)
        self._conclude()
        return None, None

    def evaluate(self, grid: Grid, deadline: float) -> float | None:
        """There is no model to send to the sites."""
        return None

    def receive_late(self, grace: float) -> bool:
        """Late counts are not used and not kept."""
        return False

    def _questions(self, grid: Grid) -> Iterable[Message]:
        payload = evaluated_payload(self.config.settings.counting, self.recorder)
        values = Info(run=self.config.digest)
        if payload is not None:
            values["bytes"] = len(payload)
        nodes = self._named(grid, self.invite(grid, self.deadline))
        return [
            self._message(MessageType.TRAIN, node, to_record(payload, values)) for node in nodes
        ]

    def _receive(self, reply: Message, late: bool = False) -> None:
        super()._receive(reply, late)
        node = self._node(reply)
        if node not in self._received:
            return
        info = dict(reply.content.config_records["info"])
        site = self.outcome.sites[node]
        if self.config.settings.counting.kind == "evaluation" and info.get("show") is not True:
            # Its noisy counts are in the sum; nothing in the run folder shows them alone.
            self.recorder.discard(site.name)
            site.records = 0
        else:
            self._shown.add(site.name)
        if self.simulated and isinstance(info.get("exact"), str):
            self._exact[site.name] = self._exact_tables(str(info["exact"]))

    def _exact_tables(self, text: str) -> dict[str, torch.Tensor]:
        try:
            return {
                name: torch.tensor(table, dtype=torch.float64)
                for name, table in json.loads(text).items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise SurrogateError("exact counts that cannot be read") from None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._shown: set[str] = set()
        self._exact: dict[str, dict[str, torch.Tensor]] = {}

    def _conclude(self) -> None:
        counts = self._usable()
        for node, each in self._received.items():
            self.outcome.sites[node].claim = each.claim
        keep_result(self.recorder, self.config.settings, len(counts), self._result(counts))
        self.recorder.event("counted", sites=len(counts), records=sum(map(self.records, counts)))

    def _result(self, counts: Sequence[Counts]) -> Json:
        counted = pooled(counts)
        result = self._result_of(counted)
        if self.config.settings.counting.kind == "survey":
            return result | survey_of_sites(counts)
        shown = [each for each in counts if each.header.site in self._shown]
        of_target = self.config.target is not None
        part = "outputs" if of_target else "accuracy"
        result["per_site"] = {
            each.header.site: self._result_of(pooled([each]))[part] for each in shown
        }
        if self._exact.keys() == {each.header.site for each in counts}:
            tables = {
                name: torch.stack([tables[name] for tables in self._exact.values()]).sum(0)
                for name in counted.tables
            }
            exact = PooledCounts(tables, dict.fromkeys(tables, 0.0))
            result["exact"] = self._result_of(exact)
        return result

    def _result_of(self, counts: PooledCounts) -> Json:
        own = self.config.settings
        return result_of(counts, own.counting, own.classes, self.config.target)
