"""What a client sends: every request of the `requests` library in this process, in order, while the block runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import requests


@contextmanager
def recorded() -> Iterator[list[tuple[str, str]]]:
    """A list that grows by (method, path) with each request that is sent, repeated ones too."""
    sent: list[tuple[str, str]] = []
    send = requests.Session.send

    def record(self: requests.Session, request: requests.PreparedRequest, **more: Any) -> requests.Response:
        sent.append((request.method or "", urlsplit(request.url or "").path))
        return send(self, request, **more)

    with mock.patch.object(requests.Session, "send", record):
        yield sent
