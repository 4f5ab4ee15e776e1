#!/usr/bin/env bash
# Runs the pinned clang-tidy over the library, the engine and the command line, from the release
# build's compile commands, which are without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z -- 'src/*.cc' 'apps/*.cc' ':!src/cuda' ':!src/state/cuda' |
  xargs -0 -r -n 1 -P "$(nproc)" clang-tidy-19 -p build --quiet --warnings-as-errors='*' 2>/dev/null
