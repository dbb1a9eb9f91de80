#!/usr/bin/env bash
# The CPU part of the test suite on the GPU machine's torch (2.11), in one call, and what was run there as JSON in $OUT.
# The machine has no registry: what it lacks (pytest, hypothesis, rich, diffusers) is taken from the wheels in .whl/, if there are any.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-build}
mkdir -p "$out"
if compgen -G '.whl/*.whl' > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target build/site .whl/*.whl || exit
  export PYTHONPATH=$PWD/build/site
fi
python3 -m pip install -q --no-deps --no-build-isolation -e . || exit
export TESSERA_CACHE_DIR=$(mktemp -d) TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) CUDA_VISIBLE_DEVICES=
python3 -m pytest -q -p no:cacheprovider "$@" 2>&1 | tee "$out/core_tests.log"
status=${PIPESTATUS[0]}
python3 - "$out" "$status" "$*" <<'PY'
import json, pathlib, platform, sys, time, torch
out = pathlib.Path(sys.argv[1])
last = [line for line in (out / "core_tests.log").read_text().splitlines() if " in " in line][-1:]
json.dump(
    {"date": time.strftime("%Y-%m-%d"), "command": f"benchmarks/gpu/core_tests.sh {sys.argv[3]}".strip(), "torch": torch.__version__,
     "python": platform.python_version(), "exit": int(sys.argv[2]), "result": last[0] if last else ""},
    (out / "core_tests.json").open("w"), indent=1,
)
PY
exit "$status"
