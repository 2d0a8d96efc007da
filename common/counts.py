"""Tables of counts that a site releases in a run that counts, exact or with noise; and their canonical
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import surrogate_pb2 as pb
from .errors import SurrogateError
from .identity import distinct_names
from .methods.counting import tables_in
from .methods.method import check_fields
from .privacy.mechanism import Mechanism, check_stated
from .run import Run
from .safe_parsing import canonical
from .surrogates.surrogates import Header
from .wire.surrogate_proto import pack_claim, pack_header, parse, unpack_claim, unpack_header
from .wire.tensors import Expectation, check_header


@dataclass(frozen=True)
class Counts:
    """Tables of whole numbers. Noise is rounded to whole numbers.

    Attributes:
        header: origin.
        tables: int64, by name, see `fedsurrogate.common.methods.counting.tables_of`.
        claim: what the message states of its differential privacy; None for exact counts.
    """

    header: Header
    tables: Mapping[str, Tensor]
    claim: Mechanism | None = None

    def variance(self, name: str) -> float:
        """Variance of the noise in each cell of a table, rounding included; zero for exact counts."""
        return 0.0 if self.claim is None else self.claim.noise[name][0] ** 2 + 1 / 12


# An honest value differs from what it must be by more than this many standard deviations once in a
# hundred million.
DEVIATIONS = 6.0
# A site with a record has a hundred steps or more, and rounds to half a step.
ROUNDED = 0.005


def pack_counts(counts: Counts) -> bytes:
    """Canonical bytes: the same counts always give the same bytes."""
    message = pb.Counts(header=pack_header(counts.header), claim=pack_claim(counts.claim))
    for name, table in sorted(counts.tables.items()):
        message.tables.add(
            name=name, shape=list(table.shape), data=table.numpy().astype("<i4").tobytes()
        )
    return canonical(message)


def unpack_counts(payload: bytes) -> Counts:
    """Parse bytes of `pack_counts`. `check_counts` checks if they fit a run.

    Raises:
        SurrogateError: for bytes of no counts.
    """
    message = parse(pb.Counts, payload)
    tables: dict[str, Tensor] = {}
    names = distinct_names([table.name for table in message.tables], "table")
    for name, table in zip(names, message.tables, strict=True):
        shape = tuple(table.shape)
        if len(shape) > 3 or 4 * math.prod(shape) != len(table.data) or 0 in shape:
            raise SurrogateError(f"a table of shape {shape[:4]} with {len(table.data)} bytes")
        numbers = np.frombuffer(table.data, "<i4").astype(np.int64)
        tables[name] = torch.from_numpy(numbers).reshape(shape)
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    return Counts(unpack_header(message.header), tables, claim)


def check_counts(counts: Counts, config: Run, fingerprint: str) -> None:
    """Check that counts belong to this run, and are what some records and honest noise can give.

    Args:
        counts: of one site.
        config: of the run.
        fingerprint: of the backbone.

    Raises:
        SurrogateError: if they are not.
    """
    check_header(counts.header, Expectation.of(config, config.settings.classes, fingerprint))
    if counts.header.classes != config.settings.classes:
        raise SurrogateError("counts of other classes than the run's, or in another order")
    if counts.claim is not None or config.settings.epsilon:
        check_stated(counts.claim, config.mechanism)
    messages, classes = config.plan.messages, len(config.settings.classes)
    check_fields(messages.sends, counts.tables, messages.sizes(classes, 1, 1))
    expected = tables_in(config.settings.counting, classes, config.target)
    assert set(counts.tables) == {each.name for each in expected}
    check_tables(counts.tables, {name: counts.variance(name) for name in counts.tables})


def check_tables(tables: Mapping[str, Tensor], variances: Mapping[str, float]) -> None:
    """Check that some records and honest noise can give these tables.

    Args:
        tables: of counts, by name.
        variances: of the noise in a cell, by table.

    Raises:
        SurrogateError: if they cannot.
    """
    for name, table in tables.items():
        if float(table.min()) < -DEVIATIONS * variances[name] ** 0.5:
            raise SurrogateError(
                f"{name}: a count of {int(table.min())}; below zero by more than the noise can "
                "explain"
            )
    if "errors" in tables:
        records, others = tables["errors"][:, :1].double(), tables["errors"][:, 1:].double()
        # Exact sums are rounded to whole steps at each site.
        room = DEVIATIONS * (2 * variances["errors"]) ** 0.5 + ROUNDED * float(records.max())
        if float((others - records).max()) > room + 1:
            raise SurrogateError("errors: a sum beyond its number of records")
    if "scores" not in tables:
        return
    decisions, scores = tables["decisions"], tables["scores"]
    room = variances["decisions"] * decisions.numel() + variances["scores"] * scores[0].numel()
    apart = (scores.sum((1, 2)) - decisions.sum()).abs().max()
    if float(apart) > DEVIATIONS * room**0.5:
        raise SurrogateError(
            f"decisions and scores differ by {int(apart)} records; each record is in both"
        )
