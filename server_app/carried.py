"""Requests that people carry to sites, and learning from the files they bring back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from common.bundles import LARGEST_BUNDLE, Request, read_request, unpack_bundle
from common.config import Scalar, parse_run_config, pick_device
from common.errors import ConfigError, SurrogateError
from common.sealing import read_keys
from common.wire import pack_question, unpack_question, unpack_surrogate
from server_app.federate import finished
from server_app.run_folder import RunFolder
from strategies.public import read_centre
from strategies.receipts import stored_receipts
from strategies.stored import Stored

# What only matters on the coordinator's machine, or names a file there.
AT_HOME = ("output-dir", "resume", "data-dir", "weights-path", "device", "fedpft.public", "deadline", "grace", "compare")

HERE = ("output-dir", "device", "quorum", "sites")


def make_request(settings: Mapping[str, Scalar], file: Path) -> Request:
    """Write a request for a run with these settings. Raises ConfigError for a run that no files can carry."""
    if file.exists():
        raise ConfigError(f"{str(file)!r} exists; sites may have answered it already")
    config = parse_run_config(settings)
    centre = pack_question(read_centre(config.fedpft.public))
    asked = {key: value for key, value in settings.items() if key not in AT_HOME}
    request = Request.fresh(asked, centre, stored_receipts(config))
    file.write_text(request.text())
    return request


def learn_from_files(request_file: Path, files: Sequence[Path], keys_file: Path | None, local: Mapping[str, Scalar]) -> Path:
    """Learn one head from what sites have answered a request with; return the run folder.

    files: bundles; surrogates that came over the network (*.pb), or run folders that hold such. A file that is refused is
    named in the run folder, and the others count. local: settings of this machine, such as output-dir. Raises ConfigError
    before anything is written, and RunError, with a complete run folder, where too few files are left.
    """
    request = read_request(request_file)
    if wrong := sorted(set(local) - set(HERE)):
        raise ConfigError(f"{wrong[0]} is settled by the request; here only {', '.join(HERE)} can be given")
    keys = read_keys(keys_file) if keys_file is not None else {}
    receipts: dict[str, object] = {}
    found = {str(file): _content(file, request, keys, receipts) for file in _listed(files)}
    config = parse_run_config({**request.settings, **local})
    folder = RunFolder(config, 0)
    strategy = Stored(config, folder, pick_device(config.device), unpack_question(request.centre))
    with finished(folder, strategy):
        for site, receipt in receipts.items():
            with suppress(SurrogateError):
                strategy.receipts.take(site, 0, receipt)
        strategy.learn_from(found)
    return folder.path


def _listed(files: Sequence[Path]) -> list[Path]:
    listed: list[Path] = []
    for file in files:
        if file.is_dir():
            inside = sorted((file / "surrogates").glob("*.pb"))
            if not inside:
                raise ConfigError(f"{file} is no run folder with surrogates")
            listed += inside
        elif file.is_file():
            listed.append(file)
        else:
            raise ConfigError(f"there is no file {str(file)!r}")
    return listed


def _content(
    file: Path, request: Request, keys: Mapping[str, bytes], receipts: dict[str, object]
) -> tuple[str, bytes] | SurrogateError:
    """The site and its surrogate's bytes, or why it is refused. What it says of its site's ledger goes to `receipts`."""
    try:
        if file.stat().st_size > LARGEST_BUNDLE:
            raise SurrogateError(f"{file.stat().st_size} bytes; the most is {LARGEST_BUNDLE}")
        content = file.read_bytes()
        if file.suffix == ".pb":
            return unpack_surrogate(content).header.site, content
        bundle = unpack_bundle(content, request, keys)
    except SurrogateError as error:
        return error
    except OSError as error:
        return SurrogateError(f"it cannot be read ({error.strerror})")
    ledger = bundle.manifest.get("ledger")
    receipts[bundle.site] = ledger.get("receipt") if isinstance(ledger, dict) else None
    return bundle.site, bundle.payload
