"""Print the requirements of an image from a pyproject.toml, one a line: the dependencies, and the extras that sites and a
coordinator use. Only simulations need Ray, which is left out.

python3 requirements.py pyproject.toml yes|no [EXTRA ...]  (whether to include the backbones, and which other extras)
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ALWAYS = ("dp-sgd", "generators", "tables", "dicom", "plots")
BACKBONES = "backbones"


def lines(extra: str, extras: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The requirements of an extra, and of those that it names. Ends the program if there is no such extra."""
    if extra not in extras:
        sys.exit(f"there is no extra {extra!r}; there are {', '.join(extras)}")
    for line in extras[extra]:
        if named := re.fullmatch(r"fedsurrogate\[(.+)\]", line):
            for other in named[1].split(","):
                yield from lines(other.strip(), extras)
        else:
            yield line


def main() -> None:
    """Print the requirements."""
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    extras = (*ALWAYS, *([BACKBONES] if sys.argv[2] == "yes" else []), *sys.argv[3:])
    found = [line for extra in extras for line in lines(extra, project["optional-dependencies"])]
    print("\n".join(dict.fromkeys(["setuptools>=77", *project["dependencies"], *found])))


if __name__ == "__main__":
    main()
