"""One identity: the normal form of names of classes, patients, sites and columns.

Names are equal if their normal forms are equal, character by character: Unicode NFC, without
whitespace, or other characters that cannot be seen, at either end. Tables, folders, DICOM headers,
arrays of Python and settings all use these functions, so that a name is one name wherever it stands.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable
from decimal import Decimal
from functools import lru_cache
from numbers import Real

from .errors import DataError, SurrogateError
from .escapes import BLANK_LETTERS

# Categories of characters without a shape of their own, which `str.strip` does not know: controls, such
# as the NUL that pads a field; and formats, such as zero-width spaces, marks of the direction of
# writing, and the mark at the beginning of some files.
INVISIBLE = ("Cc", "Cf")
# What stands for a missing value in a text: the list of pandas (`read_csv`, na_values), NaT, and what
# spreadsheets write for a formula that failed.
NO_VALUE = frozenset(
    {
        *(
            "",
            "#N/A",
            "#N/A N/A",
            "#NA",
            "#DIV/0!",
            "#NAME?",
            "#NULL!",
            "#NUM!",
            "#REF!",
            "#VALUE!",
        ),
        *("-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "-NaN", "-nan", "NaN", "nan", "NaT"),
        *("<NA>", "N/A", "NA", "n/a", "NULL", "null", "None"),
    }
)
# A whole number as libraries write it in a column of floating point, also rounded to "-0".
WHOLE = re.compile(r"(-?)(0|[1-9][0-9]*)(?:\.0+)?")

# Of names that people decide by: letters, the marks on them, digits; and signs beside them.
PLAIN = ("Lu", "Ll", "Lo", "Lt", "Mn", "Mc", "Nd")
SIGNS = " .,'\u2019&()/+:-"
WRITTEN_TOGETHER = ({"CJK", "HIRAGANA", "KATAKANA"}, {"CJK", "HANGUL"}, {"CJK", "BOPOMOFO"})
# Letters of Cyrillic, Greek and Armenian that look like Latin ones.
LIKE_LATIN = frozenset(
    "\u0430\u0441\u0435\u043e\u0440\u0445\u0443\u0456\u0458\u0455\u0501\u051b\u051d\u04bb\u04cf"
    "\u0410\u0412\u0421\u0415\u041d\u041a\u041c\u041e\u0420\u0422\u0425\u0423\u0406\u0408\u0405\u04ae"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf\u03bd"
    "\u03b9\u03ba\u03c1\u03c5\u0578\u0585\u057d\u0570\u0581\u0566"
)

# Two classes that say yes and no, in each way of writing it.
TRUTHS = (
    frozenset({"true", "false"}),
    frozenset({"1", "0"}),
    frozenset({"yes", "no"}),
    frozenset({"present", "absent"}),
    frozenset({"positive", "negative"}),
    frozenset({"pos", "neg"}),
    frozenset({"y", "n"}),
    frozenset({"t", "f"}),
)

ROUNDED = re.compile(r"[0-9]([.,][0-9]+)?[eE]\+[0-9]+")


@lru_cache(maxsize=4096)
def normal(text: str) -> str:
    """The normal form of a name: NFC, without whitespace of any kind at its ends.

    Args:
        text: perhaps with bytes that are no text, as in names of files; these stay.

    Example:
        >>> normal("\\u3000e\\u0301levated\\xa0") == "\\xe9levated"
        True
    """
    text = unicodedata.normalize("NFC", text)
    start, end = 0, len(text)
    while start < end and _blank(text[start]):
        start += 1
    while start < end and _blank(text[end - 1]):
        end -= 1
    return text[start:end]


def _blank(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) in INVISIBLE


def name_of(value: object, names: Iterable[str] = ()) -> str | None:
    """The name of a class, patient or site, from a cell of a table or an array.

    Args:
        value: a text, its bytes in UTF-8, a truth value or a number. A whole number that is stored
            as floating point is named as an integer, and so is its text: "0.0" is "0".
        names: that are names even if they stand for a missing value elsewhere, such as "None".

    Returns:
        The normal form; None for a missing value: None, NaN, NaT, NA, a text without a character
        that can be seen, or one of NO_VALUE.

    Raises:
        TypeError: for a value of another type, a complex number or infinity.

    Example:
        >>> name_of(" No finding "), name_of(1.0), name_of("1.0"), name_of(True), name_of(0.5)
        ('No finding', '1', '1', 'True', '0.5')
        >>> name_of(float("nan")), name_of("n/a"), name_of("None", ["None"])
        (None, None, 'None')
    """
    if isinstance(value, bytes | bytearray):
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError:
            raise TypeError("bytes that are not UTF-8") from None
    if isinstance(value, str):
        text = normal(value)
        if text in NO_VALUE and text not in names:
            return None
        if whole := WHOLE.fullmatch(text):
            sign, digits = whole.groups()
            return digits if digits == "0" else sign + digits
        return text
    if is_missing(value):
        return None
    if type(value).__name__ in ("bool", "bool_"):
        return str(bool(value))
    # To numpy a duration is a whole number.
    if isinstance(value, Real | Decimal) and type(value).__name__ != "timedelta64":
        try:
            # Otherwise their own text: single precision has fewer digits than double precision.
            number = int(value)  # type: ignore[arg-type]
            return str(number) if value == number else str(value)
        except (ArithmeticError, ValueError):
            # Its text would not be written, either.
            raise TypeError(
                f"a value of type {type(value).__name__}: infinity, or more digits than Python writes"
            ) from None
    raise TypeError(f"a value of type {type(value).__name__}: {str(value)[:40]}")


def distinct_names(names: Collection[object], what: str) -> tuple[str, ...]:
    """Names in bytes of another party, as they are: all have to be names, and no two one name.

    Every parser reads lists of names with this function. A name that stands twice would make a record
    count twice.

    Args:
        names: that were received.
        what: they name, for the message.

    Raises:
        SurrogateError: for a value that is no text, a text without a character that can be seen, or
            two that are one name.

    Example:
        >>> distinct_names(["edema", "mass"], "class")
        ('edema', 'mass')
    """
    found = tuple(each for each in names if isinstance(each, str) and normal(each))
    if len(found) < len(names):
        raise SurrogateError(f"a {what} without a name")
    if len({normal(each) for each in found}) < len(found):
        raise SurrogateError(f"a {what} is named twice")
    return found


def is_missing(value: object) -> bool:
    """Whether a value that is no text stands for a missing one: None, NaN, NaT, NA, or masked."""
    if value is None or type(value).__name__ in ("NAType", "NaTType", "MaskedConstant"):
        return True
    try:
        # NaN, and NaT of numpy, are the only values that differ from themselves.
        return bool(value != value)
    except (ArithmeticError, TypeError, ValueError, RuntimeError):
        return False


def is_text(name: str) -> bool:
    """Whether a name is Unicode; names of files may hold bytes that are none."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def likely_one(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of different names that are likely one: they differ only by case, by the form of a
    character (wide, ligature), by blanks inside, or, as spreadsheets write numbers, by zeros in front.

    Args:
        names: in normal form.

    Returns:
        Each group, sorted.

    Example:
        >>> likely_one(["Nevus", "nevus", "mel", "No  finding", "no finding"])
        [('Nevus', 'nevus'), ('No  finding', 'no finding')]
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for name in names:
        groups[_folded(name)].add(name)
    return sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1)


