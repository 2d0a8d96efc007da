"""Checks of surrogates before anything is learned from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from fedsurrogate.common.backbones.column_names import columns_in, shown
from fedsurrogate.common.backbones.feature_power import power_in
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.limits import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    LONGEST_FINGERPRINT,
    LONGEST_NAME,
    MOST_CLASSES,
    SITE_NAME,
)
from fedsurrogate.common.methods.fedpft import AUTO_RANK, choices, largest_gram
from fedsurrogate.common.methods.method import Messages, check_schema
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.class_sums import lengths
from fedsurrogate.common.surrogates.covariances import Gram, LowRank
from fedsurrogate.common.surrogates.surrogates import (
    AnySurrogate,
    Header,
    Reply,
    SumsSurrogate,
    Surrogate,
)

# Largest relative error of a number at 16 bits, with some room. Sum of variances a dimension that
# counts as none.
HALF, NO_VARIANCE = 2.0**-10, 1e-25
# Of the software of a site.
VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,19}")


@dataclass(frozen=True)
class Expectation:
    """Required properties of this run's surrogates. Empty or zero means "not known beforehand".

    A family "auto" is "gram" up to `largest_gram` dimensions. "lowrank" is allowed for any: a site
    may send less.
    """

    method: str
    run: str
    family: str
    components: int
    rank: int
    classes: tuple[str, ...] = ()
    fingerprint: str = ""
    dimension: int = 0
    power: float | None = None
    largest_gram: int = 0

    @classmethod
    def of(
        cls, run: Run, classes: tuple[str, ...], fingerprint: str, dimension: int = 0
    ) -> Expectation:
        """The expectation from a run's settings.

        Args:
            run: that a message must belong to.
            classes: of the run; empty if any are allowed.
            fingerprint: of the backbone; empty if any is allowed.
            dimension: of the features; 0 if any is allowed.
        """
        own = run.settings.fedpft
        return cls(
            run.settings.method,
            run.digest,
            choices(run.settings).family,
            own.components,
            own.rank or AUTO_RANK,
            classes,
            fingerprint,
            dimension,
            run.power,
            largest_gram(run.settings.max_payload_mib),
        )

    def allows(self, family: str, dimension: int) -> bool:
        """Whether a surrogate may have this covariance."""
        if self.family != "auto":
            return family == self.family
        return family == "lowrank" or (family == "gram" and dimension <= self.largest_gram)


OTHER_RUN = (
    ": it is of another run or of other settings, such as classes or columns in another order, or "
    "another unit"
)


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value is a valid name of a class or a backbone: a short text of printable
    characters.
    """
    # This also excludes lone UTF-16 surrogates, which cannot be encoded.
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def is_fingerprint(value: object) -> TypeGuard[str]:
    """Whether a value is a valid fingerprint of features: a name, longer only for names of columns."""
    return is_name(value) or (
        isinstance(value, str)
        and len(value) <= LONGEST_FINGERPRINT
        and value.isprintable()
        and bool(columns_in(value))
    )


def check_header(header: Header, expected: Expectation) -> None:
    """Check that a header belongs to this run.

    Args:
        header: of a message.
        expected: of the run.

    Raises:
        SurrogateError: if it does not.
    """
    for name, value, wanted in (
        ("method", header.method, expected.method),
        ("run", header.run, expected.run),
        ("backbone fingerprint", header.fingerprint, expected.fingerprint or header.fingerprint),
    ):
        if value != wanted:
            own, other = (
                shown(each) if columns_in(each) else each[:80] for each in (value, wanted)
            )
            why = OTHER_RUN if name == "run" else ""
            raise SurrogateError(f"{name} {own!r} is not this run's {other!r}{why}")
    if expected.power is not None and (power := power_in(header.fingerprint)) != expected.power:
        raise SurrogateError(
            f"features to the power {power:g}; this run's power is {expected.power:g}"
        )
    if not SITE_NAME.fullmatch(header.site):
        raise SurrogateError(
            f"site name {header.site[:64]!r}; letters, digits, '.', '_' and '-' are allowed, 64 at "
            "most"
        )
    if not header.classes:
        raise SurrogateError("an empty class list")
    named = all(map(is_name, header.classes)) and is_fingerprint(header.fingerprint)
    if len(header.classes) > MOST_CLASSES or not named:
        raise SurrogateError(
            f"{len(header.classes)} classes, or a name of a class or backbone that does not print; "
            f"allowed are at most {MOST_CLASSES} classes, and names of at most {LONGEST_NAME} "
            "characters"
        )
    if expected.classes and (unknown := set(header.classes) - set(expected.classes)):
        raise SurrogateError(
            f"unknown class {sorted(unknown)[0][:80]!r}; this run has {', '.join(expected.classes)}"
        )


def check_reply(
    reply: Reply, messages: Messages, expected: Expectation, first: bool = False
) -> None:
    """Check that a parsed message belongs to this run and matches the schema of its method.

    Strategies check every reply with it before their own checks.

    Args:
        reply: the parsed message.
        messages: of the method.
        expected: of the run.
        first: whether it is a message of the first round.

    Raises:
        SurrogateError: if it does not.
    """
    check_header(reply.header, expected)
    check_schema(messages, reply.tables, len(reply.header.classes), expected.dimension, first)


