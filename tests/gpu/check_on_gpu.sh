#!/usr/bin/env bash
# tests/gpu/check_on_gpu.sh [DIR [PART...]]   the checks that need a GPU (docs/kernels.md)
# Parts, all by default: `kernels` tests single kernels, `replays` and `fuzz` compare the GPU with
# the CPU executor by state hashes, `plugin` runs FlashInfer's kernel on Lockstep's pages, `class` a
# Python class in torch, `sanitizer` runs compute-sanitizer, `bandwidth` times the kernels. DIR
# (build/gpu by default) receives the results.
# LOCKSTEP_BUILD names a finished build, for a machine that cannot build: nothing is compiled.
# LOCKSTEP_PYTHON (python3 by default) names the interpreter of the class, LOCKSTEP_VLLM_PYTHON one
# with vLLM, whose operators are then timed too.
# Exit status: 0 all checks passed, 1 a check failed, 2 the checks cannot run here.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
out=${1:-$root/build/gpu}
shift || true
parts=" ${*:-kernels replays fuzz plugin class sanitizer bandwidth} "
build=${LOCKSTEP_BUILD:-$root/build/cuda}
trace=$root/traces/samples/shared_prefixes.jsonl
status=0

cannot() {
    printf 'check_on_gpu: %s\n' "$1" >&2
    exit 2
}
asked() { [[ $parts == *" $1 "* ]]; }
for part in $parts; do
    case $part in
    kernels | replays | fuzz | plugin | class | sanitizer | bandwidth) ;;
    *) cannot "part '$part': see the list at the top of this file" ;;
    esac
done
[ -e /dev/nvidiactl ] || cannot "no GPU (/dev/nvidiactl)"
mkdir -p "$out"
cd "$root"
if [ -z "${LOCKSTEP_BUILD:-}" ]; then
    cmake --preset cuda >"$out/configure.log" || cannot "cmake failed: $out/configure.log"
    cmake --build "$build" --target lockstep cuda_backend_tests lockstep_gpu_benchmarks \
        >"$out/build.log" ||
        cannot "the build failed: $out/build.log"
fi

verdict() { # RC NAME FILE
    if [ "$1" = 0 ]; then
        printf 'ok      %s\n' "$2"
    else
        printf 'FAILED  %s: %s\n' "$2" "$3"
        status=1
    fi
}

# The state hash, a string or a list, on one line.
hash_of() { tr -d ' \n' <"$1" | grep -o '"state_hash":\("[0-9a-f]*"\|\[[^]]*\]\)'; }

# One command on GPU and CPU at once: both must agree with the model, and have the same hashes.
both() { # NAME COMMAND OPTION...
    local name=$1 side simt rc=0
    shift
    side() { "$build/lockstep" "$@" --backend "$side" --json "$out/$name.$side.json" \
        >"$out/$name.$side.txt" 2>&1; }
    side=simt
    side "$@" &
    simt=$!
    side=cuda
    side "$@" || rc=$?
    verdict "$rc" "$name on the GPU" "$out/$name.cuda.txt"
    wait "$simt" || {
        verdict 1 "$name on the CPU" "$out/$name.simt.txt"
        return
    }
    [ "$rc" = 0 ] || return 0
    [ -n "$(hash_of "$out/$name.cuda.json")" ] &&
        [ "$(hash_of "$out/$name.cuda.json")" = "$(hash_of "$out/$name.simt.json")" ] || rc=1
    verdict "$rc" "$name, equal hashes" "$out/$name.cuda.json"
}

kernel_tests() { # NAME TIMEOUT_S [COMMAND...]: ctest under the command
    local name=$1 timeout_s=$2 rc=0
    shift 2
    "$@" ctest --test-dir "$build" -L device --no-tests=error --output-on-failure \
        --timeout "$timeout_s" >"$out/kernels.$name.txt" 2>&1 || rc=$?
    ! grep -q '(Skipped)' "$out/kernels.$name.txt" || rc=1
    verdict "$rc" "tests of single kernels, $name" "$out/kernels.$name.txt"
}

sanitized() { # TOOL OPTION...
    local tool=$1 rc=0
    shift
    timeout 3600 compute-sanitizer --tool "$tool" --error-exitcode 3 "$build/lockstep" replay \
        "$trace" --backend cuda --limit 20 "$@" >"$out/$tool.txt" 2>&1 || rc=$?
    verdict "$rc" "compute-sanitizer $tool" "$out/$tool.txt"
}

if asked kernels; then kernel_tests plain 1500; fi
if asked replays; then
    while read -r name options; do
        # shellcheck disable=SC2086
        both "$name" replay "$trace" $options
    done < <(grep -v '^#' tests/gpu/replays.txt)
fi
if asked fuzz; then both fuzz fuzz --seed 0 --runs 200 --check fast; fi
plugin=$build/plugins/flashinfer_plugin_gpu.so
if asked plugin && [ -f "$plugin" ]; then
    rc=0
    "$build/lockstep" replay "$trace" --backend "$plugin" --limit 40 --block-size 96 \
        --attention-backend flashinfer >"$out/plugin.txt" 2>&1 || rc=$?
    verdict "$rc" "FlashInfer's kernel on Lockstep's pages" "$out/plugin.txt"
elif asked plugin; then
    printf 'skipped plugin: %s is not built (it needs FlashInfer)\n' "$plugin"
fi
python=${LOCKSTEP_PYTHON:-python3}
has_torch() { "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>"$out/torch.txt"; }
if asked class && has_torch; then
    for options in "" "--numbers real --dtype fp8_e4m3"; do
        rc=0
        # shellcheck disable=SC2086
        "$build/lockstep" replay "$trace" --backend cuda --limit 40 --engine-python "$python" \
            --kernels docs/examples/torch_kernels.py:Sdpa $options >"$out/class.txt" 2>&1 || rc=$?
        verdict "$rc" "a class in torch on Lockstep's pages${options:+, $options}" "$out/class.txt"
        [ "$rc" = 0 ] || break
    done
elif asked class; then
    printf 'skipped class: %s has no torch with CUDA (%s)\n' "$python" "$out/torch.txt"
fi
if asked sanitizer; then
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck synccheck initcheck; do sanitized "$tool" --numbers real; done
        kernel_tests memcheck 14400 compute-sanitizer --target-processes all --error-exitcode 3
    else
        printf 'skipped compute-sanitizer: not in PATH\n'
    fi
fi
if asked bandwidth; then
    "$build/lockstep_gpu_benchmarks" --benchmark_repetitions=5 --benchmark_min_time=0.02 \
        --benchmark_report_aggregates_only --benchmark_out="$out/bandwidth.json" |
        tee "$out/bandwidth.txt"
    rc=0
    python3 tests/gpu/bandwidth_gate.py "$out/bandwidth.json" >"$out/bandwidth_gate.txt" 2>&1 ||
        rc=$?
    verdict "$rc" "bandwidth, $(tail -n 1 "$out/bandwidth_gate.txt")" "$out/bandwidth_gate.txt"
    "${LOCKSTEP_VLLM_PYTHON:-python3}" tests/gpu/vllm_operators.py --ours "$out/bandwidth.json" \
        --json "$out/vllm.json" >"$out/vllm.txt" 2>&1 && cat "$out/vllm.txt" ||
        printf 'skipped vLLM (%s)\n' "$(tail -n 1 "$out/vllm.txt")"
fi
exit "$status"
