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

# The small suite under the checkers of the CUDA toolkit, every allocation a real one.
sanitize() {
    for tool in memcheck racecheck initcheck; do
        echo "compute-sanitizer --tool $tool"
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            $python -m pytest -q -p no:cacheprovider -m gpu tests/gpu \
            -k "one-block or two-blocks or documents-striped or pieces or test_columns or (test_probes and case0)"
    done
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
