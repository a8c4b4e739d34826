#!/bin/sh
# Records the overlap suite's baselines on this machine's GPUs, compares new launches with them, and prints the
# figures of docs/benchmarks.md. Usage: benchmarks/on_gpus.sh OUT GPUS... , e.g. benchmarks/on_gpus.sh /tmp/out 4 2
set -u
out=$1
shift
python=${PYTHON:-python3}
failed=0

run() {
    echo "\$ $*"
    "$@" || failed=1
}

for gpus in "$@"; do
    aorta="$python -m pytest -p no:cacheprovider --aorta-gpus=$gpus --aorta-require-gpus --aorta-results=/tmp/aorta-$gpus"
    run $aorta tests/distributed/test_overlap.py --update-baselines
    run $aorta -m overlap tests/distributed
done
run $python -m pytest -p no:cacheprovider --aorta-gpus=2 tests/distributed/test_fsdp_oracle.py
run $python -m pytest -p no:cacheprovider --aorta-gpus="$1" -s benchmarks/fsdp_overlap.py
tar -cf - baselines | gzip >"$out/baselines.tar.gz"
exit $failed
