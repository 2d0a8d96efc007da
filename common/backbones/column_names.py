"""Names of the columns of features that come from tables, such as data frames.

Columns are matched by name, never by position: named columns are put in one public order wherever they
are read, and their names are part of the features' fingerprint. So they travel with every message and
model, and features of other columns never meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.identity import normal
from fedsurrogate.common.limits import LONGEST_FINGERPRINT

# Names that an error shows of each list, and characters of each.
MOST_SHOWN, LONGEST_SHOWN = 12, 30


def in_column_order(given: Iterable[object]) -> tuple[tuple[str, ...], list[int]]:
    """Names of columns in their public order: as numbers if all are whole numbers, else as texts.

    Args:
        given: names in the order of a table.

    Returns:
        The names, and the position of each in the table; no names where they only number the columns,
        as data frames without names do, or where all columns have one name.

    Raises:
        DataError: for a name that is missing or stands twice.

    Example:
        >>> in_column_order(["bmi", "age"]), in_column_order([1, 0, 2])
        ((('age', 'bmi'), [1, 0]), ((), [1, 0, 2]))
    """
    names = [normal(str(name)) for name in given]
    if len(names) > 1 and len(set(names)) == 1:
        return (), list(range(len(names)))
    if wrong := [name for name in names if not name or names.count(name) > 1]:
        raise DataError(
            f"features have the column {wrong[0]!r} twice (blanks at the ends do not count); rename one"
            if wrong[0]
            else "features have a column without a name; name it"
        )
    whole = all(name.isascii() and name.isdecimal() and len(name) < 10 for name in names)
    order = sorted(range(len(names)), key=lambda at: (int(names[at]) if whole else 0, names[at]))
    found = tuple(names[at] for at in order)
    if found == tuple(map(str, range(len(found)))):
        return (), order
    return found, order


def with_columns(fingerprint: str, names: Sequence[str]) -> str:
    """The fingerprint of features with these columns.

    Args:
        fingerprint: of the features.
        names: of `in_column_order`; empty for none.

    Raises:
        DataError: for names that are too long for a message.

    Example:
        >>> with_columns("features-2", ["age", "bmi"])
        'features-2["age","bmi"]'
    """
    found = fingerprint + (json.dumps(list(names), separators=(",", ":")) if names else "")
    if len(found) > LONGEST_FINGERPRINT:
        raise DataError(
            f"the names of {len(names)} columns take {len(found)} characters; a message holds "
            f"{LONGEST_FINGERPRINT}; shorten them, or give arrays with the same columns at all sites"
        )
    return found


def columns_in(fingerprint: str) -> tuple[str, ...]:
    """The names in a fingerprint of `with_columns`; empty without any: sites write the fingerprint.

    Example:
        >>> columns_in('features-2["age","bmi"]^0.5'), columns_in("features-2")
        (('age', 'bmi'), ())
    """
    _, mark, text = fingerprint.partition("[")
    try:
        names, _ = json.JSONDecoder().raw_decode(mark + text)
    except (ValueError, RecursionError):
        return ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def shown(fingerprint: str) -> str:
    """What an error shows of a fingerprint: the columns where they have names, else its beginning.

    Example:
        >>> shown('features-2["age","bmi"]'), shown("0123456789abcdef0")
        ("(columns 'age', 'bmi')", '0123456789abcdef')
    """
    names = columns_in(fingerprint)
    return f"(columns {listed(names)})" if names else fingerprint[:16]


def check_columns(own: Sequence[str], wanted: Sequence[str], whose: str) -> None:
    """Refuse features of other columns.

    Args:
        own: names of the columns, of `in_column_order`; empty for none.
        wanted: the same of what they are compared with.
        whose: these are, such as "the model".

    Raises:
        DataError: with both lists.
    """
    if tuple(own) == tuple(wanted):
        return
    if not wanted:
        raise DataError(
            f"the features have the columns {listed(own)}, but those of {whose} have no names; give "
            "an array with the columns in its order, such as frame.to_numpy()"
        )
    if not own:
        raise DataError(
            f"the features have no names of columns, and {whose} has {listed(wanted)}; give a data "
            "frame with these names, such as pandas.DataFrame(x, columns=[...])"
        )
    missing, more = ([n for n in a if n not in b] for a, b in ((wanted, own), (own, wanted)))
    raise DataError(
        f"the features have the columns {listed(own)}, and {whose} has {listed(wanted)}; "
        f"missing: {listed(missing)}; too many: {listed(more)}; rename or select columns"
    )


def listed(names: Sequence[str]) -> str:
    """Names for an error, the first of many."""
    more = f", ... ({len(names)} in all)" if len(names) > MOST_SHOWN else ""
    return (", ".join(repr(name[:LONGEST_SHOWN]) for name in names[:MOST_SHOWN]) or "none") + more
