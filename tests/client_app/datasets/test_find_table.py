"""Which table a name means, over generated folders: a folder inside, a table of this name, the only
one, or an error that lists what is there.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.image_folders import find_table, find_tables
from fedsurrogate.common.errors import DataError

# Tables, and what is none: another file, a system's copy, a folder named like a table.
TABLES = ["a.csv", "b.parquet", "b.CSV", "c.d.csv"]
OTHERS = ["a.txt", "notes", ".a.csv", "~$a.csv"]
FILES = st.sets(st.sampled_from(TABLES + OTHERS))


def fill(folder: Path, files: set[str], folders: set[str]) -> None:
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).write_text("x")
    for name in folders:
        (folder / name).mkdir()


@settings(max_examples=120, deadline=None)
@given(
    files=FILES,
    inside=FILES,
    has_folder=st.booleans(),
    name=st.sampled_from(["", "a", "b", "a.csv", "c.d", "b.CSV", "sub", "none"]),
)
def test_a_name_means_a_folder_inside_or_one_table(
    files: set[str], inside: set[str], has_folder: bool, name: str
) -> None:
    with TemporaryDirectory() as given_folder:
        root = Path(given_folder)
        fill(root, files, {"sub", "z.csv"} if has_folder else {"z.csv"})
        if has_folder:
            fill(root / "sub", inside, set())
        folder, tables = root, [each for each in sorted(files) if each in TABLES]
        assert [each.name for each in find_tables(root)] == tables
        if name == "sub" and has_folder:
            folder, tables = root / "sub", [each for each in sorted(inside) if each in TABLES]
        elif name:
            exact = [each for each in (name, f"{name}.csv", f"{name}.parquet") if each in files]
            tables = exact or [each for each in tables if Path(each).stem == name]
            if not tables:
                with pytest.raises(DataError, match="no such sub-folder or table"):
                    find_table(root, name)
                return
        if len(tables) > 1:
            with pytest.raises(DataError, match="several tables"):
                find_table(root, name)
            return
        assert find_table(root, name) == (folder, folder / tables[0] if tables else None)
