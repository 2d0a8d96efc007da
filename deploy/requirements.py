"""The requirements of a pyproject.toml, a line each, for an image: what a simulation alone needs is left out.

python3 requirements.py pyproject.toml yes|no  (whether the backbones are to be in it)
"""

import sys
import tomllib
from pathlib import Path

BACKBONES = ("torchvision", "open_clip_torch", "timm")


def main() -> None:
    """Print them."""
    listed = tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"]
    for each in ["setuptools>=77", *listed]:
        if sys.argv[2] == "no" and each.startswith(BACKBONES):
            continue
        # A simulation wants Ray; a deployment never starts one.
        print(each.replace("flwr[simulation]", "flwr"))


if __name__ == "__main__":
    main()
