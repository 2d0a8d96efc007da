"""The site kit: the archive that a hospital receives, with certificates, key, compose file,
settings, policy, guide.
"""

from __future__ import annotations

import io
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedsurrogate.common.errors import ConfigError

from .request_key import PUBLIC
from .supernodes import check_not_revoked

# The folder deploy/ is next to this package, in a checkout and in the image.
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# Of a site's folder: what each kit has, what one has whose key the coordinator made, and what one has
# whose hospital made its own.
PAPERS = ("ca.crt", "site.pub")
SITE_KEY, CERTIFICATE = "site.key", "site.crt"
# File names in the kit, and their sources in the folder deploy/.
TEMPLATES = {
    "compose.yml": "compose.hospital.yml",
    "compose.gpu.yml": "compose.gpu.yml",
    "policy/policy.toml": "kit/policy.toml",
    "README.md": "kit/README.md",
}
# If these are missing, Docker makes them, and root owns them.
FOLDERS = ("state", "witness", "cache", "runtime", "data", "weights", "held-out")
ADDRESS = re.compile(r"[^\s/:]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


def pack_kit(certificates: Path, site: str, coordinator: str, image: str, out: Path) -> list[str]:
    """Write a site's kit as a .tar.gz that only its owner can read.

    Args:
        certificates: the folder of `coordinator sites certs`.
        site: its name.
        coordinator: host:port for the site.
        image: the container image that the site runs.
        out: the file to write.

    Returns:
        The names of the files in the kit; with `papers/site.key` only if the coordinator has made
        the site's key.

    Raises:
        ConfigError: the address is none, `out` exists or cannot be written, a file of the kit is
            missing, or the site's key was revoked.
    """
    if not ADDRESS.fullmatch(coordinator):
        raise ConfigError(
            f"coordinator = {coordinator!r}: must be host:port of the Fleet API, as the site "
            "reaches it"
        )
    if out.exists():
        raise ConfigError(
            f"{str(out)!r} exists; the hospital may have it already. Remove it first, or name "
            "another with --out"
        )
    contents = dict(_contents(certificates / "sites" / site, site, coordinator, image))
    check_not_revoked(certificates, site, contents["papers/site.pub"].decode())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for folder in FOLDERS:
            archive.addfile(_entry(f"{site}/{folder}", tarfile.DIRTYPE, 0o700))
        for name, content in contents.items():
            entry = _entry(
                f"{site}/{name}", tarfile.REGTYPE, 0o600 if name.endswith(".key") else 0o644
            )
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    try:
        out.touch(0o600, exist_ok=False)
        out.write_bytes(packed.getvalue())
    except OSError as error:
        raise ConfigError(f"{str(out)!r} cannot be written ({error.strerror})") from None
    return sorted(contents)


def _contents(folder: Path, site: str, coordinator: str, image: str) -> Iterator[tuple[str, bytes]]:
    own_key = (folder / CERTIFICATE).is_file()
    for name in (*PAPERS, CERTIFICATE if own_key else SITE_KEY):
        make = f"make it with coordinator sites certs --site {site}"
        yield f"papers/{name}", _content(folder / name, make)
    papers = folder.parents[1]
    yield f"papers/{PUBLIC}", _content(papers / PUBLIC, f"coordinator sites key {papers} makes it")
    for name, source in TEMPLATES.items():
        content = _content(DEPLOY / source, "use a checkout or the image, which have it")
        yield name, content.replace(b"{coordinator}", coordinator.encode())
    yield ".env", _settings(site, coordinator, image).encode()


def _content(file: Path, remedy: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        raise ConfigError(f"{file} is missing; {remedy}") from None


def _settings(site: str, coordinator: str, image: str) -> str:
    return f"""\
# Settings of this site; compose reads them. Write values without quotes.
SITE={site}
COORDINATOR={coordinator}
IMAGE={image}

# The folder of this site's data, and its kind: imagefolder, dicom, parquet, safetensors or slides. For a test without data:
# DATA_KIND=digits; for a test with three hospitals also NUM_PARTITIONS=3 and PARTITION_ID=0, 1 or 2.
DATA=./data
DATA_KIND=imagefolder
# Data set in this folder, and its columns, if it has any. With PATIENT_COLUMN, privacy protects patients, not single images.
DATASET=
LABEL_COLUMN=label
PATIENT_COLUMN=
# Weights of a backbone, such as /weights/vit_b_32.safetensors for the file vit_b_32.safetensors in the folder weights.
WEIGHTS=
# Labelled records that no run trains on, for `coordinator evaluate`: /held-out for the folder held-out, or /data if the
# files of the data name a test split. HELD_OUT_DIR=FOLDER puts them elsewhere. Empty: this site takes part in no evaluation.
HELD_OUT=
# Public keys of other sites, for sealed chains, such as /state/peers.toml for the file peers.toml in the folder state.
PEERS=
# The witness detects that the folder state was lost or restored. Put it on another disk, and never in the backup of state.
WITNESS=./witness
# The proxy through which this machine reaches the coordinator, if it needs one: http://HOST:PORT or http://USER:PASSWORD@HOST:PORT
PROXY=
# auto, cpu or cuda. For a GPU also: COMPOSE_FILE=compose.yml:compose.gpu.yml
DEVICE=auto
# The most memory of a container.
MEMORY=16g
# json: the log as lines of JSON on stdout, for a collector.
LOG_FORMAT=text

# The user that runs the site: echo "RUN_AS=$(id -u):$(id -g)" >> .env
"""


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime = kind, mode, int(time.time())
    return entry
