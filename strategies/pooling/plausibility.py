"""The sum over all sites that a secure sum gives to a method, and totals that no records can have. Nothing
shows which site added the false numbers, so the run ends.

With joint noise the bounds are those of `lengths` (common/surrogates/class_sums.py), which honest
Gaussian noise exceeds with a probability of at most FALSE_ALARM = 1e-7 in one total. Discrete
Gaussian noise is sub-Gaussian with the same deviation, so the length of D numbers exceeds sqrt(D) +
t no more often (Hsu, Kakade & Zhang 2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import Sums, lengths, unfold
from fedsurrogate.common.surrogates.columns import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header


@dataclass(frozen=True)
class Total:
    """Tensors summed over all sites.

    Attributes:
        header: of the run, with all its classes.
        tensors: the sums, float64, by name.
        sigmas: standard deviation of the noise in every entry, by tensor; empty without privacy.
        claim: of every site; None without privacy.
        public: what was done with the features before all else.
        rounding: by tensor, most that rounding to whole steps has changed an entry.
        usual_rounding: by tensor, the standard deviation of this change.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    sigmas: Mapping[str, float] = field(default_factory=dict)
    claim: Mechanism | None = None
    public: PublicMap = field(default_factory=PublicMap)
    rounding: Mapping[str, float] = field(default_factory=dict)
    usual_rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def dimension(self) -> int:
        """Columns of the sites' features before the public map."""
        projection = self.public.projection
        return (self.tensors["sums"] if projection is None else projection).shape[1]

    def mapped(self, head: Head, frame: bytes) -> Head:
        """A head of the summed features, as one of the sites' own: with what was done before all else.

        Args:
            head: that was learned from the sums.
            frame: of the columns, in which sites put their features first; empty for none.
        """
        header = replace(head.header, frame=frame)
        public = self.public
        return replace(head, header=header, projection=public.projection, centre=public.centre)


# Of the second moment's trace: a covariance that is further below zero cannot be repaired.
TRACE_TOLERANCE = 0.01
GRADIENTS = {
    "the count below zero": "a number of records below zero",
    "a class sum beyond its count": "a sum of shortened gradients beyond their number",
}


def check_moments(total: Total) -> None:
    """Check that some records can have these counts, class sums and second moments.

    A record has norm one under joint noise. Without noise, the squared length of a class sum over
    its count is at most that class's part of the second moment's trace.

    Args:
        total: counts (C,), sums (C, d) and perhaps squares, the folded second moment.

    Raises:
        RunError: for counts below zero, and for class sums or second moments that are too long for
            the counts; also where rounding hides whether they are.
    """
    counts, sums, squares = (
        total.tensors["counts"],
        total.tensors["sums"],
        total.tensors.get("squares"),
    )
    if total.sigmas:
        _check_lengths(Sums(counts, sums, squares, total.sigmas), {})
        return
    counts = counts.round()
    if float(counts.min()) < 0:
        raise false_numbers(f"a class of {float(counts.min()):g} records")
    if squares is None:
        if sums[counts <= 0].norm() > total.rounding.get("sums", 0.0) * math.sqrt(sums.numel()):
            raise false_numbers("features of a class without records")
        return
    d = sums.shape[1]
    trace, longest = float(unfold(squares, d).trace()), _squared(sums.norm(dim=1), counts)
    if longest <= trace + TRACE_TOLERANCE * abs(trace):
        return
    # What the sums and the trace are at least and at most, before whole steps.
    least = _squared(sums.norm(dim=1) - total.rounding.get("sums", 0.0) * math.sqrt(d), counts)
    if least > trace + total.rounding.get("squares", 0.0) * d:
        raise false_numbers("class sums longer than the second moment allows")
    raise RunError(
        "the features are so small that the fixed-point numbers of the secure sum round them away; "
        "set a smaller secure-sum-range (the largest magnitude of a feature) or secure-sum-records, "
        "after `site forget-sums` at each hospital"
    )


def check_gradients(total: Total) -> None:
    """Check a noisy sum of gradients, each of norm one at most.

    Args:
        total: records (1,) and gradients (p,), with the deviations of their noise.

    Raises:
        RunError: for a number of records below zero, or a sum of gradients that is longer than it.
    """
    noise = {"counts": total.sigmas["records"], "sums": total.sigmas["gradients"]}
    _check_lengths(
        Sums(total.tensors["records"], total.tensors["gradients"][None], None, noise), GRADIENTS
    )


def weight_of(total: Total, sites: int, each: float = 0.0) -> float:
    """The sum of the sites' weights.

    Args:
        total: with the tensor "records", their number at all sites together.
        sites: number of sites in the sum.
        each: the weight of every site where it is public; then no site can change it. 0 where the
            weight of a site is the number of its records.

    Raises:
        RunError: if there are no records.

    Example:
        >>> from fedsurrogate.common.surrogates.surrogates import Header
        >>> header = Header("fedavg", "0" * 16, "coordinator", "", ("a", "b"))
        >>> total = Total(header, {"records": torch.tensor([30.0], dtype=torch.float64)})
        >>> weight_of(total, sites=3), weight_of(total, sites=3, each=0.5)
        (30.0, 1.5)
    """
    if each:
        return sites * each
    records = float(total.tensors["records"].sum().round())
    if records < 0:
        raise false_numbers(f"{records:g} records")
    if not records:
        raise RunError("no site of the secure sum has enough records of any class of the run")
    return records


def false_numbers(what: str) -> RunError:
    """The error for a total that is not possible.

    Args:
        what: the secure sum has that no records can have.
    """
    return RunError(
        f"the secure sum has {what}, so some site has added false numbers, or more records than "
        "secure-sum-records, or without privacy features beyond secure-sum-range; nothing shows "
        "which one: run again with other sites, with larger ones of these, or with a defence instead "
        "of secure-sum"
    )


def _squared(lengths: Tensor, counts: Tensor) -> float:
    """Sum of squared lengths (C,) over counts (C,). A negative length is zero."""
    return float((lengths.clamp_min(0).square() / counts.clamp_min(1)).sum())


def beyond(sums: Sums, names: Mapping[str, str] = GRADIENTS) -> str:
    """What noisy sums have that no records can have, in words; empty for nothing.

    Args:
        sums: over records of norm one, with the deviations of their noise.
        names: what to say for a name of `lengths`.
    """
    for name, length, most in lengths(sums):
        if bool((length > most).any()):
            worst = int(torch.argmax(length - most))
            return (
                f"{names.get(name, name)} (length {float(length[worst]):.4g}; at most "
                f"{float(most[worst]):.4g} is possible for this number of records and the noise)"
            )
    return ""


def _check_lengths(sums: Sums, names: Mapping[str, str]) -> None:
    if what := beyond(sums, names):
        raise false_numbers(what)