def check_class_number(classes: Sequence[str]) -> None:
    """Check the number of classes of all sites together, which can exceed the limit even if no
    single site does.

    Args:
        classes: of all sites.

    Raises:
        RunError: for too many classes.
    """
    if len(classes) > MOST_CLASSES:
        raise RunError(
            f"the sites name {len(classes)} classes together, above the limit of {MOST_CLASSES}; "
            "set classes"
        )


def check_surrogate(surrogate: AnySurrogate, expected: Expectation) -> None:
    """Check that all numbers of a surrogate are usable for learning.

    `mechanism.check_stated` checks the privacy claim.

    Args:
        surrogate: of a site.
        expected: of the run.

    Raises:
        SurrogateError: naming field and value, if one is not.
    """
    check_header(surrogate.header, expected)
    dimension = surrogate.dimension
    if expected.dimension and dimension != expected.dimension:
        raise SurrogateError(
            f"features of dimension {dimension}, the other sites have {expected.dimension}"
        )
    if isinstance(surrogate, SumsSurrogate):
        _check_sums(surrogate, expected)
    else:
        _check_mixtures(surrogate, expected)


def _check_sums(surrogate: SumsSurrogate, expected: Expectation) -> None:
    sums, dimension = surrogate.sums, surrogate.dimension
    if expected.classes and surrogate.header.classes != expected.classes:
        raise SurrogateError("noisy sums of other classes than the run's, or in another order")
    wanted = {"spherical": 0, "diag": dimension}.get(
        expected.family, dimension * (dimension + 1) // 2
    )
    count = 0 if sums.squares is None else len(sums.squares)
    if count != wanted:
        raise SurrogateError(
            f"second moments of {count} numbers; covariance {expected.family!r} needs {wanted}"
        )
    for name, table in {"counts": sums.counts, "sums": sums.sums, "squares": sums.squares}.items():
        if table is not None and not table.isfinite().all():
            raise SurrogateError(f"{name} hold a number that is not finite")
    if sums.counts.abs().max() > LARGEST_COUNT:
        raise SurrogateError(
            f"a class of {float(sums.counts.abs().max()):g} records; {LARGEST_COUNT} at most"
        )
    for name, length, most in lengths(sums):
        if bool((length > most).any()):
            worst = int((length - most).argmax())
            raise SurrogateError(
                f"{name} of length {float(length[worst]):.4g}; for this number of records and the "
                f"noise, at most {float(most[worst]):.4g} is allowed"
            )


def _check_mixtures(surrogate: Surrogate, expected: Expectation) -> None:
    mixtures = surrogate.mixtures
    if not expected.allows(mixtures.family, surrogate.dimension):
        raise SurrogateError(f"covariance {mixtures.family!r}, expected {expected.family!r}")
    if int(mixtures.components.max()) > expected.components:
        raise SurrogateError(
            f"{int(mixtures.components.max())} components in a class; at most "
            f"{expected.components} are allowed"
        )
    covariance = mixtures.covariance
    if isinstance(covariance, Gram):
        _check_gram(covariance.matrix, mixtures.counts)
    if isinstance(covariance, LowRank) and covariance.factor.shape[1] > expected.rank:
        raise SurrogateError(
            f"rank {covariance.factor.shape[1]}; at most {expected.rank} is allowed"
        )
    tables = {"weights": mixtures.weights, "means": mixtures.means} | vars(covariance)
    for name, table in tables.items():
        if not table.isfinite().all():
            raise SurrogateError(f"{name} hold a number that is not finite")
    mean, variance = mixtures.moments()
    if not (mean.abs().max() < LARGEST_NUMBER and variance.max() < LARGEST_NUMBER**2):
        raise SurrogateError(
            "means or variances are too large; means and deviations must be below "
            f"{LARGEST_NUMBER:g}"
        )
    totals = torch.zeros(len(mixtures.counts)).index_add_(0, mixtures.labels, mixtures.weights)
    if mixtures.weights.min() < 0 or (totals - 1).abs().max() > 0.01:
        raise SurrogateError(
            f"mixture weights of a class sum to {float(totals[(totals - 1).abs().argmax()]):.4g}, "
            "not to one"
        )


def _check_gram(matrix: Tensor, counts: Tensor) -> None:
    """Raise SurrogateError for a covariance within classes that no records with these counts have.

    At 16 bits an entry is rounded by at most HALF of itself, so eigenvalues move by at most HALF
    times the Frobenius norm of the correlations. N records of C classes have at most N - C
    directions, so tr(S)^2 is at most (N - C) |S|^2.
    """
    if not matrix.isfinite().all():
        raise SurrogateError("the covariance holds a number that is not finite")
    deviations = matrix.diagonal().clamp_min(1e-37).sqrt()
    correlations = (matrix / deviations / deviations[:, None]).double()
    if correlations.abs().max() > 1 + HALF:
        raise SurrogateError(
            f"a correlation of {float(correlations.abs().max()):.4g} in the covariance; at most 1 "
            "is possible"
        )
    correlations.diagonal().add_(HALF * float(correlations.norm()))
    if torch.linalg.cholesky_ex(correlations)[1]:
        raise SurrogateError(
            "a covariance that no records have: the matrix has a negative eigenvalue"
        )
    trace, freedom = float(matrix.double().trace()), int(counts.sum()) - len(counts)
    if (
        trace**2
        > 1.02 * max(freedom, 0) * float(matrix.double().square().sum())
        + (NO_VARIANCE * len(matrix)) ** 2
    ):
        raise SurrogateError(
            f"a covariance with more directions than {int(counts.sum())} records of {len(counts)} "
            "classes can have; the counts or the covariance are wrong"
        )
