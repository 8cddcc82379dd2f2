#!/bin/sh
# Everything that needs a GPU in one go, on a machine with python3 (torch >= 2.11), nvcc and an NVIDIA GPU, without network:
# the native library (built here unless a prebuilt one lies in megatron_mtraining/lib), the GPU tests, the benchmark.
#
#   tools/gpu.sh [build|test|bench|sanitize ...]     default: test bench
#
# PYTHON names the interpreter, OUT the folder of the results (default: benchmarks/results), BENCH further options of
# benchmarks.bench_ops, CMAKE_ARGS further options of CMake.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
library=megatron_mtraining/lib/libmegatron_mtraining_ops.so
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

build() {
    executable=$($python -c 'import sys; print(sys.executable)')
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
    # shellcheck disable=SC2086
    cmake -S csrc -B build/native -G Ninja -DPython_EXECUTABLE="$executable" -DMTRAINING_VERSION="$version" ${CMAKE_ARGS:-}
    ninja -C build/native
    mkdir -p "$(dirname "$library")"
    cp build/native/libmegatron_mtraining_ops.so "$library"
}

run_tests() {
    # Several processes share the GPU where pytest-xdist is installed: most of a test's time is the fp64 oracle's.
    workers=$($python -c 'import importlib.util as u; print("-n 6" if u.find_spec("xdist") else "")')
    # shellcheck disable=SC2086
    $python -m pytest -q -p no:cacheprovider $workers -m gpu tests/gpu
}

# The small suite under the checkers of the CUDA toolkit, side by side, every allocation a real one. Memory accesses and
# races are looked for in our kernels alone; uninitialised memory needs to know what all kernels write. racecheck judges
# the general and the index kernels: what it reports of the Hopper kernels is not explained yet (docs/kernels.md).
sanitize() {
    failed=""
    option=$(compute-sanitizer --help | grep -oE -- '--kernel-(regex|name)' | sort -r | head -n 1)
    mkdir -p "$out"
    for tool in memcheck racecheck initcheck; do
        filter="$option kns=mtraining" kernels=""
        [ $tool != initcheck ] || filter=""
        [ $tool != racecheck ] || kernels="sm80"
        # shellcheck disable=SC2086
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 $filter \
            $python -m tests.gpu.sanitizer_suite $kernels >"$out/sanitizer-$tool.log" 2>&1 &
        eval "pid_$tool=$!"
    done
    for tool in memcheck racecheck initcheck; do
        eval "wait \$pid_$tool" || failed="$failed $tool"
        echo "compute-sanitizer --tool $tool: $(tail -n 1 "$out/sanitizer-$tool.log")"
    done
    [ -z "$failed" ] || { echo "tools/gpu.sh: failed:$failed (logs in $out)" >&2; return 1; }
}

[ -f "$library" ] || build
for task in "${@:-test}" ; do
    case $task in
        build) build ;;
        test) run_tests ;;
        bench)
            # shellcheck disable=SC2086
            $python -m benchmarks.bench_ops --out "$out" ${BENCH:-}
            ;;
        sanitize) sanitize ;;
        *) echo "tools/gpu.sh: $task is none of build, test, bench, sanitize" >&2; exit 2 ;;
    esac
done
