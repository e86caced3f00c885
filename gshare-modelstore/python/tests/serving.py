"""A store for tests."""

import os
import socket
import subprocess
import time
import unittest

GSHARE = os.environ.get("GSHARE_COMMAND", "gshare")


def serve(test: unittest.TestCase, path: str, *flags: str, **environment: str) -> subprocess.Popen:
    """A store that listens at the path, and ends with the test at the latest."""
    command = [GSHARE, "store", "serve", "--socket", path, *flags]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | environment)
    test.addCleanup(server.wait)
    test.addCleanup(server.kill)
    deadline = time.monotonic() + 60
    while True:
        # The file is there a moment before the server listens.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            if client.connect_ex(path) == 0:
                return server
        test.assertIsNone(server.poll(), "the store ended")
        test.assertLess(time.monotonic(), deadline, "the store does not start")
        time.sleep(0.01)
