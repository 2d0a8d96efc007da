"""Studies of a PACS, copied through DICOMweb (QIDO-RS, WADO-RS) into the folder of a site's data."""

from __future__ import annotations

import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.escapes import csv_text
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.flower.environment import is_loopback
from fedsurrogate.common.identity import normal
from fedsurrogate.common.setting_lines import read_setting_lines

from .dicom import key_of
from .image_folders import find_tables
from .left_out import FETCHED as FETCHED
from .left_out import LeftOut, attempt, described
from .tables import name_or_blank, read_table

# Columns of the table of labels that name studies, and are known before an image comes.
KEYS = ("StudyInstanceUID", "AccessionNumber", "PatientID")
# Variables of the environment, or lines of a file: what a person must not type into a command.
VARIABLES = {
    name: f"FEDSURROGATE_PACS_{name}"
    for name in ("TOKEN", "USER", "PASSWORD", "CERTIFICATE", "KEY", "CA")
}
# In the folder FETCHED, beside studies that are not whole.
TABLE = "studies.csv"
UID = re.compile(r"[0-9.]{1,64}")
# What stands before a PACS that is down answers for it.
DOWN = (502, 503, 504)
# Studies in a row that do not come, after which a PACS is taken for dead.
MOST_FAILURES = 3
REFUSED, COPIED, EARLIER = "refused", "copied", "copied earlier"
NO_LABEL = "no row in the table of labels"


@dataclass
class Study:
    """A study that a PACS has, and what became of it.

    Attributes:
        keys: values of KEYS.
        series: the number of images of each matching series; 0 where the PACS does not say.
        state: COPIED, EARLIER or REFUSED; empty before it is looked at.
        images: that are in the folder.
        reason: why it was refused.
    """

    keys: dict[str, str]
    series: dict[str, int] = field(default_factory=dict)
    state: str = ""
    images: int = 0
    reason: str = ""


def settings_of(environment: Mapping[str, str], file: Path | None) -> dict[str, str]:
    """How this site is let in, by the names in VARIABLES.

    Args:
        environment: of this process.
        file: with lines NAME=VALUE, before which it counts; None for none.

    Raises:
        ConfigError: for a file that others can read, or a line of another form.
        OSError: the file cannot be read.
    """
    own = read_setting_lines(file, VARIABLES.values(), secret=True) if file is not None else {}
    given = {**environment, **own}
    return {name: given.get(variable, "") for name, variable in VARIABLES.items()}


def client_of(url: str, settings: Mapping[str, str]) -> Any:
    """A client of a DICOMweb service.

    Args:
        url: of the service.
        settings: as `settings_of` gives them.

    Raises:
        ConfigError: for another address, a secret in it, or one that would travel without TLS.
    """
    if not re.match(r"https?://[^/@\s]+(/[^@\s]*)?$", url):
        raise ConfigError(
            f"--dicomweb must be http(s)://HOST[:PORT]/PATH, without a password; set that in "
            f"{VARIABLES['USER']} and {VARIABLES['PASSWORD']}"
        )
    secrets = [VARIABLES[name] for name in ("TOKEN", "PASSWORD") if settings[name]]
    if secrets and url.startswith("http:") and not is_loopback(f"{urlsplit(url).hostname}:"):
        raise ConfigError(
            f"--dicomweb {url}: the network could read {secrets[0]}, because http has no TLS; use https://, or "
            "http:// with an address of this machine"
        )
    with needed_for("site fetch"):
        from dicomweb_client import DICOMwebClient, session_utils

    session = session_utils.create_session()
    if settings["TOKEN"]:

        def authorized(request: Any) -> Any:
            request.headers["Authorization"] = f"Bearer {settings['TOKEN']}"
            return request

        session.auth = authorized
    elif settings["USER"]:
        session.auth = (settings["USER"], settings["PASSWORD"])
    if settings["CERTIFICATE"]:
        session.cert = (settings["CERTIFICATE"], settings["KEY"] or settings["CERTIFICATE"])
    if settings["CA"]:
        session.verify = settings["CA"]
    return DICOMwebClient(url.rstrip("/"), session)


