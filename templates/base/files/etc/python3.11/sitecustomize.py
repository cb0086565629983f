# Part of Coppice: a copy of this machine must not draw the random numbers that its siblings draw.
#
# When a machine is forked, restored from a snapshot or made of a template, its guest agent sends signal 60 (SIGRTMAX - 4)
# to every process that has a handler for it, before any process goes on. Here that reseeds the shared generators of `random`,
# `numpy.random` and `ssl` (OpenSSL) from the kernel, if they have been imported. Nothing else is touched: generators that a
# program made itself are its own, and so is the signal once it has a handler of its own. COPPICE_RESEED=0 leaves all of it out.

import os as _os


def _install():
    # `_signal` and not `signal`: that would import enum and re into every program.
    import _signal
    import sys

    def reseed(_number, _frame):
        random = sys.modules.get("random")
        if random is not None and hasattr(random, "seed"):
            random.seed()
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None and hasattr(numpy_random, "seed"):
            numpy_random.seed()
        # OpenSSL looks for itself whether it is in another process, which a copy of a machine is not. What is added to its first
        # generator makes those of all threads take new seeds before they are next asked for a number.
        openssl = sys.modules.get("_ssl")
        if openssl is not None and hasattr(openssl, "RAND_add"):
            openssl.RAND_add(_os.urandom(32), 32.0)

    # A main thread that waits is interrupted for it, and Python takes up the wait again (PEP 475).
    _signal.signal(60, reseed)


if _os.environ.get("COPPICE_RESEED") != "0":
    try:
        _install()
    except Exception:  # No program may fail to start because of this.
        pass
