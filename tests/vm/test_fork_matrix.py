"""What every way from one machine to another keeps: real machines against the committed page."""

import os

import pytest

from harness.fork_matrix import see
from harness.outside import Servers
from harness.server import Server, prepared_templates


def test_the_page_of_what_a_fork_preserves_is_true(server: Server, outside: Servers) -> None:
    """With `COPPICE_WRITE_DOCS`, as `make docs` sets it, the page is written anew."""
    if "code-interpreter" not in prepared_templates():
        pytest.skip("no template with numpy is prepared")
    seen = see(server, outside)
    if os.environ.get("COPPICE_WRITE_DOCS"):
        seen.write()
    differences = seen.differences()
    assert not differences, "run `make docs` if this is meant:\n" + "\n".join(differences)
