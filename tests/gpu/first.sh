#!/usr/bin/env bash
# A GPU's first run, in commands of at most ten minutes each, those first that tell most:
#
#   tests/gpu/first.sh        lists them
#   tests/gpu/first.sh 1      builds, for the GPU that is there
#   tests/gpu/first.sh 2      tests; each of 2 to 9 needs the build, and no other
#   tests/gpu/first.sh all    all of them, one after another, also after one that failed
#
# Each prints its results, and writes them to the folder that it names: $OUT, or one in
# benchmarks/results. The machine's own python and torch are used; only build/gpu is left, of which
# what hasn't changed isn't compiled again.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
COMMANDS=(build values attention paths sanitizer compile speed train memory)

build() {
  mkdir -p build/gpu
  local arch
  arch=$($PYTHON -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || return 1
  TORCH_CUDA_ARCH_LIST=$arch timeout -k 5 590 $PYTHON setup.py -q build --build-base build/gpu \
    --build-lib build/gpu/lib
}

run() {
  echo "== $1"
  if [ "$1" = build ]; then build; else PYTHONPATH=build/gpu/lib:tests/lib $PYTHON tests/gpu/run.py "$1"; fi
}

failed=()
case ${1:-} in
  "") for n in "${!COMMANDS[@]}"; do echo "$((n + 1)) ${COMMANDS[n]}"; done ;;
  all) run build || exit 1
    for name in "${COMMANDS[@]:1}"; do run "$name" || failed+=("$name"); done ;;
  *) for n in "$@"; do
    if ! [[ $n =~ ^[1-9]$ ]] || [ "$n" -gt ${#COMMANDS[@]} ]; then
      echo "expected numbers of 1 to ${#COMMANDS[@]}, or all, got $n" >&2
      exit 2
    fi
    name=${COMMANDS[n - 1]}
    run "$name" || failed+=("$name")
  done ;;
esac
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
