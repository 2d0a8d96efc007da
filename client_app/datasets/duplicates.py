"""Copies among the records of a site: one image must count once, and must not be in training and
test.

Two records are copies if their content is equal byte for byte: the image file, the stored image, or
the row of features.

Under privacy the noise covers one more or one less record (or patient). Removing copies must keep
this: the records that are left from some data, and from the same data with one record more, may
differ by one record only, at any noise that a method adds. So what is left of one content depends
on the records of this content alone, and

- copies with one label leave one record; the number and order of the copies do not matter;
- copies with different labels leave none. If one of them were chosen, a new copy could change the
  label of an old record, which is two changes: one record removed, one added;
- a copy in training takes all copies out of the test records;
- where patients are protected, only copies within a patient are compared. Otherwise a new patient
  could remove a record of another one, and the change would be two patients.

Nothing is refused and nothing is reported to the coordinator, because a neighbour would change
that. The site's own log, `site doctor` and `site dry-run` state the numbers. A file that cannot be
read is a copy of nothing.

Without privacy, records are kept where copies do no harm: in training, where some benchmarks and
tables have equal rows. Test records that are copies of training records are left out. A split that
is drawn here keeps copies together.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.one_record import attempt, open_regular
from fedsurrogate.client_app.datasets.records import Records, only

# Bytes from the middle of a file that are compared before the whole file is: headers are often
# equal, and the last rows of a radiograph black.
SAMPLE = 4096
# Results for the latest data sets: one process answers several requests on the same records.
MOST_KNOWN = 8
_known: dict[str, Tensor] = {}


def remembered(key: str, compute: Callable[[], Tensor]) -> Tensor:
    """The result of a function for the data of a key, computed once in this process.

    Args:
        key: of the data.
        compute: the function.
    """
    if key not in _known:
        while len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = compute()
    return _known[key]


def same_files(paths: Sequence[Path]) -> Tensor:
    """Group (n,) of each file: equal numbers for equal content. Reads files of equal size only, and
    mostly a part.
    """
    return _groups(
        len(paths),
        (lambda i: _size(paths[i]), lambda i: _sample(paths[i]), lambda i: _digest(paths[i])),
    )


def same_bytes(contents: Callable[[int], bytes], count: int) -> Tensor:
    """Group of each record by its bytes.

    Args:
        contents: the bytes of a record; raises an error for a record without content.
        count: number of records.

    Returns:
        Group (n,) of each record.
    """
    return _groups(count, (lambda record: hashlib.sha256(contents(record)).digest(),))


def same_rows(x: Tensor) -> Tensor:
    """Group of each row of features.

    Args:
        x: features (n, d).

    Returns:
        Groups (n,), equal numbers for rows that are equal byte for byte.

    Example:
        >>> same_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])).tolist()
        [0, 1, 0]
    """
    if not x.numel():
        return torch.arange(len(x))
    rows = x.contiguous().view(torch.uint8).reshape(len(x), -1).numpy()
    return same_bytes(lambda row: rows[row].tobytes(), len(rows))


def once(records: Records, patients_protected: bool) -> Records:
    """Under privacy: the records with each content once, see the text of this module.

    Args:
        records: of a reader.
        patients_protected: whether the unit of privacy is the patient; then only copies within a
            patient are compared.
    """
    if records.same is None:
        return records
    units = records.patients if patients_protected else None
    kept, torn = _kept_once(records.same(), records.labels, units, records.is_train)
    copies = len(records.labels) - len(kept) - torn
    left = LeftOut(one_by_one=True)
    left.note_unread(copies, f"{copies} records are copies of others; each content counts once")
    left.note_unread(
        torn,
        f"{torn} records have the same content as another, but a different label; correct the "
        "labels",
    )
    if not left.reasons:
        return records
    return replace(only(records, kept), left_out=(*records.left_out, *left.reasons))


def _kept_once(
    group: Tensor, labels: Sequence[str], units: Sequence[str] | None, is_train: Tensor | None
) -> tuple[list[int], int]:
    """The records (ascending indices) that are left, and the number of records with contradictory
    labels.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, number in enumerate(group.tolist()):
        members[number if units is None else (units[i], number)].append(i)
    kept, torn = [], 0
    for rows in members.values():
        if len({labels[i] for i in rows}) > 1:
            torn += len(rows)
            continue
        training = [i for i in rows if is_train is None or is_train[i]]
        kept.append((training or rows)[0])
    return sorted(kept), torn


def without_leaks(records: Records, is_train: Tensor) -> tuple[list[int] | None, Records]:
    """Without privacy: leave out test records that are copies of training records.

    The data report names the first, and counts copies that stay.

    Args:
        records: of a reader.
        is_train: (n,) bool.

    Returns:
        The remaining records (ascending indices), None if all remain; and all records, with what
        the data report says.
    """
    if records.same is None or is_train.all():
        return None, records
    group = records.same()
    gone = ~is_train & torch.isin(group, group[is_train])
    left = LeftOut(one_by_one=True)
    kept, numbers = group[~gone].tolist(), group.tolist()
    if copies := len(kept) - len(set(kept)):
        torn = len(set(zip(numbers, records.labels, strict=True))) - len(set(numbers))
        labels = f", {torn} of them with another label" if torn else ""
        left.remark(f"{copies} records are copies of others in the same part{labels}")
    if not gone.any():
        return None, replace(records, odd=(*records.odd, *left.odd))
    copies = int(gone.sum())
    first = f", such as {records.place(int(gone.nonzero()[0]))}" if records.place else ""
    left.note_unread(
        copies,
        f"{copies} test records are copies of training records{first}; they are not tested",
    )
    noted = replace(
        records, left_out=(*records.left_out, *left.reasons), odd=(*records.odd, *left.odd)
    )
    return (~gone).nonzero().flatten().tolist(), noted


def _groups(count: int, steps: Sequence[Callable[[int], Hashable]]) -> Tensor:
    """Number the records by their keys, step by step: the next key is computed only for records
    with equal keys so far.

    A record with the key None is alone, and so is one whose key cannot be computed.
    """
    group = torch.arange(count)
    open_: list[list[int]] = [list(range(count))]
    for key in steps:
        alike: list[list[int]] = []
        for rows in open_:
            by_key: dict[Hashable, list[int]] = defaultdict(list)
            for i in rows:
                value = attempt(partial(key, i))
                if not (value is None or isinstance(value, BaseException)):
                    by_key[value].append(i)
            alike += [same for same in by_key.values() if len(same) > 1]
        open_ = alike
    for rows in open_:
        group[rows] = rows[0]
    return group


def _size(path: Path) -> int | None:
    return path.stat().st_size or None


def _sample(path: Path) -> bytes:
    with open_regular(path) as file:
        file.seek(path.stat().st_size // 2)
        return file.read(SAMPLE)


def _digest(path: Path) -> bytes:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").digest()
