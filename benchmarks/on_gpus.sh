#!/bin/sh
# Compares the overlap and numerics suites on this machine's GPUs with the stored baselines.
# Usage: [RECORD=1] [FAULTS=1] [VERDICT=1] [HASH=1] [BENCHMARK=1] benchmarks/on_gpus.sh OUT GPUS... , e.g. benchmarks/on_gpus.sh /tmp/out 4 2
# RECORD writes new baselines first, and OUT/baselines.tar.gz holds them; FAULTS runs what needs two GPUs and no
# baseline; VERDICT plants slowdowns, and records launches with a slow rank; HASH and BENCHMARK print figures of
# docs/benchmarks.md. benchmarks/overlap_runs.sh measures the gate of overlap with baselines of its own.
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
    suite="$python -m pytest -p no:cacheprovider --aorta-gpus=$gpus --aorta-without-gpus=fail"
    suite="$suite tests/distributed/test_overlap.py tests/distributed/test_numerics.py"
    if [ "${RECORD:-}" ]; then
        run $suite --aorta-results="/tmp/aorta-record-$gpus" \
            --update-baselines --aorta-launches="${LAUNCHES:-10}"
    fi
    run $suite --aorta-results="/tmp/aorta-$gpus"
done
if [ "${FAULTS:-}" ]; then
    run $python -m pytest -p no:cacheprovider --aorta-gpus=2 -s tests/distributed/test_faults_gpu.py
    run $python -m pytest -p no:cacheprovider --aorta-gpus=2 tests/distributed/test_warm_gpu.py
fi
if [ "${VERDICT:-}" ]; then
    run $python -m pytest -p no:cacheprovider --aorta-gpus="$1" -s tests/distributed/test_verdict_gpu.py
    run env RECORD_OUT="$out" RECORD_ROUNDS=1 RECORD_VARIANTS=rank1,base,rank1 \
        $python -m pytest -p no:cacheprovider --aorta-gpus="$1" -s benchmarks/verdict/record_launches.py
fi
if [ "${HASH:-}" ]; then
    run $python -m benchmarks.hashing.weight_hash
    run $python -m pytest -p no:cacheprovider --aorta-gpus=1 tests/distributed/test_weight_hash_gpu.py
fi
if [ "${BENCHMARK:-}" ]; then
    run $python -m pytest -p no:cacheprovider -s benchmarks/launch/launch.py
    run $python -m pytest -p no:cacheprovider --aorta-gpus=2 tests/distributed/test_fsdp_oracle.py
    run $python -m pytest -p no:cacheprovider --aorta-gpus="$1" -s benchmarks/overlap/fsdp_overlap.py
fi
tar -cf - baselines | gzip >"$out/baselines.tar.gz"
exit $failed
