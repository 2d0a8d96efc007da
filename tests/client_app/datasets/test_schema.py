"""A disk that cannot be read is an error of the site's data that names their folder."""

import errno
import os
from pathlib import Path

import pytest

from fedsurrogate.client_app.datasets import schema
from fedsurrogate.client_app.datasets.dataset import DataSource
from fedsurrogate.common.errors import DataError


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("kind", ["safetensors", "parquet", "imagefolder"])
def test_headers_that_cannot_be_read_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    def fails(*_: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(schema, "split_files", fails)
    monkeypatch.setattr(schema, "find_table", fails)
    with pytest.raises(DataError, match=f"{tmp_path.name}.* cannot be read"):
        schema.read_schema(DataSource(kind, str(tmp_path)))  # type: ignore[arg-type]
