"""The site kit: the archive that a hospital receives, with certificates, key, compose file,
settings, policy, guide.
"""

from __future__ import annotations

import io
import re
import shlex
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
SITE_FILES = ("ca.crt", "site.pub")
SITE_KEY, CERTIFICATE = "site.key", "site.crt"
# File names in the kit, and their sources in the folder deploy/.
SOURCES = {
    "compose.yml": "compose.hospital.yml",
    "compose.gpu.yml": "compose.gpu.yml",
    "site.sbatch": "cluster/site.sbatch",
    "policy/policy.toml": "kit/policy.toml",
    ".env": "kit/site.env",
    "README.md": "kit/README.md",
}
# Those that a federation may change before it packs kits: in its folder, next to the certificates.
TEMPLATES = {f"kit/{name}": f"kit/{name}" for name in ("policy.toml", "site.env")}
# If these are missing, Docker makes them, and root owns them.
FOLDERS = ("state", "check-log", "cache", "runtime", "data", "weights", "held-out")
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
        The names of the files in the kit; with `certificates/site.key` only if the coordinator has made
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
    check_free(out)
    contents = dict(_contents(certificates / "sites" / site, site, coordinator, image))
    check_not_revoked(certificates, site, contents["certificates/site.pub"].decode())
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


def check_free(out: Path) -> None:
    """Raise ConfigError where a kit would replace a file."""
    if out.exists():
        raise ConfigError(
            f"{str(out)!r} exists; the hospital may have it already. Remove it first, or name "
            "another with --out"
        )


def _contents(folder: Path, site: str, coordinator: str, image: str) -> Iterator[tuple[str, bytes]]:
    own_key, credentials = (folder / CERTIFICATE).is_file(), folder.parents[1]
    place = shlex.quote(str(credentials))
    for name in (*SITE_FILES, CERTIFICATE if own_key else SITE_KEY):
        make = f"make it with `coordinator sites certs {place} --site {site}`"
        yield f"certificates/{name}", _content(folder / name, make)
    yield (
        f"certificates/{PUBLIC}",
        _content(credentials / PUBLIC, f"`coordinator sites key {place}` makes it"),
    )
    facts = {"{site}": site, "{coordinator}": coordinator, "{image}": image}
    for name, source in SOURCES.items():
        own = credentials.parent / source
        file = own if source in TEMPLATES and own.is_file() else DEPLOY / source
        content = _content(file, "use a checkout or the image, which have it").decode()
        for mark, fact in facts.items():
            content = content.replace(mark, fact)
        yield name, content.encode()


def _content(file: Path, remedy: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        raise ConfigError(f"{file} is missing; {remedy}") from None


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime = kind, mode, int(time.time())
    return entry
