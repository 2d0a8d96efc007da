"""The kit of a site: a folder with its key, its policy, and its settings in `.env`, which plain
processes, services, containers and jobs read alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.common.errors import ConfigError, told_as
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.setting_lines import OF_COMPOSE, read_setting_lines

from .node_config import NodeConfig

# Settings that are none of a site: of its connection and log, of containers and jobs.
OF_CONTAINERS = ("COORDINATOR", "PROXY", "SIF", *OF_COMPOSE)
# What a setting of a site is called in `.env`, where it has another name than there.
FOLDERS = {
    "DATA": "data_dir",
    "WEIGHTS": "weights_path",
    "HELD_OUT": "held_out_dir",
    "PEERS": "peers",
    "CHECK_LOG": "check_log_dir",
}
# These follow from where the kit is; and code is named by no file of the coordinator.
FIXED = {"policy", "coordinator_key", "state_dir", "cache_dir", "backbone", "data"}
PLAIN = {
    name.upper(): name
    for name in NodeConfig.model_fields
    if name not in {*FIXED, *FOLDERS.values()}
} | {"DATA_KIND": "data"}
# Where containers see a folder of the kit's machine: the setting that names it, and its default.
MOUNTS = {
    "/data": ("DATA", "data"),
    "/weights": ("WEIGHTS_DIR", "weights"),
    "/held-out": ("HELD_OUT_DIR", "held-out"),
    "/state": ("", "state"),
}
KNOWN = {*OF_CONTAINERS, *FOLDERS, *PLAIN, *(name for name, _ in MOUNTS.values())}


@dataclass(frozen=True)
class Kit:
    """A kit that was unpacked.

    Attributes:
        folder: absolute.
        values: of `.env`.
    """

    folder: Path
    values: Mapping[str, str]

    @property
    def link(self) -> tuple[str, Path, Path]:
        """Address of the coordinator, its authority's certificate, and the key of this site."""
        credentials = self.folder / "certificates"
        return self._needed("COORDINATOR"), credentials / "ca.crt", credentials / "site.key"

    @property
    def policy(self) -> Path:
        """The file of limits."""
        return self.folder / "policy" / "policy.toml"

    def node_config(self) -> str:
        """The site's settings, as one text for `--node-config`. Raises ConfigError for what is missing."""
        kind = self.values.get("DATA_KIND") or "imagefolder"
        self._needed("SITE")
        settings = {name: self.values.get(key, "") for key, name in PLAIN.items()} | {"data": kind}
        settings |= {name: self._place(key) for key, name in FOLDERS.items()}
        if kind == "digits":
            settings["data_dir"] = ""
        elif not Path(self._needed("DATA") and settings["data_dir"]).is_dir():
            raise ConfigError(
                f"{self.folder / '.env'}: DATA={self.values['DATA']} is no folder on this machine; is "
                "the file system mounted?"
            )
        settings |= {
            "policy": str(self.policy),
            "coordinator_key": str(self.folder / "certificates" / "coordinator.pub"),
            "state_dir": str(self.folder / "state"),
            "cache_dir": str(self.folder / "cache"),
            "check_log_dir": settings["check_log_dir"] or str(self.folder / "check-log"),
        }
        return " ".join(_pair(name, value) for name, value in settings.items() if value)

    def _needed(self, name: str) -> str:
        if not self.values.get(name):
            raise ConfigError(f"{self.folder / '.env'}: {name} is empty; set it there")
        return self.values[name]

    def _place(self, name: str) -> str:
        """A path of `.env` on this machine, which may be written as containers see it."""
        value = self.values.get(name, "")
        for place, (key, usual) in MOUNTS.items():
            if name != "DATA" and (value == place or value.startswith(f"{place}/")):
                beside = Path(self.values.get(key) or usual).expanduser()
                return str(self.folder / beside / value[len(place) + 1 :])
        return value and str(self.folder / Path(value).expanduser())


def read_kit(folder: Path) -> Kit:
    """The kit in a folder. Nothing of its settings is evaluated: the coordinator has made them.

    Args:
        folder: into which the kit was unpacked.

    Raises:
        ConfigError: it has no `.env`, or that has a line which is no setting.
    """
    folder = folder.expanduser().resolve()
    todo = "name the folder into which the site's kit was unpacked"
    with told_as(ConfigError, f"{folder / '.env'} cannot be read", todo):
        return Kit(folder, read_setting_lines(folder / ".env", KNOWN))


def keep(kit: Kit, answers: Mapping[str, str]) -> Kit:
    """Write settings into the kit's `.env`, and leave its other lines as they are.

    Raises:
        ConfigError: a value cannot stand there.
    """
    file = kit.folder / ".env"
    text = file.read_text("utf-8-sig")
    for name, value in answers.items():
        text = _with_line(text, rf"{name}=", f"{name}={value}")
    replace_file(file, text, mode=0o600)
    return read_kit(kit.folder)


def set_limits(policy: Path, limits: Mapping[str, float]) -> None:
    """Write limits into a policy file, and leave its other lines as they are."""
    text = policy.read_text()
    for name, value in limits.items():
        text = _with_line(text, rf"{name} *=", f"{name} = {value!r}")
    replace_file(policy, text.encode(), mode=0o644)


def _with_line(text: str, start: str, line: str) -> str:
    """The text with this line in place of the one that starts so, or at its end."""
    changed, count = re.subn(rf"(?m)^{start}.*$", lambda _: line, text, count=1)
    return changed if count else f"{text.rstrip()}\n{line}\n"


def _pair(name: str, value: str) -> str:
    """A setting as a node-config has it."""
    number = isinstance(NodeConfig.model_fields[name].default, int) and value.isdecimal()
    return f"{name.replace('_', '-')}={value}" if number else f'{name.replace("_", "-")}="{value}"'
