"""A real PACS: Debian's Orthanc with its DICOMweb plugin, where it is installed."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydicom.dataset import Dataset

from tests.e2e.processes import free_ports

BINARY = shutil.which("Orthanc", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
USER, PASSWORD = "site", "open sesame"
needed = pytest.mark.skipif(
    BINARY is None or not PLUGIN.exists(),
    reason="Orthanc is not installed: apt-get install orthanc orthanc-dicomweb",
)


class Orthanc:
    """A PACS with its own folder, which can be stopped and started again."""

    def __init__(self, home: Path) -> None:
        (self.port,) = free_ports(1)
        self.home, self.url = home, f"http://127.0.0.1:{self.port}"
        home.mkdir(parents=True)
        settings = {
            "StorageDirectory": str(home / "storage"),
            "IndexDirectory": str(home / "storage"),
            "HttpPort": self.port,
            "DicomServerEnabled": False,
            "AuthenticationEnabled": True,
            "RegisteredUsers": {USER: PASSWORD},
            "Plugins": [str(PLUGIN)],
            "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
        }
        (home / "orthanc.json").write_text(json.dumps(settings))
        self.start()

    @property
    def dicomweb(self) -> str:
        return f"{self.url}/dicom-web"

    def start(self) -> None:
        assert BINARY is not None
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [BINARY, str(self.home / "orthanc.json")], stdout=log, stderr=log
            )
        for _ in range(600):
            try:
                self.ask("/system")
                return
            except OSError:
                assert self.process.poll() is None, (self.home / "log").read_text()
                time.sleep(0.1)
        raise AssertionError((self.home / "log").read_text())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, path: str, content: bytes | None = None, method: str | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, content, method=method)
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        request.add_header("Authorization", f"Basic {secret}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def fill(self, images: Iterable[Dataset]) -> None:
        for image in images:
            file = io.BytesIO()
            image.save_as(file, enforce_file_format=True)
            self.ask("/instances", file.getvalue())

    def delete(self, study: str) -> None:
        (found,) = json.loads(self.ask("/tools/lookup", study.encode()))
        self.ask(found["Path"], method="DELETE")
