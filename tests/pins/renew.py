"""Compare the pins of settings and messages with the present, and write them anew with --renew.

    PYTHONPATH=. python tests/pins/renew.py [--renew]

Without --renew nothing is written. Stored runs are not pins that can be renewed: an earlier commit
has written them, and every later one must read them; see stored.py.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.pins import messages, pinned


def main() -> int:
    """Print the differences; write them with --renew. Returns 1 for differences that were not
    written.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="write the pins anew; read `git diff` before you commit them",
    )
    renew = parser.parse_args().renew
    settings = pinned.pins_of_settings()
    files = {pinned.REFUSALS: pinned.refusals(), pinned.WIRE: messages.fingerprints()}
    lines = list(
        pinned.differences(pinned.expected(pinned.read_settings()), pinned.expected(settings))
    )
    for file, content in files.items():
        lines += pinned.differences(json.loads(file.read_text()) if file.exists() else {}, content)
    if not lines:
        print("all pins hold")
        return 0
    print(pinned.report(lines))
    if not renew:
        return 1
    pinned.write_settings(settings)
    for file, content in files.items():
        file.write_text(pinned.as_json(content))
    print("written; read `git diff tests/pins`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
