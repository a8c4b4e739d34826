"""CPU time that the plugin adds to the collection of a suite without its tests.

Run: python -m benchmarks.plugin.collection [RUNS]

Runs ``pytest --collect-only`` with and without the plugin in turn, on a suite of its own, and prints the median of user
CPU time of each and their ratio. The ratio has to stay below 1.2.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

NUM_FILES, TESTS_PER_FILE = 20, 25
TEST = "import pytest\n\n@pytest.mark.parametrize('number', range({count}))\ndef test_number(number):\n    pass\n"
# pytest-randomly imports numpy, which would hide an import of numpy by this plugin.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:randomly")


def user_cpu_s(suite: Path, *options: str) -> float:
    """Return the user CPU time of one collection, in seconds."""
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *WITHOUT, *options]
    subprocess.run(command, cwd=suite, stdout=subprocess.DEVNULL, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s


def main(runs: int) -> None:
    """Print medians over ``runs`` alternating pairs, after one pair that fills the caches."""
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder)
        (suite / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for number in range(NUM_FILES):
            (suite / f"test_{number}.py").write_text(TEST.format(count=TESTS_PER_FILE), encoding="utf-8")
        pairs = [(user_cpu_s(suite), user_cpu_s(suite, "-p", "no:aorta")) for _ in range(runs + 1)][1:]
    ours, bare = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    print(f"{NUM_FILES * TESTS_PER_FILE} tests, medians of {runs} alternating runs, user CPU time")
    print(f"with the plugin {ours:.3f} s, -p no:aorta {bare:.3f} s, ratio {ours / bare:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 15)
