"""The registry of targets: each kind of target has one file here. A new one is such a file, its name in
`TARGETS`, and a head with its line in strategies/targets/strategy.py.
"""

from __future__ import annotations

from ..errors import ConfigError
from ..settings import Settings
from ..settings.base import short
from .labels import LABELS
from .number import NUMBER
from .target import Kind, Target
from .time import TIME

TARGETS: dict[str, Kind] = {kind.name: kind for kind in (LABELS, NUMBER, TIME)}
CLASS = "classification"
# What people call tasks elsewhere.
MEANT = {
    "times": "survival",
    "time-to-event": "survival",
    "cox": "survival",
    "numbers": "regression",
    "value": "regression",
    "multi-label": "multilabel",
    "label": "multilabel",
    "multiclass": CLASS,
    "classes": CLASS,
}


def target_of(settings: Settings, trains: bool = False) -> Target | None:
    """The target of a run; None for classes, which need no code.

    Args:
        settings: of the run.
        trains: whether sites train a model in rounds.

    Raises:
        ConfigError: for an unknown one, or settings that do not agree.
    """
    if settings.task != CLASS and settings.task not in TARGETS:
        *names, last = (repr(name) for name in (CLASS, *TARGETS))
        meant = MEANT.get(settings.task.casefold())
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise ConfigError(
            f"task = {short(settings.task)}: must be {', '.join(names)} or {last}{hint}"
        )
    own = TARGETS.get(settings.task)
    used = set(() if own is None else own.settings)
    for kind in TARGETS.values():
        for key in kind.settings:
            given = getattr(settings, key) != type(settings).model_fields[key].default
            if given and key not in used:
                raise ConfigError(
                    f"{key.replace('_', '-')} works only with task = {kind.name!r}, not "
                    f"{settings.task!r}; set that, or remove it"
                )
    if own is None or not trains:
        return None if own is None else own.make(settings)
    for key, value in own.trained.items():
        given = getattr(settings, key)
        if given not in (type(settings).model_fields[key].default, value):
            raise ConfigError(
                f"{key.replace('_', '-')} = {short(str(given))} is for methods that learn from sums, "
                f"not method = {settings.method!r}; remove it"
            )
    return own.make(settings.model_copy(update=own.trained)).for_training()
