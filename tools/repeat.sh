#!/usr/bin/env bash
# Runs the tests that depend on chance, on threads or on processes again and again, and stops at the first failure.
#   N=30          how often
#   LOAD=1        beside one busy loop on every core; they end with this script
#   FRESH=1       every run with a seed of its own, which is printed; otherwise all with KVSTORE_SEED, by default 0
#   JOBS, PY      workers, and the Python to run them with
# Arguments: what to run, by default all of tests/. Compilers and interpreters of kernels, and builds of packages, are
# processes of their own that meet nobody: they are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
number=${N:-30} jobs=${JOBS:-$(nproc)} python=${PY:-.venv/bin/python}
output=$(mktemp)
busy=()
trap 'rm -f "$output"; for pid in "${busy[@]}"; do kill "$pid" 2>/dev/null || true; done' EXIT
trap 'exit 130' INT TERM
if [ "${LOAD:-}" = 1 ]; then
  for _ in $(seq "$(nproc)"); do
    timeout 6h sh -c 'while :; do :; done' &
    busy+=($!)
  done
fi
for run in $(seq "$number"); do
  seed=${KVSTORE_SEED:-0}
  if [ "${FRESH:-}" = 1 ]; then seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); fi
  if ! PYTHONHASHSEED=0 KVSTORE_SEED=$seed "$python" -m pytest -q -x -n "$jobs" --dist worksteal \
      --ignore=tests/kernels --ignore=tests/test_packaging.py -m "random or threads or processes" "${@:-tests}" >"$output" 2>&1; then
    cat "$output"
    echo "run $run of $number failed; KVSTORE_SEED=$seed${LOAD:+, LOAD=$LOAD}"
    exit 1
  fi
  echo "run $run of $number, KVSTORE_SEED=$seed: $(tail -n 1 "$output")"
done
