#!/usr/bin/env bash
# The CPU part of the test suite on the GPU machine's torch (2.11), in one call, and what was run there as JSON in $OUT.
# The machine has no registry: install first what it lacks (pytest, hypothesis, rich, diffusers) from wheels.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-build}
mkdir -p "$out"
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
