"""All tests of this folder go through SciPy's BLAS and LAPACK from eight columns on, as real features do;
the other tests, of few columns, go without.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def solvers_of_many_columns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsurrogate.strategies.closed_form.statistics.FEWEST", 8)
        yield
