"""Which plan is the fastest allreduce on a torus, a mesh, a fat tree or a star?

`hoplite-mp simulate --topology` simulates the plans on links of one rate, without a cluster. The
program compares them for the gradients of ResNet-50 and of a small network.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOPOLOGIES = "torus:8x8,mesh:8x8,fattree:16,star:16"
PARAMETERS = {"ResNet-50": 25_557_032, "a small network": 25_000}


def simulated(nbytes, file):
    """The rows of the table for gradients of this size."""
    command = [sys.executable, "-m", "hoplite_mp", "simulate", "--topology", TOPOLOGIES]
    options = ["--nbytes", str(nbytes), "--rate", "100Gbit", "--latency", "2us"]
    done = subprocess.run([*command, *options, "--json", str(file)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(file.read_text())["rows"]


def main():
    with tempfile.TemporaryDirectory() as folder:
        for network, parameters in PARAMETERS.items():
            rows = simulated(4 * parameters, Path(folder) / "rows.json")
            print(f"{network}, {4 * parameters} bytes of float32 gradients:")
            for topology in TOPOLOGIES.split(","):
                here = [row for row in rows if row["topology"] == topology]
                best = min(here, key=lambda row: row["seconds"])
                print(
                    f"  {topology:10}  {best['plan']:12}  {best['seconds'] * 1e3:8.3f} ms, "
                    f"{best['over_ring']:.2f} times the speed of a ring"
                )


if __name__ == "__main__":
    main()
