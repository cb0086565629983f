#!/bin/sh
# Prints the path of a Python environment with exactly what tests/requirements.txt names, made if it is not there yet.
# Usage: scripts/venv.sh CACHE. Safe to call twice at once.
set -eu

cache=$1
requirements=$(dirname "$0")/../tests/requirements.txt
key=$(sha256sum "$requirements" | cut -c1-16)
venv=$cache/venv-$key

mkdir -p "$cache"
exec 9>"$cache/venv.lock"
flock 9
if [ ! -e "$venv/complete" ]; then
    printf '%s\n' "tests: making the Python environment $venv" >&2
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        printf '%s\n' "tests: Python 3.11 or newer is needed, and this is $(python3 --version)" >&2
        exit 1
    }
    python3 -m venv --clear "$venv" >&2
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$requirements" >&2
    "$venv/bin/pip" check -q >&2 || "$venv/bin/pip" check >&2
    touch "$venv/complete"
fi
printf '%s\n' "$venv"
