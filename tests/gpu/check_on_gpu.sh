#!/usr/bin/env bash
# tests/gpu/check_on_gpu.sh [DIR]   every check that needs a GPU, in one go (docs/kernels.md)
# Builds with CUDA, runs the tests of single kernels on the GPU, compares replays and generated cases
# with the CPU executor by their hashes, runs compute-sanitizer if it is in PATH, times the kernels.
# DIR (build/gpu by default) receives the results. LOCKSTEP_VLLM_PYTHON names an interpreter with
# vLLM, whose operators are then timed too.
# Exit status: 0 all checks passed, 1 a check failed, 2 the checks cannot run here.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
out=${1:-$root/build/gpu}
build=$root/build/cuda
trace=$root/traces/samples/shared_prefixes.jsonl
status=0

cannot() {
    printf 'check_on_gpu: %s\n' "$1" >&2
    exit 2
}
[ -e /dev/nvidiactl ] || cannot "no GPU (/dev/nvidiactl)"
sanitizer=1
command -v compute-sanitizer >/dev/null || {
    sanitizer=0
    printf 'skipped compute-sanitizer: not in PATH\n'
}
mkdir -p "$out"
cd "$root"
cmake --preset cuda >"$out/configure.log" || cannot "cmake failed: $out/configure.log"
cmake --build "$build" --target lockstep cuda_backend_tests lockstep_gpu_benchmarks \
    >"$out/build.log" ||
    cannot "the build failed: $out/build.log"

# The state hash, a string or a list, on one line.
hash_of() { tr -d ' \n' <"$1" | grep -o '"state_hash":\("[0-9a-f]*"\|\[[^]]*\]\)'; }

# One command on GPU and CPU: both must agree with the model, and have the same hashes.
both() { # NAME COMMAND OPTION...
    local name=$1 side
    shift
    for side in cuda simt; do
        "$build/lockstep" "$@" --backend "$side" --json "$out/$name.$side.json" \
            >"$out/$name.$side.txt" 2>&1 || {
            printf 'FAILED  %s on %s: %s\n' "$name" "$side" "$out/$name.$side.txt"
            status=1
            return
        }
    done
    if [ -n "$(hash_of "$out/$name.cuda.json")" ] &&
        [ "$(hash_of "$out/$name.cuda.json")" = "$(hash_of "$out/$name.simt.json")" ]; then
        printf 'ok      %s: equal hashes\n' "$name"
    else
        printf 'FAILED  %s: the hashes of GPU and CPU differ\n' "$name"
        status=1
    fi
}

kernel_tests() { # NAME TIMEOUT_S [COMMAND...]: ctest under the command
    local name=$1 timeout_s=$2
    shift 2
    if "$@" ctest --test-dir "$build" -L device --no-tests=error --output-on-failure \
        --timeout "$timeout_s" \
        >"$out/kernels.$name.txt" 2>&1 && ! grep -q '(Skipped)' "$out/kernels.$name.txt"; then
        printf 'ok      tests of single kernels, %s\n' "$name"
    else
        printf 'FAILED  tests of single kernels, %s: %s\n' "$name" "$out/kernels.$name.txt"
        status=1
    fi
}

sanitized() { # TOOL OPTION...
    local tool=$1
    shift
    if timeout 3600 compute-sanitizer --tool "$tool" --error-exitcode 3 "$build/lockstep" replay "$trace" \
        --backend cuda --limit 20 "$@" >"$out/$tool.txt" 2>&1; then
        printf 'ok      compute-sanitizer %s\n' "$tool"
    else
        printf 'FAILED  compute-sanitizer %s: %s\n' "$tool" "$out/$tool.txt"
        status=1
    fi
}

kernel_tests plain 1500
while read -r name options; do
    # shellcheck disable=SC2086
    both "$name" replay "$trace" $options
done < <(grep -v '^#' tests/gpu/replays.txt)
both fuzz fuzz --seed 0 --runs 200 --check fast
if [ "$sanitizer" = 1 ]; then
    kernel_tests memcheck 14400 compute-sanitizer --target-processes all --error-exitcode 3
    for tool in memcheck racecheck synccheck initcheck; do sanitized "$tool" --numbers real; done
fi
"$build/lockstep_gpu_benchmarks" --benchmark_repetitions=5 --benchmark_report_aggregates_only \
    --benchmark_out="$out/bandwidth.json" | tee "$out/bandwidth.txt"
"${LOCKSTEP_VLLM_PYTHON:-python3}" tests/gpu/vllm_operators.py --ours "$out/bandwidth.json" \
    --json "$out/vllm.json" >"$out/vllm.txt" 2>&1 && cat "$out/vllm.txt" ||
    printf 'skipped vLLM (%s)\n' "$(tail -n 1 "$out/vllm.txt")"
exit "$status"
