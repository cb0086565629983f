#!/bin/sh
# Prepares this machine for building and running Coppice: Debian packages and the user that the server runs as.
# Idempotent: what is there is left alone, and said so. Called by `make setup`, before the build.
set -eu

say() { printf '%s\n' "setup: $*"; }
fail() {
    printf '%s\n' "setup: $*" >&2
    exit 1
}

# QEMU, file systems, building root file systems, unpacking the guest kernel, and a venv for the Python SDK.
packages="
    ca-certificates e2fsprogs kmod mmdebstrap mount python3-venv qemu-system-x86 util-linux xfsprogs xz-utils zstd
    debian-archive-keyring
"
# Compiling Rust needs a linker.
packages="$packages gcc libc6-dev"
# The tests make networks of their own, and look at what was made.
packages="$packages iproute2 nftables"
server_user=coppice

[ "$(uname -s)" = Linux ] || fail "Coppice runs on Linux."
[ "$(uname -m)" = x86_64 ] || fail "Coppice runs on x86_64 so far, and this is $(uname -m)."
[ "$(id -u)" = 0 ] || fail "this needs root (packages, a mount, a system user); please run: sudo make setup"
command -v apt-get >/dev/null || fail "only Debian and its relatives are set up by themselves; install: $packages"

# cargo may be in the home directory of who calls sudo, or of root.
PATH="$PATH:${HOME:-/root}/.cargo/bin"
command -v cargo >/dev/null ||
    fail "no Rust toolchain; this line installs it: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"

missing=""
for package in $packages; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done
# The guest kernel comes from apt too, so its lists must know it.
known=$(apt-cache policy linux-image-cloud-amd64 2>/dev/null | sed -n 's/^  Candidate: //p')
if [ -n "$missing" ] || [ -z "$known" ] || [ "$known" = "(none)" ]; then
    say "updating the package lists"
    apt-get -qq update
fi
if [ -n "$missing" ]; then
    say "installing:$missing"
    # shellcheck disable=SC2086 # a list
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends $missing >/dev/null
else
    say "all Debian packages are there"
fi

if id "$server_user" >/dev/null 2>&1; then
    say "user $server_user is there"
else
    say "making the system user $server_user (no login, no home), which the server runs as"
    useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "$server_user"
fi
