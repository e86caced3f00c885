"""The pipeline channel of gshare, in Python: see `gshare_runner::channel` for what the words at which place mean.

Loads and stores of aligned words are single instructions in CPython. What Python has no word for is the order between a
store and a later load; so where the protocol needs one there is a system call: who moves a counter always wakes, and who
sleeps lets the kernel compare."""

import ctypes
import mmap
import os
import platform
import select
import struct
import time

MAGIC, VERSION, PAGE, DESCRIPTOR = 0x6773686172656368, 3, 4096, 64
HEAD, TAIL, SENDER_CLOSED, RECEIVER_CLOSED = 128, 256, 384, 448
HEAD_ASLEEP, TAIL_ASLEEP = 192, 320
# Length and tag of the last even and the last odd message, for receivers that take them with the counter.
LATEST = HEAD + 16
NO_TAG = (1 << 64) - 1
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())

_libc = ctypes.CDLL(None, use_errno=True)


class ChannelError(Exception):
    """The channel cannot be used."""


class Closed(ChannelError):
    """The other side closed it, or its process is gone."""


def _round(n):
    return -(-n // PAGE) * PAGE


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Channel:
    """One end of a channel that the host made; `path` is the file in the host's table."""

    def __init__(self, path, host_pidfd=None):
        if SYS_FUTEX is None:
            raise ChannelError(f"no futex number for {platform.machine()}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < PAGE:
                raise ChannelError("not a channel: smaller than a page")
            self.map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        magic, version, slots, slot_bytes = struct.unpack_from("=QIIQ", self.map, 0)
        if (magic, version) != (MAGIC, VERSION):
            raise ChannelError("not a channel: another mark or version")
        data = PAGE + _round(slots * DESCRIPTOR)
        if not 2 <= slots <= 1024 or data + slots * _round(slot_bytes) != size:
            raise ChannelError("not a channel: its size is not that of its slots")
        self.slots, self.slot_bytes, self.data, self.pidfd = slots, slot_bytes, data, host_pidfd
        word = lambda at: ctypes.c_uint32.from_buffer(self.map, at)
        self.head, self.tail = word(HEAD), word(TAIL)
        self.head_asleep, self.tail_asleep = word(HEAD_ASLEEP), word(TAIL_ASLEEP)
        self.sender_closed, self.receiver_closed = word(SENDER_CLOSED), word(RECEIVER_CLOSED)

    def _descriptor(self, message):
        return PAGE + message % self.slots * DESCRIPTOR

    def _slot(self, message):
        return self.data + message % self.slots * _round(self.slot_bytes)

    def _filled(self):
        filled = (self.head.value - self.tail.value) & 0xFFFFFFFF
        if filled > self.slots:
            raise ChannelError(f"corrupt channel: published - released is {filled}, the limit is {self.slots}")
        return filled

    def _wait(self, word, asleep, closed, ready):
        begun = time.monotonic()
        while True:
            was_closed, seen = closed.value, word.value
            if ready():
                return
            if was_closed:
                raise Closed("the other side closed the channel")
            if time.monotonic() - begun < 20e-6:
                continue
            if self.pidfd is not None and select.select([self.pidfd], [], [], 0)[0]:
                raise Closed("the host is gone")
            asleep.value = 1
            limit = _Timespec(0, 20_000_000)
            _libc.syscall(SYS_FUTEX, ctypes.byref(word), 0, seen, ctypes.byref(limit), None, 0)
            asleep.value = 0

    def _advance(self, word):
        word.value = (word.value + 1) & 0xFFFFFFFF
        _libc.syscall(SYS_FUTEX, ctypes.byref(word), 1, 0x7FFFFFFF, None, None, 0)

    def receive(self):
        """The next message as (tag, memoryview); it stays there until `release`."""
        self._wait(self.head, self.head_asleep, self.sender_closed, lambda: self._filled() > 0)
        message = self.tail.value
        length, tag = struct.unpack_from("=QQ", self.map, self._descriptor(message))
        if length > self.slot_bytes:
            raise ChannelError(f"corrupt channel: length is {length}, the limit is {self.slot_bytes}")
        at = self._slot(message)
        return tag, memoryview(self.map)[at : at + length]

    def release(self):
        """The message that was received last is done with."""
        self._advance(self.tail)

    def last_tag(self):
        """The tag of the last message that was published; None before the first."""
        (tag,) = struct.unpack_from("=Q", self.map, self._descriptor((self.head.value - 1) & 0xFFFFFFFF) + 8)
        return None if tag == NO_TAG else tag

    def send(self, tag, data):
        """Copies a message into the next slot and publishes it."""
        if len(data) > self.slot_bytes:
            raise ChannelError(f"a message of {len(data)} bytes in slots of {self.slot_bytes}")
        self._wait(self.tail, self.tail_asleep, self.receiver_closed, lambda: self._filled() < self.slots)
        message = self.head.value
        at = self._slot(message)
        self.map[at : at + len(data)] = bytes(data)
        # Whole or not at all: it is not told how far the copy is, so what is told is that of another message.
        at = self._descriptor(message)
        struct.pack_into("=QQQ", self.map, at, len(data), tag, (message << 32) ^ 0xFFFFFFFFFFFFFFFF)
        struct.pack_into("=QQ", self.map, LATEST + message % 2 * 16, len(data), tag)
        self._advance(self.head)

    def close_sender(self):
        """Nothing more will be sent."""
        self.sender_closed.value = 1
        _libc.syscall(SYS_FUTEX, ctypes.byref(self.head), 1, 0x7FFFFFFF, None, None, 0)
