"""Messages between two processes: nameless files whose descriptors go through a socket.

A file holds one pickled value: a table of sizes, the pickle, and every array of it out of band
(pickle protocol 5), so that the receiver maps arrays instead of copying them.
"""

import mmap
import os
import pickle
import socket
import sys
import tempfile
from typing import IO, Any

import numpy as np

_ALIGNMENT = 64
"""Every part of a file starts at a multiple of this."""
_NUMBER_BYTES = 8


def pack(value: object) -> IO[bytes]:
    """Write a value to a new nameless file.

    Raises:
        OSError: no memory or disk is left for it.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
    file = _nameless_file()
    try:
        for part in (sizes.data.cast("B"), *parts):
            file.write(part)
            file.write(bytes(-part.nbytes % _ALIGNMENT))
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def unpack(descriptor: int) -> Any:
    """Read the value of a file; its arrays are writable and stay valid when the file is closed.

    Only for files that a process of this program wrote: unpickling runs what they say.
    """
    content = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    count = int(np.frombuffer(content, np.int64, 1)[0])
    sizes = np.frombuffer(content, np.int64, count, offset=8).tolist()
    parts: list[memoryview] = []
    at = _padded(8 * (count + 1))
    for size in sizes:
        parts.append(content[at : at + size])
        at += _padded(size)
    return pickle.loads(parts[0], buffers=parts[1:])


def send(channel: socket.socket, number: int, file: IO[bytes]) -> None:
    """Send a numbered file; whoever receives it shares it.

    Raises:
        OSError: the other side is gone.
    """
    socket.send_fds(channel, [number.to_bytes(_NUMBER_BYTES, "little")], [file.fileno()])


def receive(channel: socket.socket) -> tuple[int, Any] | None:
    """Wait for a number and its value; None when the other side is gone.

    Raises:
        TimeoutError, BlockingIOError: nothing came within the channel's timeout.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _NUMBER_BYTES, 1)
    except ConnectionError:
        return None
    if not header:
        return None
    try:
        return int.from_bytes(header, "little"), unpack(descriptors[0])
    finally:
        os.close(descriptors[0])


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _nameless_file() -> IO[bytes]:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("harts"), "w+b")
    return tempfile.TemporaryFile()
