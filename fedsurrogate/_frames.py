"""Tables as data frames of pandas, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas data frame with one row for each mapping. Raises ConfigError without the extra `pandas`."""
    try:
        import pandas as pd
    except ImportError:
        raise ConfigError("pandas is not installed; it is the extra `pandas`: pip install 'fedsurrogate[pandas]'") from None
    return pd.DataFrame(rows)
