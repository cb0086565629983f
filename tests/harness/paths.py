"""Where the program and the prepared data are."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
#: The prepared data directory: templates and kernels come from it; nothing in it is changed.
PREPARED = Path(os.environ.get("COPPICE_DATA_DIR", "/var/lib/coppice"))
#: Kept between runs: environments of Python and Node.
CACHE = Path(os.environ.get("COPPICE_CACHE_DIR", "/var/cache/coppice"))


def binary() -> Path:
    """The program under test: `COPPICE_BIN`, or what `make build` makes."""
    given = os.environ.get("COPPICE_BIN")
    if given:
        return Path(given)
    target = os.environ.get("CARGO_TARGET_DIR")
    return (REPO / target if target else REPO / "target") / "release" / "coppice"


def dev_binary() -> Path:
    """The same in the dev profile, with fault points: `cargo test` makes it, and `make test-vm` where it is missing."""
    return binary().parent.parent / "debug" / "coppice"
