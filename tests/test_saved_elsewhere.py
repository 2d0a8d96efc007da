"""Files that people write are read alike however their editor saves them: a byte order mark, the lines of
Windows. What is in another encoding is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsurrogate.client_app.governance.policy import load_policy
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.security.sealing import new_key, public_key, read_keys
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.audit_log import RULES, approvals_needed

KEYS = "".join(f'"{name}" = "{public_key(new_key()).hex()}"\n' for name in ("north", "süd"))
# By what is read: the reader, and lines.
READ: dict[str, tuple[Callable[[Path], object], str]] = {
    "policy": (
        lambda file: load_policy(str(file)),
        '# der Standort\nsmallest-class = 20\nmethods = ["fedpft", "süd*"]\n',
    ),
    "keys": (read_keys, KEYS),
    "rules": (lambda file: approvals_needed(file.parent), "approvals = 2\n"),
    "node-config in TOML": (lambda file: parse_overrides([str(file)]), 'site = "süd"\ncpus = 2\n'),
    "node-config in lines": (lambda file: parse_overrides([str(file)]), "site=süd\ndata=digits data-dir=/d\n"),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_and_lines_of_windows_change_nothing(
    tmp_path: Path, what: str, encoding: str, end: str
) -> None:
    read, text = READ[what]
    file = tmp_path / RULES
    file.write_bytes(text.encode())
    plain = read(file)
    file.write_bytes(text.replace("\n", end).encode(encoding))
    assert read(file) == plain
    assert "\ufeff" not in str(plain)


@pytest.mark.parametrize("what", [each for each in READ if "node" not in each])
def test_another_encoding_is_refused(tmp_path: Path, what: str) -> None:
    read, text = READ[what]
    file = tmp_path / RULES
    for encoding in ("utf-16", "latin-1"):
        file.write_bytes((text + "# ü\n").encode(encoding))
        with pytest.raises(FedSurrogateError, match=r"federation\.toml"):
            read(file)
