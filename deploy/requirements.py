"""The requirements of a pyproject.toml, a line each, for an image: what a simulation alone needs is left out.

python3 requirements.py pyproject.toml yes|no [EXTRA ...]  (whether the backbones are to be in it, and which extras)
"""

import sys
import tomllib
from pathlib import Path

BACKBONES = ("torchvision", "open_clip_torch", "timm")


def main() -> None:
    """Print them."""
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    extras = [each for extra in sys.argv[3:] for each in project["optional-dependencies"][extra]]
    for each in ["setuptools>=77", *project["dependencies"], *extras]:
        if sys.argv[2] == "no" and each.startswith(BACKBONES):
            continue
        # A simulation wants Ray; a deployment never starts one.
        print(each.replace("flwr[simulation]", "flwr"))


if __name__ == "__main__":
    main()