def read_query(text: str) -> dict[str, str]:
    """The filters of a search.

    Args:
        text: KEYWORD=VALUE, with blanks between several.

    Raises:
        ConfigError: for what is none, or no keyword of DICOM.

    Example:
        >>> read_query("Modality=CR StudyDate=20240101-20241231")
        {'Modality': 'CR', 'StudyDate': '20240101-20241231'}
    """
    with needed_for("site fetch"):
        from pydicom.datadict import tag_for_keyword

    found = {}
    for word in shlex.split(text):
        keyword, equals, value = word.partition("=")
        if not (equals and value) or tag_for_keyword(keyword) is None:
            raise ConfigError(
                f"--query {text!r}: {word!r} is no KEYWORD=VALUE with a keyword of DICOM, such as "
                "Modality=CR or StudyDate=20240101-20241231"
            )
        found[keyword] = value
    if not found:
        raise ConfigError("--query is empty; name at least one, such as Modality=CR")
    return found


def search(client: Any, query: Mapping[str, str]) -> list[Study]:
    """The studies with series that match, in the order of their UIDs.

    Args:
        client: of the PACS.
        query: as `read_query` gives it.

    Raises:
        DataError: if the PACS does not answer, or refuses.
    """
    with needed_for("site fetch"):
        from pydicom.dataset import Dataset
    wanted = [*KEYS, "SeriesInstanceUID", "NumberOfSeriesRelatedInstances"]
    ask = partial(client.search_for_series, fields=wanted, search_filters=query, get_remaining=True)
    answer = attempt(ask)
    if isinstance(answer, BaseException):
        raise DataError(_gone(answer) or f"the PACS cannot be asked: {described(answer)}")
    studies: dict[str, Study] = {}
    for each in map(Dataset.from_json, answer):
        keys = {name: normal(str(each.get(name, ""))) for name in KEYS}
        series = str(each.get("SeriesInstanceUID", ""))
        # They become names of folders.
        if UID.fullmatch(keys[KEYS[0]]) and UID.fullmatch(series):
            own = studies.setdefault(keys[KEYS[0]], Study(keys))
            own.series[series] = int(each.get("NumberOfSeriesRelatedInstances") or 0)
    return [studies[uid] for uid in sorted(studies)]


# A table of labels, its column that names studies, and the values of this column.
StudyLabels = tuple[Path, str, frozenset[str]]


def read_labels(file: Path) -> StudyLabels:
    """Read which studies a table of labels names.

    Args:
        file: CSV or parquet.

    Raises:
        DataError: for a table that names no studies.
    """
    columns = read_table(file, (), LeftOut())
    key = key_of(file, list(columns))
    if key not in KEYS:
        raise DataError(
            f"'{file}' names images by {key!r}, which is not known before they come; name studies by "
            f"{', '.join(KEYS)}, and remove that column"
        )
    return file, key, frozenset(map(name_or_blank, columns[key])) - {""}


