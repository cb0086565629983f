"""Waiting for something to become true, with a deadline and a reason."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, probe: Callable[[], T], timeout: float = 30.0, every: float = 0.05) -> T:
    """The first truthy answer of `probe`. None in time: AssertionError with `what` and the last one."""
    deadline = time.monotonic() + timeout
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what} (last seen: {answer!r})")
        time.sleep(every)


def holds(what: str, probe: Callable[[], object], seconds: float, every: float = 0.25) -> None:
    """Asserts that `probe` stays truthy for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert probe(), f"did not hold: {what}"
        time.sleep(every)
