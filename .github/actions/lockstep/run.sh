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
    local results=lockstep-results quoted
    mkdir -p "$results"
    quoted=$(python3 "$root/.github/actions/lockstep/words.py" "$results")
    local -a "words=($quoted)"
    "$environment/bin/lockstep" "${words[@]}"
}

"$1"
