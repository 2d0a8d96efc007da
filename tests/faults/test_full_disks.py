"""Full disks: of a site's state, of a site's cache, of the coordinator's output."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.errors import PUBLIC_SENTENCES
from fedsurrogate.common.settings.base import parse_overrides
from tests.children import ran
from tests.e2e.hospitals import CLASSES
from tests.e2e.processes import newest
from tests.faults.conftest import Scene, opened

pytestmark = pytest.mark.faults
# Without image-size a site with images refuses a private run before it writes anything. A run is for
# west's images alone, or for the others' features.
FEATURES = f'image-size=8 fingerprint="{"f" * 16}"'
PIXELS = load_backbone("pixels", image_size=8, device="cpu").fingerprint_at(64)
IMAGES = f'image-size=8 fingerprint="{PIXELS}"'


class Disk:
    """A file system of one MiB, or another size, mounted at a folder."""

    def __init__(self, folder: Path, size: str = "1m") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        done = ran(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)])
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        self.folder = folder

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    def make_room(self) -> None:
        """Delete the file that filled the disk."""
        (self.folder / "ballast").unlink()

    def gone(self) -> None:
        """Unmount it, even if a process has an open file there."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, dict[str, Disk]]]:
    """North has space; south has a small disk for its state, west for its cache, the coordinator
    for its output.

    West has images and the others have features, so west is never used.
    """
    home = tmp_path_factory.mktemp("disks")
    disks: dict[str, Disk] = {}
    try:
        for name, folder in {
            "state": "south/state",
            "cache": "west/cache",
            "output": "out",
        }.items():
            disks[name] = Disk(home / folder)
        with opened(home, "north", "south") as scene:
            write_images(home / "west" / "data")
            west = f'site="west" data="imagefolder" data-dir="{home}/west/data"'
            west += (
                f' cache-dir="{home}/west/cache" state-dir="{home}/west/state" '
                f'check-log-dir="{home}/west/check-log"'
            )
            open_ledger(parse_node_config(parse_overrides([west])))
            scene.running.join(west, scene.running.fleet)
            yield scene, disks
    finally:
        for disk in disks.values():
            disk.gone()


def write_images(folder: Path) -> None:
    """Grey images of both classes."""
    for shade, name in enumerate(CLASSES.split(",")):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            Image.new("L", (8, 8), 100 * shade + number).save(folder / name / f"{number}.png")


def west_log(scene: Scene) -> str:
    return (scene.home / "west" / "state" / "site.log").read_text()


def test_a_site_with_a_full_disk_releases_nothing_says_which_disk_and_works_again_with_room(
    disks: tuple[Scene, dict[str, Disk]],
) -> None:
    scene, disk = disks
    south = scene.sites["south"]
    disk["cache"].fill()
    # In a private run a site without usable records answers with noise alone.
    scene.result(scene.submit(IMAGES))
    assert f"cache '{disk['cache'].folder}' cannot be used" in west_log(scene)
    assert "No space left on device" in west_log(scene)
    assert scene.charged() == {"north": 0, "south": 0}, "other backbones are found before a charge"
    disk["cache"].make_room()
    disk["state"].fill()
    assert scene.result(scene.submit(FEATURES))["sites"]["used"] == 1
    assert scene.reported("rejected")["south"] == PUBLIC_SENTENCES["storage"]
    # If the log has no space either, the console has the message.
    console = (scene.running.home / "supernode-1.log").read_text()
    assert "No space left on device" in console + (south.state / "site.log").read_text()
    disk["state"].make_room()
    charged = scene.charged()
    # A line written before the disk was full is for a release that did not leave; this error is on
    # the safe side.
    assert charged in ({"north": 1, "south": 0}, {"north": 1, "south": 1})
    assert scene.result(scene.submit(FEATURES))["sites"]["used"] == 2
    assert scene.charged() == {name: count + 1 for name, count in charged.items()}


def test_a_run_whose_output_disk_is_full_fails_and_says_why_and_the_next_goes_through(
    disks: tuple[Scene, dict[str, Disk]],
) -> None:
    scene, disk = disks
    before, south = scene.charged(), scene.sites["south"]
    run = scene.submit_held("south", settings=FEATURES)
    disk["output"].fill()
    south.let_go()
    metrics = scene.result(run)
    assert metrics["status"] == "failed"
    assert "No space left on device" in metrics["failure"]
    folder, _ = newest(scene.output)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "failed"
    assert "No space left on device" in (folder / "report.html").read_text()
    assert not (folder / ".reserve").exists()
    disk["output"].make_room()
    assert scene.charged() == {name: count + 1 for name, count in before.items()}
    assert scene.result(scene.submit(FEATURES))["status"] == "ok"
