"""AFL and FedCGS: linear heads from class counts, class sums and one second moment of all records."""

from __future__ import annotations

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.solvers import Solution, gaussian, ridge
from fedsurrogate.strategies.closed_form.solving import repair_facts
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.closed_form.strategy import FromStatistics, Made


class Analytic(FromStatistics):
    """Least squares on the records of all sites together (AFL, He et al. 2025).

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = Analytic({"method": "afl"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="afl") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Head', ('0', '1', '2'))
    """


class GlobalStatistics(FromStatistics):
    """The global model of FedCGS (Guan et al. 2025), without training.

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = GlobalStatistics({"method": "fedcgs"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="fedcgs") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Head', ('0', '1', '2'))
    """


def afl_model(statistics: Statistics, header: Header, shrinkage: float) -> Made:
    """Least squares on the records of all sites.

    `afl.ridge` zero asks for the exact solution, so a covariance without an inverse is refused.
    With a ridge that is too small for it, a larger one is added and stated.

    Args:
        statistics: of all sites.
        header: of the coordinator.
        shrinkage: `afl.ridge`, as a share of the mean variance.

    Returns:
        The head, and the ridge that was added, if any.

    Raises:
        RunError: if the ridge is zero and the covariance has no inverse.
    """
    solution = ridge(statistics, shrinkage)
    if solution.added and not shrinkage:
        raise RunError(
            "afl.ridge = 0: the covariance has no inverse; set afl.ridge above 0, such as 0.1"
        )
    return _stated(solution, header)


def fedcgs_model(statistics: Statistics, header: Header, shrinkage: float) -> Made:
    """The Gaussian classifier of the class means and of one covariance of all records.

    Args:
        statistics: of all sites.
        header: of the coordinator.
        shrinkage: `fedcgs.ridge`, as a share of the mean variance.

    Returns:
        The head, and the ridge that was added, if any.
    """
    return _stated(gaussian(statistics, shrinkage), header)


def _stated(solution: Solution, header: Header) -> Made:
    """The head of a solution, and the ridge that a singular covariance took."""
    return solution.head(header), repair_facts(solution.added)
