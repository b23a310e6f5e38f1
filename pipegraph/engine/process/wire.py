"""Messages between two processes: small objects over a socket, arrays and tensors in shared memory.

A message is pickled (protocol 5). Larger buffers are kept out of the pickle and written, once each, to one shared
segment. Tensors in memory that is already shared (a stage's slabs) are not written at all, but sent as segment and
offset. Functions, classes and exceptions of ``__main__`` and of notebooks are pickled by value (cloudpickle).

A frame on the socket is a fixed header, a description of leases (``marshal``), and the pickle, if it is small; a
large pickle is written to the segment too.
"""

from __future__ import annotations

import array
import errno
import io
import marshal
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipegraph.device.slabs import Loans, aligned
from pipegraph.engine.process.pickling import Take, TreePickler, light_below, set_apart
from pipegraph.engine.process.segments import Arena, Segment
from pipegraph.engine.remote.contract import Unreadable
from pipegraph.errors import note

IN_SOCKET = 1 << 15
"""Pickles up to this size go over the socket, whose buffer holds several."""

READ = 1 << 14
"""Bytes to read at once: small messages cost one system call, during which other threads take the interpreter."""

DESCRIPTORS = 253
"""Maximum number of descriptors per message (Linux's ``SCM_MAX_FD``): the kernel silently drops more."""

_HEADER = struct.Struct("<III")


class _SlabPickler(TreePickler):
    """A pickler that sends tensors of shared slabs as segment and offset. Separate, because it checks every object."""

    def __init__(self, file: object, take: Take, back: bool, slabs: _Slabs) -> None:
        super().__init__(file, take, back)
        self._slabs = slabs

    def persistent_id(self, value: object) -> object:
        return self._slabs.place_of(value) if value.__class__ is torch.Tensor else None


class _Unpickler(pickle.Unpickler):
    """An unpickler that maps the tensors of shared slabs."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[object], slabs: Sequence[object]) -> None:
        super().__init__(file, buffers=buffers)
        self._slabs = slabs

    def persistent_load(self, place: Any) -> torch.Tensor:
        which, offset, dtype, shape, strides = place
        span = self._slabs[which][offset:]
        flat = torch.frombuffer(span, dtype=dtype)
        return flat.as_strided(shape, strides)


class _Slabs:
    """The shared slabs of a sender, and those used by the current message."""

    def __init__(self) -> None:
        self._by_address: dict[int, Segment] = {}
        self.named: list[tuple[Segment, list[torch.Tensor]]] = []
        self.some = False

    def add(self, segment: Segment) -> None:
        """Send tensors in this segment's memory by their place from now on."""
        self._by_address[segment.memory.ctypes.data] = segment
        self.some = True

    def close(self) -> None:
        """Close every descriptor; slabs still in use stay mapped."""
        for segment in self._by_address.values():
            segment.close()
        self._by_address.clear()
        self.some = False

    def place_of(self, tensor: torch.Tensor) -> object:
        """A tensor's place for the receiver; None if it is in no slab."""
        if tensor.layout != torch.strided or not tensor.numel() or tensor.device.type != "cpu":
            return None
        address = tensor.data_ptr()
        for start, segment in self._by_address.items():
            if start <= address < start + segment.nbytes:
                break
        else:
            return None
        known = [named for named, _ in self.named]
        if segment not in known:
            self.named.append((segment, []))
            known.append(segment)
        which = known.index(segment)
        self.named[which][1].append(tensor)
        return which, address - start, tensor.dtype, tuple(tensor.shape), tensor.stride()


