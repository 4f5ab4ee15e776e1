#!/usr/bin/env bash
# Installs the packages a task needs: setup.sh build|lint|fuzz. As root through apt; otherwise it
# prints the line to run and stops. Does nothing, and asks nothing, when all are there.
set -euo pipefail

build=(build-essential cmake ninja-build libgtest-dev libcli11-dev libfmt-dev libsimdjson-dev
       nlohmann-json3-dev libpcre2-dev libutf8proc-dev libdnnl-dev pkg-config xz-utils)
lint=(clang-format-19 clang-tidy-19 libomp-19-dev)
fuzz=(clang-19 libclang-rt-19-dev)

case "${1:-}" in
  build) wanted=("${build[@]}") ;;
  lint) wanted=("${build[@]}" "${lint[@]}") ;;
  fuzz) wanted=("${build[@]}" "${fuzz[@]}") ;;
  *) echo "usage: setup.sh build|lint|fuzz" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "setup: not a Debian system; install the counterparts of: ${wanted[*]}" >&2
  exit 0
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "setup: packages are missing; run this and try again:" >&2
  echo "  sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
