"""A terminal in which a person types a command and answers its questions."""

import os
import pty
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from tests.e2e.processes import BIN, PATIENCE


class Terminal:
    """A command of ours that runs in a terminal.

    Attributes:
        shown: all that it has printed so far.
    """

    def __init__(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._own, its = pty.openpty()
        self.shown, self._read = "", 0
        self.process = subprocess.Popen(
            [str(BIN / words[0]) if words[0] in ("site", "coordinator") else words[0], *words[1:]],
            stdin=its, stdout=its, stderr=its, cwd=cwd, env={**environment, "COLUMNS": "200"},
            start_new_session=True,
        )  # fmt: skip
        os.close(its)
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def answer(self, answers: Sequence[tuple[str, str]]) -> "Terminal":
        """Type each answer once its question is shown."""
        for question, text in answers:
            self.until(question)
            self.type(text)
        return self

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._own, f"{text}\n".encode())

    def until(self, text: str) -> None:
        """Wait until the command has printed this, after what was waited for before."""
        end = time.monotonic() + PATIENCE
        while (found := self.shown.find(text, self._read)) < 0:
            assert time.monotonic() < end, self.shown
            assert self._listener.is_alive(), self.shown
            self._listener.join(0.1)
        self._read = found + len(text)

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(PATIENCE)
        self._listener.join(PATIENCE)
        return code

    def _listen(self) -> None:
        # The other end is closed when the command ends.
        with suppress(OSError):
            while content := os.read(self._own, 4096):
                self.shown += content.decode(errors="replace")