class Port:
    """One end of a connection, a stream socket (``AF_UNIX``) that it owns. One thread at a time.

    Args:
        back: whether this is the child's end.
    """

    def __init__(self, sock: socket.socket, back: bool = False) -> None:
        self.sock = sock
        self._back = back
        self.slabs = _Slabs()
        self._arena = Arena()
        self._leases: Loans[int] = Loans()
        self._known: set[int] = set()  # our segments that the other end has mapped
        self._mapped: dict[int, Segment] = {}  # the other end's
        self._out: dict[int, object] = {}  # by lease: what the other end still reads
        self._forgotten: list[int] = []
        self._lease = 0
        self._slab_number = -1
        self._unsent = memoryview(b"")  # of a message for which the socket had no room
        self._data, self._taken = b"", 0  # what was read, and how much of it was taken
        self._fds: list[int] = []  # descriptors that came with it

    @property
    def holds(self) -> bool:
        """Whether part of the next message was read with the last one: the socket may not be readable any more."""
        return self._taken < len(self._data)

    # -- sending -------------------------------------------------------------------------------

    def send(self, message: object, wait: bool = True) -> int:
        """Send a message; returns the bytes written to shared memory.

        Args:
            wait: whether to wait for room in the socket; if not, the next message or :meth:`flush` sends the rest, and
                one of them must be called before waiting for the answer.

        Raises:
            BrokenPipeError, ConnectionResetError: the other end has closed.
        """
        take, buffers = set_apart()
        file = io.BytesIO()
        self.slabs.named = []
        pickler = (
            _SlabPickler(file, take, self._back, self.slabs)
            if self.slabs.some
            else TreePickler(file, take, self._back)
        )
        try:
            pickler.dump(message)
        except Exception as error:
            note(
                error,
                "pipegraph: a value cannot be sent to another process: backend='thread' keeps the stage in this one",
            )
            raise
        stream = memoryview(file.getvalue())
        inline = stream.nbytes <= IN_SOCKET
        parts = buffers if inline else [stream, *buffers]
        leases: list[tuple[int, int, int]] = []
        new: list[Segment] = []
        spans: list[tuple[int, int]] = []
        written = 0
        if parts:
            sizes = [part.nbytes for part in parts]
            segment = self._arena.take(sum(map(aligned, sizes)))
            for part, nbytes in zip(parts, sizes, strict=True):
                np.copyto(segment.memory[written : written + nbytes], np.frombuffer(part, np.uint8))
                spans.append((written, nbytes))
                written += aligned(nbytes)
            leases.append(self._lend(segment, new, None))
        leases += [self._lend(segment, new, tensors) for segment, tensors in self.slabs.named]
        fds = [segment.fd for segment in new]
        self.slabs.named = []
        back = list(self._leases.returned())
        about = marshal.dumps((leases, spans, inline, back, self._forgotten))
        self._forgotten = []
        head = _HEADER.pack(len(about), stream.nbytes if inline else 0, len(fds))
        self._send([head, about, *([stream] if inline else [])], fds, wait)
        for segment in new:
            segment.close()  # its descriptor was sent
        return written

    def _lend(self, segment: Segment, new: list[Segment], tensors: object) -> tuple[int, int, int]:
        """``(lease, segment number, size if the other end has not mapped it yet, else 0)``."""
        self._lease += 1
        self._out[self._lease] = segment if tensors is None else tensors
        if segment.number in self._known:
            return self._lease, segment.number, 0
        self._known.add(segment.number)
        new.append(segment)
        return self._lease, segment.number, segment.nbytes

    def _send(self, parts: Sequence[bytes | memoryview], fds: list[int], wait: bool) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        whole = b"".join((self._unsent, *parts))
        try:
            sent = self.sock.sendmsg([whole], ancillary, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:  # it holds the previous message, which will be read
            sent = self.sock.sendmsg([whole[:1]], ancillary)
        self._unsent = memoryview(whole)[sent:]
        if wait:
            self.flush()

    def flush(self) -> None:
        """Send the rest of the messages."""
        if self._unsent:
            self.sock.sendall(self._unsent)
            self._unsent = memoryview(b"")

    def _ended(self, leases: Sequence[int]) -> None:
        for number in leases:
            segment = self._out.pop(number)
            if isinstance(segment, Segment):
                dropped = self._arena.give_back(segment)
                if dropped is not None:
                    self._known.discard(dropped.number)
                    self._forgotten.append(dropped.number)

    # -- receiving -----------------------------------------------------------------------------

    def receive(self) -> Any:
        """The next message; blocks while there is none.

        Its arrays and tensors are writable and in shared memory, which the sender reuses when the last of them is
        freed.

        Raises:
            EOFError, ConnectionResetError: the other end has closed.
            OSError: this process may open no more files.
            Unreadable: the message cannot be unpickled here.
        """
        fds: list[int] = []
        try:
            about_nbytes, stream_nbytes, new_fds = _HEADER.unpack(self._take(_HEADER.size))
            about = self._take(about_nbytes)
            stream: Any = self._take(stream_nbytes)
            fds, self._fds = self._fds[:new_fds], self._fds[new_fds:]
            leases, spans, inline, back, forgotten = marshal.loads(about)
            self._ended(back)
            for number in forgotten:
                del self._mapped[number]
            views = []
            for lease, number, new in leases:
                if new:
                    self._mapped[number] = Segment(number, new, fds.pop(0))
                owner: Any = self._mapped[number].memory[:]
                self._leases.lend(owner, lease)
                views.append(memoryview(owner))
                del owner
        finally:
            for fd in fds:  # of an incomplete message
                os.close(fd)
        buffers: list[object] = []
        if spans:
            memory = views.pop(0)
            light = light_below([nbytes for _, nbytes in spans])
            for start, nbytes in spans:
                span = memory[start : start + nbytes]
                buffers.append(bytearray(span) if nbytes < light else span)
            if not inline:
                stream = buffers.pop(0)
            del memory
        try:
            if not views:
                return pickle.loads(stream, buffers=buffers)
            return _Unpickler(io.BytesIO(stream), buffers, views).load()
        except Exception as error:
            raise Unreadable(error) from error

    def _take(self, nbytes: int) -> bytes:
        """The next bytes; blocks while they are not there."""
        if len(self._data) - self._taken < nbytes:
            self._read(nbytes)
        start, self._taken = self._taken, self._taken + nbytes
        return self._data[start : self._taken]

    def _read(self, nbytes: int) -> None:
        data, self._data, self._taken = self._data[self._taken :], b"", 0
        while len(data) < nbytes:
            # With the descriptors of one message at most: Linux stops behind what brings them.
            room = socket.CMSG_SPACE(DESCRIPTORS * 4)
            more, ancillary, flags, _ = self.sock.recvmsg(
                max(READ, nbytes - len(data)), room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    found = array.array("i")
                    found.frombytes(raw[: len(raw) - len(raw) % found.itemsize])
                    self._fds += found
            if flags & socket.MSG_CTRUNC:  # the next message's would be taken for those that are missing
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not more:
                raise EOFError("the other end of the connection is gone")
            data = data + more if data else more
        self._data = data

    # -- slabs ---------------------------------------------------------------------------------

    def slab(self, nbytes: int) -> torch.Tensor:
        """Memory for a slab (uint8, one dimension), whose contents are sent without being copied."""
        segment = Segment(self._slab_number, nbytes)
        self._slab_number -= 1
        self.slabs.add(segment)
        return torch.from_numpy(segment.memory)

    def close(self) -> None:
        """Close the socket and every descriptor; received arrays stay readable."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())
        self._arena.close()
        self.slabs.close()
        self._mapped.clear()
        self._out.clear()