def fetch(
    client: Any, studies: Sequence[Study], labels: StudyLabels, folder: Path
) -> Iterator[Study]:
    """Copy studies, each as soon as it is asked for; a study that is whole is never asked for again.

    Args:
        client: of the PACS.
        studies: that it has.
        labels: the table; it is copied beside the studies.
        folder: of the site's data.

    Yields:
        Each study, with what became of it.

    Raises:
        DataError: for a PACS that stops, or another table in the folder.
        ConfigError: while another command copies into the folder.
    """
    from filelock import FileLock, Timeout

    work = folder / FETCHED
    work.mkdir(parents=True, exist_ok=True)
    lock = FileLock(work / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another command copies studies into '{folder}'; wait for it") from None
    try:
        own = folder / labels[0].name
        if others := [each.name for each in find_tables(folder) if each != own]:
            raise DataError(
                f"'{folder}' has the table {others[0]!r}; a data set has one, remove it"
            )
        if own.resolve() != labels[0].resolve():
            replace_file(own, labels[0].read_bytes())
        failures = 0
        for study in studies:
            failures = failures + 1 if _take(client, study, labels, folder) else 0
            yield study
            if failures == MOST_FAILURES:
                raise DataError(
                    f"the PACS has stopped: {failures} studies in a row do not come ({study.reason}); "
                    "give the command again to go on"
                )
    finally:
        replace_file(work / TABLE, _table(studies).encode())
        lock.release()


def _take(client: Any, study: Study, labels: StudyLabels, folder: Path) -> bool:
    """Copy a study; whether the PACS has failed. Raises DataError where it lets this site in no more."""
    uid = study.keys[KEYS[0]]
    study.state, target, part = REFUSED, folder / uid, folder / FETCHED / uid
    _, key, values = labels
    if study.keys[key] not in values:
        study.reason = NO_LABEL
        return False
    if target.is_dir():
        study.state, study.images = EARLIER, len(list(target.iterdir()))
        return False
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    found = attempt(partial(_retrieve, client, study, part))
    if isinstance(found, BaseException):
        shutil.rmtree(part, ignore_errors=True)
        if why := _gone(found):
            study.reason = why
            raise DataError(why)
        study.reason = str(found) if isinstance(found, DataError) else described(found)
        # Another status is about this study alone.
        return isinstance(found, OSError) and _status(found) in (0, *DOWN)
    part.rename(target)
    study.state, study.images = COPIED, found
    return False


def _retrieve(client: Any, study: Study, folder: Path) -> int:
    """Write the images of a study; their number."""
    uid = study.keys[KEYS[0]]
    for series, count in study.series.items():
        before = len(list(folder.iterdir()))
        # As they are stored: nothing is decoded.
        for image in client.iter_series(uid, series, media_types=(("application/dicom", "*"),)):
            name = str(image.get("SOPInstanceUID", ""))
            if str(image.get("StudyInstanceUID", "")) != uid or not UID.fullmatch(name):
                raise DataError("the PACS sent an image of another study")
            image.save_as(folder / f"{name}.dcm", enforce_file_format=True)
        came = len(list(folder.iterdir())) - before
        if came < max(count, 1):
            raise DataError(f"{came} of {count or 'some'} images of a series came")
    return len(list(folder.iterdir()))


def _gone(error: BaseException) -> str:
    """What to do where a PACS does not let this site in; empty for other errors."""
    status = _status(error)
    if status not in (401, 403):
        return ""
    names = f"{VARIABLES['TOKEN']}, or {VARIABLES['USER']} and {VARIABLES['PASSWORD']}"
    return f"the PACS refuses this site (status {status}); check {names}"


def _status(error: BaseException) -> int:
    """The status of HTTP that an error has; 0 where no answer came."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def _table(studies: Sequence[Study]) -> str:
    rows = [
        (*each.keys.values(), each.images, each.state or "not looked at", each.reason)
        for each in studies
    ]
    return csv_text([(*KEYS, "images", "state", "reason"), *rows])


def counts(studies: Sequence[Study], labels: StudyLabels) -> dict[str, Any]:
    """What a command has done, in numbers.

    Args:
        studies: that the PACS has.
        labels: the table.
    """
    _, key, values = labels
    by_state = Counter(each.state for each in studies)
    copied = [each for each in studies if each.state == COPIED]
    return {
        "studies": len(studies),
        "copied": len(copied),
        "images": sum(each.images for each in copied),
        "earlier": by_state[EARLIER],
        "refused": dict(Counter(each.reason for each in studies if each.state == REFUSED)),
        "not looked at": by_state[""],
        "labels without a study": len(values - {each.keys[key] for each in studies}),
    }
