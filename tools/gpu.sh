#!/bin/sh
# Everything that needs a GPU in one go, on a machine with python3 (torch >= 2.11), nvcc and an NVIDIA GPU, without network:
# the native library (built here unless a prebuilt one lies in megatron_mtraining/lib), the GPU tests, the benchmark.
#
#   tools/gpu.sh [build|test|bench|sanitize|ring ...]     default: test
#
# ring: the distributed suite over NCCL and the ring benchmark on 1, 2, 4 ... GPUs, as many as there are (docs/ring.md).
# PYTHON names the interpreter, OUT the folder of the results (default: benchmarks/results), BENCH further options of
# benchmarks.bench_ops, RING of benchmarks.bench_scaling, CMAKE_ARGS of CMake.
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

# A library of the Hopper kernels in the form that racecheck can follow (docs/kernels.md), in a tree of its own, and the
# controls: which hand-overs of shared memory it reports although they are right.
racecheck_build() {
    if [ ! -f build/racecheck/libmegatron_mtraining_ops.so ]; then
        cmake -S csrc -B build/racecheck -G Ninja -DPython_EXECUTABLE="$($python -c 'import sys; print(sys.executable)')" \
            -DMTRAINING_RACECHECK=ON -DMTRAINING_CUDA_ARCHITECTURES=90
        ninja -C build/racecheck
    fi
    [ -f build/racecheck/controls ] || nvcc -std=c++17 -lineinfo -gencode=arch=compute_90a,code=sm_90a -Icsrc/include -Icsrc \
        tests/gpu/racecheck_controls.cu -o build/racecheck/controls
    rm -rf build/racecheck/tree
    mkdir -p build/racecheck/tree/megatron_mtraining
    cp -r megatron_mtraining tests build/racecheck/tree/
    cp build/racecheck/libmegatron_mtraining_ops.so build/racecheck/tree/megatron_mtraining/lib/
}

# racecheck on the Hopper kernels: nothing but polled words may be reported.
racecheck_hopper() {
    check="compute-sanitizer --tool racecheck --racecheck-report hazard --show-backtrace no --print-limit 1000000"
    for pattern in 0 1 2 3 4 5; do
        $check build/racecheck/controls $pattern >"$out/racecheck-control-$pattern.log" 2>&1
        clean=$(grep -c 'RACECHECK SUMMARY: 0 hazards' "$out/racecheck-control-$pattern.log" || true)
        case $pattern:$clean in
            [01]:1 | [2345]:0) ;;
            *) echo "racecheck judges control $pattern otherwise than docs/kernels.md says"; return 1 ;;
        esac
    done
    # shellcheck disable=SC2086
    (cd build/racecheck/tree && PYTHONPATH="$PWD" PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        $check "$option" kns=sm90 $python -m tests.gpu.sanitizer_suite sm90) >"$out/racecheck-hopper.log" 2>&1
    $python tools/racecheck_report.py "$out/racecheck-hopper.log"
}

# The small suite under the checkers of the CUDA toolkit, side by side, every allocation a real one. Memory accesses and
# races are looked for in our kernels alone; uninitialised memory needs to know what all kernels write. The Hopper kernels
# have a racecheck of their own.
sanitize() {
    failed=""
    option=$(compute-sanitizer --help | grep -oE -- '--kernel-(regex|name)' | sort -r | head -n 1)
    mkdir -p "$out"
    racecheck_build
    racecheck_hopper >"$out/sanitizer-hopper.log" 2>&1 &
    eval "pid_hopper=$!"
    for tool in memcheck racecheck initcheck; do
        filter="$option kns=mtraining" kernels=""
        [ $tool != initcheck ] || filter=""
        [ $tool != racecheck ] || kernels="sm80"
        # shellcheck disable=SC2086
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 $filter \
            $python -m tests.gpu.sanitizer_suite $kernels >"$out/sanitizer-$tool.log" 2>&1 &
        eval "pid_$tool=$!"
    done
    for tool in memcheck racecheck initcheck hopper; do
        eval "wait \$pid_$tool" || failed="$failed $tool"
        echo "compute-sanitizer, $tool: $(tail -n 1 "$out/sanitizer-$tool.log")"
    done
    [ -z "$failed" ] || { echo "tools/gpu.sh: failed:$failed (logs in $out)" >&2; return 1; }
}

# Rings over all GPUs of this machine: correctness first; the benchmark runs even so, and either failure is told at the end.
ring() {
    failed=""
    mkdir -p "$out"
    suite="$out/ring-suite.log"
    $python -m pytest -q -p no:cacheprovider -m gpu --durations=0 tests/core/test_distributed.py >"$suite" 2>&1 || failed=" suite"
    tail -n 1 "$suite"
    # shellcheck disable=SC2086
    $python -m benchmarks.bench_scaling --out "$out" ${RING:-} || failed="$failed benchmark"
    # With two or three GPUs a hierarchical ring of two by two on pretended hosts: its bytes and bits, no times.
    case $($python -c 'import torch; print(torch.cuda.device_count())') in
        2 | 3) pretended >"$out/ring-pretended.log" 2>&1 || failed="$failed pretended" ;;
    esac
    [ -z "$failed" ] || { echo "tools/gpu.sh: failed:$failed (logs in $out)" >&2; return 1; }
}

pretended() {
    $python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.bench_ring --seq-lens 65536 --inner 4 2 \
        --pattern bands --dense --pretend-hosts 2 --out "$out"
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
        ring) ring ;;
        *) echo "tools/gpu.sh: $task is none of build, test, bench, sanitize, ring" >&2; exit 2 ;;
    esac
done
