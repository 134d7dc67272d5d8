#!/usr/bin/env bash
# What action.yml runs: `run.sh install`, then `run.sh run`. Results come into lockstep-results.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
environment=${RUNNER_TEMP:?}/lockstep

install() {
    local wheel=${LOCKSTEP_WHEEL:-}
    if [ -z "$wheel" ]; then
        "$root/run" wheel "$RUNNER_TEMP/wheel"
        wheel=$(echo "$RUNNER_TEMP"/wheel/*.whl)
    fi
    python3 -m venv "$environment"
    "$environment/bin/pip" install --disable-pip-version-check "$wheel"
    echo "$environment/bin" >>"$GITHUB_PATH"
}

run() {
    local words results=lockstep-results
    read -ra words <<<"${LOCKSTEP_RUN:?}"
    mkdir -p "$results"
    case "${words[0]}" in
        replay) words+=(--save "$results/cases" --shrink --perfetto "$results/run.perfetto-trace") ;;
        fuzz) words+=(--save "$results/cases") ;;
    esac
    "$environment/bin/lockstep" "${words[@]}" --junit "$results/${words[0]}.xml" \
        --annotations github --summary "${GITHUB_STEP_SUMMARY:?}"
}

"$1"
