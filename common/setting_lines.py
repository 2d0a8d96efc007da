"""The one reader of files with lines NAME=VALUE: a kit's and a federation's `.env`, and what lets a
site into its PACS.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from .errors import ConfigError
from .renamed import SETTING_LINES

# Of compose itself and of the compose files that both sides have.
OF_COMPOSE = (
    *("IMAGE", "RUN_AS", "MEMORY", "LOG_FORMAT"),
    *("COMPOSE_FILE", "COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"),
    *("DASHBOARD", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE", "GRAFANA_PASSWORD", "GRAFANA_PORT"),
)
# Compose reads these otherwise than as they stand there.
_DIFFERS = re.compile(r"""["\\$]|\s#|^['#]""")


def read_setting_lines(
    file: Path, known: Collection[str], *, secret: bool = False
) -> dict[str, str]:
    """Read settings. Nothing is evaluated: a value is what stands between = and the end of its line.

    Empty lines, and lines that start with #, are left out.

    Args:
        file: UTF-8, a byte-order mark may stand before it.
        known: names that may stand there, each once.
        secret: whether values are secrets: others may not read the file, no error shows a value, and any
            printable sign may stand in one. Elsewhere none that compose reads otherwise.

    Returns:
        The values by name, without blanks around them.

    Raises:
        ConfigError: that names file and line.
        OSError: the file cannot be read.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / ".env").write_text("# of north\\nSITE=north\\n")
        ...     read_setting_lines(Path(folder) / ".env", {"SITE"})
        {'SITE': 'north'}
    """
    if secret and file.stat().st_mode & 0o077:
        raise ConfigError(f"'{file}' can be read by others; type chmod 600 '{file}'")
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"'{file}' is not UTF-8; save it so") from None
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        place, value = f"'{file}', line {number}", value.strip()
        if new := SETTING_LINES.get(name):
            raise ConfigError(f"{place}: {name} is now {new}; write that, with the same value")
        if not equals or name not in known:
            shown = "it" if secret else repr(name[:80])
            raise ConfigError(
                f"{place}: {shown} is no setting; there are {', '.join(sorted(known))}, each as NAME=VALUE"
            )
        if name in values:
            raise ConfigError(f"{place}: {name} stands there twice; remove one line")
        if not value.isprintable() or (not secret and _DIFFERS.search(value)):
            raise ConfigError(
                f"{place}: {name} has a quotation mark, a backslash, $, a comment or a control character; "
                "write values as they are, and comments on lines of their own"
            )
        values[name] = value
    return values
