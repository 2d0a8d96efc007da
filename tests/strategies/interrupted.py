"""Runs whose coordinator dies in the middle, and what was on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.grid import InProcessGrid, events_of, run_federation, sites


def interrupted(folder: Path, settings: dict[str, Any], after: int, count: int = 2) -> Path:
    """The folder of a run whose coordinator dies when it asks for another training after so many rounds,
    or steps of a chain.
    """
    grid = InProcessGrid(sites(count))
    push = grid.push_messages

    def dies(messages: Any) -> Any:
        chosen = list(messages)
        chain = settings.get("fedpft.topology") == "chain"
        kind = "replied" if chain else "round"
        done = [e for f in (folder / "runs").glob("*") for e in events_of(f) if e["event"] == kind]
        if any(m.metadata.message_type == "train" for m in chosen) and len(done) == after:
            raise ConnectionError("the SuperLink is gone")
        return push(chosen)

    grid.push_messages = dies  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        run_federation(folder, grid, **settings)
    (half,) = (folder / "runs").iterdir()
    return half


def wire_of(grid: InProcessGrid) -> bytes:
    """All arrays of all messages."""
    messages = [each for each in (*grid.sent, *grid.received) if each.has_content()]
    records = [each for m in messages for each in m.content.array_records.values()]
    return b"".join(array.data for record in records for array in record.values())
