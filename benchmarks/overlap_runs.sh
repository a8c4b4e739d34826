#!/bin/sh
# Measures the gate of overlap on this machine: spread, planted causes, false alarms.
# Usage: [BUDGET_S=580] [LAUNCHES=10] [RUNS=10] benchmarks/overlap_runs.sh OUT GPUS SECTION...
#   e.g. benchmarks/overlap_runs.sh /tmp/out 2 record; GPUS 0 is two CPU ranks.
# Sections, in the order of their use:
#   record     LAUNCHES launches of each overlap test, as baselines in OUT/baselines, noisy ones too
#   lost       one layer of 16 in line with compute, RUNS times
#   kernel     a slower kernel, RUNS times
#   host       a late host, RUNS times
#   straggler  a slower rank, RUNS times
#   split      two causes in one launch, and each part of the split, RUNS rounds
#   alarms     the overlap suite on unchanged code, RUNS times
#   summary    Markdown tables of all that OUT holds
# A section adds the runs that OUT lacks. Runs for which the budget of BUDGET_S seconds leaves no time are left to the
# next call, and the exit status is then 3. OUT/runs.tar.gz holds all that the next call needs, on another machine too:
# in a new OUT that holds it alone, the call goes on from there.
set -u
cd "$(dirname "$0")/.." || exit 1
out=$1
gpus=$2
shift 2
mkdir -p "$out"
out=$(cd "$out" && pwd)
[ ! -e "$out/runs.tar.gz" ] || tar -xzf "$out/runs.tar.gz" -C "$out"
python=${PYTHON:-python3}
deadline=$(($(date +%s) + ${BUDGET_S:-580}))
failed=0
is_left=0
# Tests of the next run.
copies=1

# longest_s SECTION: seconds of the section's longest run so far; 20 for each test of a run if it has none.
longest_s() {
    sed -n 's/.*<testsuite [^>]*time="\([0-9]*\).*/\1/p' "$out/$1"*.xml 2>/dev/null | sort -n | tail -n 1 | grep . ||
        echo $((20 * copies))
}

# run NAME PYTEST_ARGUMENT...: leaves OUT/NAME.xml. A test that failed is a result; an interrupted run is none.
run() {
    name=$1
    shift
    [ ! -e "$out/$name.xml" ] || return 0
    left=$((deadline - $(date +%s)))
    if [ "$left" -le "$(longest_s "${name%%-*}")" ]; then
        is_left=1
        return 0
    fi
    echo "$name: $left s left"
    timeout -s INT -k 30 "$left" "$python" -m pytest -p no:cacheprovider --aorta-gpus="$gpus" \
        --aorta-baselines="$out/baselines" --junitxml="$out/unfinished" "$@" >"$out/$name.log" 2>&1
    case $? in
    0 | 1) mv "$out/unfinished" "$out/$name.xml" ;;
    124) is_left=1 ;;
    *)
        failed=1
        tail -n 20 "$out/$name.log"
        ;;
    esac
}

# planted SECTION FAULT: runs the test with a fault of benchmarks/overlap/planted.py, up to five times in one session of
# pytest, which starts its fork server once.
planted() {
    number=1
    while [ "$number" -le "${RUNS:-10}" ]; do
        tests='' copies=0
        while [ "$copies" -lt 5 ] && [ "$((number + copies))" -le "${RUNS:-10}" ]; do
            tests="$tests benchmarks/overlap/planted.py" copies=$((copies + 1))
        done
        PLANTED=$2 run "$1-$number" --keep-duplicates $tests
        number=$((number + copies))
    done
    copies=1
}

suite=tests/distributed/test_overlap.py
for section in "$@"; do
    case $section in
    record)
        tests=$("$python" -m pytest -p no:cacheprovider --collect-only -q "$suite" benchmarks/overlap/planted.py | grep ::)
        for test in $tests; do
            run "record-${test##*::}" "$test" --update-baselines \
                --aorta-launches="${LAUNCHES:-10}" --aorta-record="replace,noisy:recorded to show the noise of this machine"
        done
        ;;
    lost) planted lost in_line ;;
    kernel) planted kernel kernel ;;
    host) planted host late_host ;;
    straggler) planted straggler straggler ;;
    split) OUT=$out ROUNDS=${RUNS:-10} run split benchmarks/overlap/split.py ;;
    alarms)
        number=1
        while [ "$number" -le "${RUNS:-10}" ]; do
            run "alarms-$number" "$suite"
            number=$((number + 1))
        done
        ;;
    summary) "$python" -m benchmarks.overlap.summary "$out" || failed=1 ;;
    *)
        echo "section $section is unknown; the first lines of $0 list the sections" >&2
        exit 2
        ;;
    esac
done
tar -czf "$out/unfinished" -C "$out" $(cd "$out" && ls | grep -v -e '^runs.tar.gz$' -e '^unfinished$')
mv "$out/unfinished" "$out/runs.tar.gz"
[ "$failed" -eq 0 ] || exit 1
[ "$is_left" -eq 0 ] || exit 3
