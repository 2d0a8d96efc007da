"""What a person should know of a privacy budget that is larger than budgets are meant to be."""

from __future__ import annotations

# Above it the bound on what a release shows of one record is no protection by itself.
LARGE_EPSILON = 20.0


def budget_remarks(epsilon: float, delta: float, records: int = 0) -> list[str]:
    """Remarks on a budget, a sentence each.

    Args:
        epsilon: of a run; 0 without privacy.
        delta: of the run.
        records: at the site that has fewest; 0 if unknown.

    Example:
        >>> budget_remarks(8.0, 1e-5, 1500)
        []
        >>> [each.partition(":")[0] for each in budget_remarks(1000.0, 0.01, 1500)]
        ['epsilon = 1000 is above 20', 'delta = 0.01 is above 1 / 1500 records of a site']
    """
    found = []
    if epsilon > LARGE_EPSILON:
        found.append(
            f"epsilon = {epsilon:g} is above {LARGE_EPSILON:g}: a release with it may show a record; "
            "budgets of 1 to 10 are usual"
        )
    if epsilon and records and delta > 1 / records:
        found.append(
            f"delta = {delta:g} is above 1 / {records} records of a site: whole records may be shown "
            f"with that chance each; take one far below, such as {0.1 / records:.0e}"
        )
    return found
