"""Pins as files, and how the present differs from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import Scalar, parse_overrides
from tests.pins import combinations, facts

HERE = Path(__file__).parent
SETTINGS, WIRE, REFUSALS = HERE / "settings", HERE / "wire.json", HERE / "refusals.json"
RENEW = "PYTHONPATH=. python tests/pins/renew.py --renew"
# Digests change with every setting that a site's reply depends on, and often nothing else does.
DIGESTS = ("digest", "sum.context")
CLOSE = 1e-9
MOST_SHOWN = 25
ANY = f"'(?:{'|'.join(facts.methods())})'"
LISTED = re.compile(f"{ANY}(?:(?:, | or ){ANY})+")
Pins = dict[str, Any]
Found = facts.Facts | str


def consequences(settings: Mapping[str, Scalar]) -> Found:
    """The facts, or the text of the refusal."""
    try:
        return facts.facts(settings)
    except ConfigError as error:
        return str(error)


def of_subject(settings: Mapping[str, Scalar]) -> Found:
    """The same, but METHODS stands for a list of methods in a refusal: a new one then changes no pins of
    others. `refusals` has each such list.
    """
    found = consequences(settings)
    return LISTED.sub("METHODS", found) if isinstance(found, str) else found


def pins_of_settings() -> dict[str, Pins]:
    """By subject: the facts of its run, and what every variation changes of them.

    base: all facts of the first run of a method, for the others what differs from it. digests:
    variations that change only digests. changed: what others change; null for a fact that is no
    more. refused: variations by the text of the refusal. Variations that are not listed change
    nothing.
    """
    found: dict[str, Pins] = {}
    for name, settings, first in _with_first():
        base = of_subject(settings)
        pins: Pins = {"settings": combinations.as_text(settings), "base": _delta(first, base)}
        if isinstance(base, str):
            found[name] = pins
            continue
        digests: Pins = {}
        changed: Pins = {}
        refused: dict[str, list[str]] = {}
        for variation in combinations.variations(name, settings):
            what, now = combinations.as_text(variation), of_subject(settings | variation)
            if isinstance(now, str):
                refused.setdefault(now, []).append(what)
            elif (delta := _delta(base, now)).keys() == {name for name in DIGESTS if name in base}:
                digests[what] = " ".join(delta.values())
            elif delta:
                changed[what] = delta
        found[name] = pins | {"digests": digests, "changed": changed, "refused": refused}
    return found


def _with_first() -> Iterator[tuple[str, combinations.Flat, facts.Facts]]:
    """Every subject with the facts of the first subject of its method that is not refused; none for
    that one itself.
    """
    firsts: dict[str, facts.Facts] = {}
    for name, settings in combinations.subjects(facts.methods(), facts.kinds_of_counts()):
        method = name.partition(",")[0]
        yield name, settings, firsts.get(method, {})
        base = of_subject(settings)
        if method not in firsts and not isinstance(base, str):
            firsts[method] = base


def _delta(base: facts.Facts, now: Found) -> Any:
    if isinstance(now, str):
        return now
    changed = {
        name: value for name, value in now.items() if name not in base or base[name] != value
    }
    return changed | {name: None for name in base if name not in now}


def refusals() -> dict[str, Found]:
    """The text with which each of the wrong settings is refused; the facts of settings that are
    not.
    """
    typed = [parse_overrides([text]) for text in combinations.TYPED]
    wrong = [*combinations.WRONG, *typed, *({key: -1} for key in facts.setting_keys())]
    return {combinations.as_text(settings): consequences(settings) for settings in wrong}


def expected(pins: Mapping[str, Pins]) -> dict[str, Found]:
    """Every run in words, and its facts in full or its refusal, as pins have them."""
    found: dict[str, Found] = {}
    firsts: dict[str, facts.Facts] = {}
    variations = {
        name: [combinations.as_text(each) for each in combinations.variations(name, settings)]
        for name, settings in combinations.subjects(facts.methods(), facts.kinds_of_counts())
    }
    for name, own in pins.items():
        method = name.partition(",")[0]
        base = found[name] = _after(firsts.get(method, {}), own["base"])
        if isinstance(base, str):
            continue
        firsts.setdefault(method, base)
        found |= {f"{name}: {what}": base for what in variations.get(name, [])}
        found |= {
            f"{name}: {what}": base | dict(zip(DIGESTS, digests.split(), strict=False))
            for what, digests in own["digests"].items()
        }
        found |= {f"{name}: {what}": _after(base, delta) for what, delta in own["changed"].items()}
        found |= {
            f"{name}: {what}": text for text, names in own["refused"].items() for what in names
        }
    return found


def _after(base: facts.Facts, delta: Any) -> Any:
    if isinstance(delta, str):
        return delta
    return {name: value for name, value in (base | delta).items() if value is not None}


def differences(pins: Mapping[str, Found], now: Mapping[str, Found]) -> Iterator[str]:
    """A line for every value that differs, and for every run that is only on one side."""
    for name in [*pins, *(each for each in now if each not in pins)]:
        before, after = pins.get(name), now.get(name)
        if before is None or after is None:
            yield f"{name}: {'not pinned' if before is None else 'pinned, but not there any more'}"
        elif isinstance(before, str) or isinstance(after, str):
            if before != after:
                yield f"{name}\n    was {_shown(before)}\n    is  {_shown(after)}"
        else:
            for fact in [*before, *(each for each in after if each not in before)]:
                old, new = before.get(fact), after.get(fact)
                if not same(old, new, CLOSE if fact.startswith(facts.SOLVED) else 0.0):
                    yield f"{name}\n    {fact} was {old!r}\n    {' ' * len(fact)} is  {new!r}"


def _shown(found: Found) -> str:
    return f"refused: {found}" if isinstance(found, str) else "accepted"


def same(old: object, new: object, close: float) -> bool:
    """Whether two values of JSON are equal, numbers up to the relative distance `close`."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(
            same(a, b, close) for a, b in zip(old, new, strict=True)
        )
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=close, abs_tol=0.0)
    return type(old) is type(new) and old == new


def report(lines: list[str], renew: str = RENEW) -> str:
    """Differences for a reader, and the command that accepts them."""
    more = f"\n... and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
    shown = "\n".join(lines[:MOST_SHOWN])
    return (
        f"{len(lines)} pinned values differ:\n{shown}{more}\nIf this change is wanted, say why in "
        f"its commit, and renew the pins: {renew}"
    )


def read_settings() -> dict[str, Pins]:
    """The pins of settings, in the order of the files' names and of the subjects in them."""
    return {
        name: own
        for file in sorted(SETTINGS.glob("*.json"))
        for name, own in json.loads(file.read_text()).items()
    }


def write_settings(pins: Mapping[str, Pins]) -> None:
    """Write one file for each method, one line for each variation; files of methods that are no
    more are deleted.
    """
    files: dict[str, dict[str, Pins]] = {}
    for name, own in pins.items():
        files.setdefault(name.partition(",")[0].replace(" ", "-"), {})[name] = own
    SETTINGS.mkdir(exist_ok=True)
    for file in SETTINGS.glob("*.json"):
        file.unlink()
    for stem, content in files.items():
        (SETTINGS / f"{stem}.json").write_text(as_json(content))


def as_json(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the second or third level."""
    return _lines(content, 3) + "\n"


def _lines(value: object, levels: int, indent: str = "") -> str:
    if not levels or not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = ",\n".join(
        f"{indent} {json.dumps(key, ensure_ascii=False)}: {_lines(each, levels - 1, indent + ' ')}"
        for key, each in value.items()
    )
    return f"{{\n{inner}\n{indent}}}"
