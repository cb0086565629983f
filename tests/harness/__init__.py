"""What the tests and the benches share: a real server on a data directory of its own, raw HTTP, and eyes on the host.

It does not know what is tested, and imports nothing of pytest.
"""
