"""Statistics and mixtures through the command that users call: `coordinator sweep`, CIFAR-10 features, 10 sites, 3 seeds.

Every row is a whole run: messages, checks, the default screen and limits on weights, evaluation at the sites.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from _report import ROOT, report, shared

# The options of each sweep, beyond those of the data: what varies, and what is fixed.
SWEEPS = (
    ("fedpft.bits=[16, 8, 4]", 'features.power=0.5 fedpft.covariance="lowrank" fedpft.rank=64'),
    ('fedpft.covariance=["gram"]', "features.power=0.5"),
    ('fedpft.covariance=["spherical", "diag"]', ""),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    folder = shared("features/cifar10-train.safetensors").parent
    rows = []
    with tempfile.TemporaryDirectory() as output:
        fixed = f'data="safetensors" data-dir="{folder}" dataset="cifar10" alpha=0.1 output-dir="{output}"'
        for varied, own in SWEEPS:
            command = [sys.executable, "-m", "server_app.cli.main", "sweep", "--json", "--seeds", str(options.seeds)]
            command += ["--sites", str(options.sites), "-g", varied, "-c", f"{fixed} {own}"]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout)
            key = varied.split("=")[0]
            for value in dict.fromkeys(each[key] for each in found):
                same = [each for each in found if each[key] == value]
                accuracy = [100 * each["accuracy"] for each in same]
                spread, sent = statistics.pstdev(accuracy), statistics.mean(each["bytes"] for each in same) / 1e6
                name = f"{key}={value} {own}".strip()
                rows.append((name, round(statistics.mean(accuracy), 2), round(spread, 2), round(sent, 3), len(same)))
    columns = ("settings", "accuracy %", "sd", "uplink MB, all sites", "runs")
    title = f"coordinator sweep: CIFAR-10 features, {options.sites} sites, Dirichlet 0.1, {options.seeds} seeds"
    report("statistics-runs", title, columns, rows)


if __name__ == "__main__":
    main()
