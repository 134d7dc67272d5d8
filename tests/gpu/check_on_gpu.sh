#!/usr/bin/env bash
# tests/gpu/check_on_gpu.sh [DIR]   everything that only a GPU can show, in one go (docs/gpu.md)
# Builds with CUDA, runs the tests of single kernels on the GPU, replays there and on the CPU
# executor and wants the same chain of hashes, does both under compute-sanitizer, times the kernels.
# Results lie in DIR (build/gpu by default). LOCKSTEP_VLLM_PYTHON names an interpreter that has
# vLLM, whose operators are then timed beside ours.
# Exit status: 0 all of it held, 1 something did not, 2 it cannot be run here.
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
[ -e /dev/nvidiactl ] || cannot "there is no GPU here (/dev/nvidiactl)"
command -v compute-sanitizer >/dev/null || cannot "compute-sanitizer is not in PATH"
mkdir -p "$out"
cd "$root"
cmake --preset cuda >"$out/configure.log" || cannot "the build cannot be set up: $out/configure.log"
cmake --build "$build" --target lockstep cuda_backend_tests lockstep_gpu_benchmarks \
    >"$out/build.log" ||
    cannot "the build has failed: $out/build.log"

hash_of() { sed -n 's/.*"state_hash": *"\([0-9a-f]*\)".*/\1/p' "$1"; }

# One replay on either side: pages are compared with the model, hashes with each other.
replay_both() { # NAME OPTION...
    local name=$1 side
    shift
    for side in cuda simt; do
        "$build/lockstep" replay "$trace" --backend "$side" --json "$out/$name.$side.json" "$@" \
            >"$out/$name.$side.txt" 2>&1 || {
            printf 'FAILED  %s on %s: %s\n' "$name" "$side" "$out/$name.$side.txt"
            status=1
            return
        }
    done
    if [ -n "$(hash_of "$out/$name.cuda.json")" ] &&
        [ "$(hash_of "$out/$name.cuda.json")" = "$(hash_of "$out/$name.simt.json")" ]; then
        printf 'ok      %s: one chain of hashes\n' "$name"
    else
        printf 'FAILED  %s: the hashes of GPU and CPU differ\n' "$name"
        status=1
    fi
}

kernel_tests() { # NAME, and what to run them under
    local name=$1
    shift
    if "$@" ctest --test-dir "$build" -L device --no-tests=error --output-on-failure \
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
    if compute-sanitizer --tool "$tool" --error-exitcode 3 "$build/lockstep" replay "$trace" \
        --backend cuda --limit 20 "$@" >"$out/$tool.txt" 2>&1; then
        printf 'ok      compute-sanitizer %s\n' "$tool"
    else
        printf 'FAILED  compute-sanitizer %s: %s\n' "$tool" "$out/$tool.txt"
        status=1
    fi
}

kernel_tests plain
kernel_tests memcheck compute-sanitizer --target-processes all --error-exitcode 3
replay_both words
replay_both real_numbers --numbers real
replay_both int8 --numbers real --dtype int8
replay_both int8_per_token_head --numbers real --dtype int8_per_token_head
replay_both int4_per_token_head --numbers real --dtype int4_per_token_head
replay_both nvfp4 --numbers real --dtype nvfp4
replay_both streams --streams 4
replay_both graphs --graphs 64 --numbers real
for tool in memcheck racecheck synccheck; do sanitized "$tool" --numbers real; done
"$build/lockstep" fuzz --runs 200 --backend cuda --check fast >"$out/fuzz.txt" 2>&1 ||
    { printf 'FAILED  fuzz: %s\n' "$out/fuzz.txt" && status=1; }
"$build/lockstep_gpu_benchmarks" --benchmark_repetitions=5 --benchmark_report_aggregates_only \
    --benchmark_out="$out/bandwidth.json" | tee "$out/bandwidth.txt"
"${LOCKSTEP_VLLM_PYTHON:-python3}" tests/gpu/vllm_operators.py --ours "$out/bandwidth.json" \
    --json "$out/vllm.json" >"$out/vllm.txt" 2>&1 && cat "$out/vllm.txt" ||
    printf 'left out: vLLM beside it (%s)\n' "$(tail -n 1 "$out/vllm.txt")"
exit "$status"
