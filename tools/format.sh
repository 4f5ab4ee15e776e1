#!/usr/bin/env bash
# Runs the pinned clang-format over the tracked sources with the given arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' '*.c' | xargs -0 -r clang-format-19 "$@"
