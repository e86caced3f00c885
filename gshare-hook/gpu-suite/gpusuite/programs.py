"""Programs under test: started in a session of their own, read line by line, and ended with all their children."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time

from .errors import Failed

# Lines of a workload for the suite; frameworks print lines of their own between them.
MARK = "suite: "


class Program:
    """A running program. Leaving its `with` block kills its whole process group."""

    def __init__(self, argv, env, name):
        self.name = name
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        self.answers = queue.Queue()
        # The last line of standard output not meant for the suite.
        self.last_line = ""
        self.child = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _read(self):
        for line in self.child.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line[len(MARK):]))
            else:
                self.last_line = line.strip()
        self.answers.put(None)

    def say(self, line):
        """Writes a line to the program's standard input."""
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise Failed(self.describe("ended early")) from None

    def hear(self, timeout):
        """The next answer of the program; `Failed` if it ends without an answer or takes longer than `timeout` seconds."""
        try:
            answer = self.answers.get(timeout=timeout)
        except queue.Empty:
            raise Failed(self.describe(f"gave no answer within {timeout:.0f} s")) from None
        if answer is None:
            self.answers.put(None)
            raise Failed(self.describe("ended early"))
        return answer

    def finish(self, timeout):
        """Closes the input and waits for the end; returns the exit code and the remaining answers."""
        end = time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        answers = []
        while True:
            try:
                answer = self.answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.kill()
                return None, answers
            if answer is None:
                break
            answers.append(answer)
        try:
            return self.child.wait(max(0.1, end - time.monotonic())), answers
        except subprocess.TimeoutExpired:
            self.kill()
            return None, answers

    def describe(self, what):
        """The error text of a failed program: exit code and the end of its standard error."""
        try:
            code = self.child.wait(2)
        except subprocess.TimeoutExpired:
            code = "none yet"
        return f"{self.name} {what} (exit code {code}): {self.error_text()}"

    def error_text(self, most=400):
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines()]
        # The marks below the lines of a Python traceback say nothing without them.
        return " | ".join(line for line in lines if line.strip("^~ ") and not line.startswith("gshare: "))[-most:]

    def close(self):
        """Ends the program and lets its streams go; nothing can be asked of it afterwards."""
        self.kill()
        for stream in (self.child.stdin, self.child.stdout, self.errors):
            with contextlib.suppress(OSError):
                stream.close()

    def kill(self):
        if self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        # Children which outlived their parent are in the same group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.reader.join(timeout=5)
