"""What tests of the network share: somewhere to go, and somewhere not to."""

from collections.abc import Iterator

import pytest

from harness import outside as net
from harness.outside import ECHO, Servers, reaches


@pytest.fixture(scope="module")
def outside() -> Iterator[Servers]:
    """Where sandboxes may go: the internet, with its DNS."""
    with net.outside() as servers:
        yield servers


@pytest.fixture(scope="module")
def private() -> Iterator[Servers]:
    """Where they may not."""
    with net.private_hosts() as servers:
        # Whoever is not kept out gets there: the host does.
        assert all(reaches(address, ECHO) for address in servers.addresses)
        yield servers
