"""Tables as data frames of pandas, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsurrogate.common.extras.packages import needed_for


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas data frame with one row for each mapping.

    Args:
        rows: values by column.

    Raises:
        PackageError: without the extra `pandas`.
    """
    with needed_for("a data frame"):
        import pandas as pd
    return pd.DataFrame(rows)
