#!/usr/bin/env bash
# Gives a load generator that `benchmarks/peers.py` measures an environment of its own and prints the path
# of its Python as the last line.
#
#   scripts/peer_env.sh guidellm | aiperf
#
# A mark is written when the environment is complete; one without it, left by a killed run, is made anew.
# PYTHON names the interpreter to build with (3.11 or newer).
set -euo pipefail

usage() { echo "usage: $(basename "$0") guidellm|aiperf" >&2; exit 2; }
[[ $# -eq 1 ]] || usage

name=$1
cache=${SERVETUNE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/servetune}
# The versions are also those of `benchmarks/peers.py`.
case $name in
  # torch first: its CPU build, where pip finds one, before guidellm resolves the rest.
  guidellm) version=0.8.1 recipe="torch==2.13.0 guidellm==0.8.1" ;;
  aiperf) version=0.13.0 recipe="aiperf==0.13.0" ;;
  *) usage ;;
esac

final=$cache/peers/$name-$version
marker=$final/.servetune-complete
log=$final.log
mkdir -p "$cache/peers"

exec 9>"$final.lock"
flock 9 # another run may be making the same one
if [[ ! -f $marker || $(<"$marker") != "$recipe" ]]; then
  echo "peer_env: making the $name $version environment (once; log: $log)" >&2
  rm -rf "$final"
  build() {
    "${PYTHON:-python3}" -m venv "$final"
    for package in $recipe; do "$final/bin/python" -m pip install "$package"; done
  }
  # A command of its own, not a condition: `set -e` does not hold inside conditions.
  trap '[[ $? -eq 0 ]] || { tail -n 20 "$log"; echo "peer_env: failed"; } >&2' EXIT
  build >"$log" 2>&1 9>&- </dev/null
  echo "$recipe" >"$marker"
  echo "peer_env: $name $version ready in $SECONDS s" >&2
fi
echo "$final/bin/python"
