"""Commands, settings and values that have another name since fedsurrogate 0.2.0, or are no more:
`renamed.toml` has their tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Today's name of each command, of each setting of a run, a site or its policy, of each line of a kit's
# `.env`, and of each value by today's key.
RENAMED: dict[str, dict[str, str]] = _TABLES["commands"]
SETTINGS: dict[str, str] = _TABLES["settings"]
SETTING_LINES: dict[str, str] = _TABLES["setting-lines"]
VALUES: dict[str, dict[str, str]] = _TABLES["values"]
# Methods that are no more; fedsurrogate 0.2.0 was the last with them.
GONE_METHODS = ("afl", "fedbe", "fedcof", "fedcgs", "fedkt", "gh-ofl")
# Settings that are no more: the value that asked for nothing, and what any other one asked for; and
# what single values of settings that are there asked for.
GONE_SETTINGS: dict[str, tuple[Any, str]] = {
    key: (value, each["why"])
    for each in _TABLES["gone-settings"]
    for key, value in each["nothing"].items()
}
GONE_VALUES = [(each["key"], each["value"], each["why"]) for each in _TABLES["gone-values"]]


def renamed_setting(key: str, value: object) -> str:
    """What to say of a setting, or of its value, that had another name; empty for any other."""
    new = SETTINGS.get(key, key)
    today = VALUES.get(new, {}).get(value, "") if isinstance(value, str) else ""
    if new == key and not today:
        return ""
    return f"{key} = {value!r} is now {new} = {today!r}" if today else f"{key} is now {new}"


def of_today(flat: Mapping[str, T]) -> dict[str, T]:
    """Settings that an earlier version may have stored, by the names of today."""
    found: dict[str, T] = {}
    for key, value in flat.items():
        new = SETTINGS.get(key, key)
        values: Mapping[Any, Any] = VALUES.get(new, {})
        found[new] = values.get(value, value) if isinstance(value, str) else value
    return found


def gone(program: str) -> dict[str, str]:
    """What to say of each command of `program` that is no more, by its words."""
    renamed = {
        old: f"`{program} {old}` is now `{program} {new}`" for old, new in RENAMED[program].items()
    }
    no_more = [each for each in _TABLES["gone-commands"] if each["program"] == program]
    return {words: each["why"] for each in no_more for words in each["words"]} | renamed