def likely_one_warnings(names: Iterable[str]) -> list[str]:
    """A sentence for each group of `likely_one`."""
    return [
        f"the classes {', '.join(map(repr, group))} are likely one; they differ only by case, "
        "blanks or zeros in front"
        for group in likely_one(names)
    ]


def write_other_truths(own: Collection[str], other: Collection[str]) -> bool:
    """Whether two lists of classes say yes and no in different ways, so that two classes would become
    four.

    Args:
        own: names in normal form.
        other: the same.

    Example:
        >>> write_other_truths(["False", "True"], ["0", "1"]), write_other_truths(["yes"], ["no", "yes"])
        (True, False)
        >>> write_other_truths(["no", "yes"], ["No", "Yes"]), write_other_truths("0123", ["no", "yes"])
        (True, False)
    """
    kinds = [
        next((kind for kind in TRUTHS if names and {n.casefold() for n in names} <= kind), None)
        for names in (own, other)
    ]
    return None not in kinds and (kinds[0] != kinds[1] or len({*own, *other}) > 2)


def check_one_truth(lists: Iterable[Collection[str]]) -> None:
    """Refuse lists of which two say yes and no in different ways.

    Args:
        lists: of classes, such as one of each site.

    Raises:
        DataError: with two of the lists.
    """
    known = [sorted(set(each)) for each in lists]
    for own in known:
        if write_other_truths(known[0], own):
            named = f"the classes {', '.join(known[0])}"
            named += "" if own == known[0] else f" in one place and {', '.join(own)} in another"
            raise DataError(
                f"{named} are likely the same in other words; write the same names everywhere, or set "
                "classes"
            )


def _folded(name: str) -> str:
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    seen = (each for each in text if unicodedata.category(each) != "Cf")
    folded = " ".join("".join(seen).split())
    return folded.lstrip("0") or "0" if folded.isdecimal() else folded


def unclear(name: str) -> str:
    """Why people may read a name as another one, or as what is none; empty if they do not.

    A name that decides whom a person lets in has letters of one script, digits, single blanks and a
    few signs, and looks like nothing else: no markup, nothing invisible, no wide or joined forms.

    Args:
        name: of a hospital.

    Example:
        >>> unclear("St. Mary's (North)"), unclear("St. M\u0430ry")
        ('', 'letters of several scripts')
    """
    letters = [each for each in name if unicodedata.category(each)[0] == "L"]
    scripts = {unicodedata.name(each, "?").split()[0] for each in letters}
    if unicodedata.normalize("NFKC", name) != name or " ".join(name.split()) != name:
        return "wide or joined forms, or blanks that are not single ones between words"
    if any(not (unicodedata.category(each) in PLAIN or each in SIGNS) for each in name):
        return f"a character that is no letter, no digit, and none of {SIGNS.strip()}"
    if not letters or BLANK_LETTERS.keys() & set(map(ord, name)):
        return "no letter that can be seen"
    if len(scripts) > 1 and not any(scripts <= each for each in WRITTEN_TOGETHER):
        return "letters of several scripts"
    if "LATIN" not in scripts and all(each in LIKE_LATIN for each in letters):
        return "letters that all look like Latin ones"
    return ""


def rounded(name: str) -> bool:
    """Whether a name is a number in the short form of spreadsheets, which has lost its last digits.

    Args:
        name: in normal form.

    Example:
        >>> rounded("1.2E+11"), rounded("1,2E+11"), rounded("12e4"), rounded("120000000000")
        (True, True, False, False)
    """
    return ROUNDED.fullmatch(name) is not None
