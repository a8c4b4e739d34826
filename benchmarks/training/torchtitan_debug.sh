#!/usr/bin/env bash
# torchtitan's own train entry under the harness: records a baseline, sees it hold, plants a sleep, sees it caught.
# Run from anywhere, with torchtitan and pytest-aorta installed:
# benchmarks/training/torchtitan_debug.sh [PYTEST OPTIONS]
# On GPUs, since times of CPU ranks are not compared. TITAN_SLEEP_S sets the sleep, 0.05 by default.
set -u
example="$(cd "$(dirname "$0")/../../docs/examples/torchtitan" && pwd)"
python="${PYTHON:-python}"
sleep_s="${TITAN_SLEEP_S:-0.05}"
unset TITAN_SLEEP_S
store="$(mktemp -d)"
trap 'rm -rf "$store"' EXIT
run() { (cd "$example" && "$python" -m pytest -p no:cacheprovider --aorta-baselines="$store" "$@"); }

run --update-baselines --aorta-launches="${LAUNCHES:-5}" "$@" || { echo "FAILED: no baseline was recorded"; exit 1; }
run "$@" || { echo "FAILED: unchanged code does not pass"; exit 1; }
if TITAN_SLEEP_S="$sleep_s" run "$@"; then
  echo "FAILED: a sleep of $sleep_s s a step was not caught"
  exit 1
fi
echo "ok: recorded, held, and a sleep of $sleep_s s a step caught"
