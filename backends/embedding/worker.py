"""The embedding process: computes batches that arrive on a socket, one a lane at a time.

Rule: a thread reads frames ahead while the lanes compute, so the next batch is already here when one
ends. Lanes are threads: torch lets go of the interpreter while it computes. The server's end of the
socket closing, for whatever reason, ends this process at once. Signals meant for the server's process
group are ignored: the server decides when work ends.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from backends.embedding.handshake import EncoderOptions
from backends.embedding.ipc import HEADER, Frame, FrameKind, pack_inputs, unpack_header, unpack_inputs

if TYPE_CHECKING:
    from backends.embedding.encoder import Encoder


def _receive(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError when the server is gone."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the server closed the socket")
        view = view[count:]
    return bytes(received)


def _read_ahead(connection: socket.socket, frames: "SimpleQueue[Frame]", texts: "SimpleQueue[Frame]") -> None:
    try:
        while True:
            kind, batch, size = unpack_header(_receive(connection, HEADER.size))
            frame = Frame(kind, batch, _receive(connection, size))
            (texts if kind is FrameKind.TEXTS else frames).put(frame)
    except (EOFError, ConnectionError):
        # Nobody is left to answer, so a batch in progress is not worth finishing.
        os._exit(0)


_AUTOGROUP = Path("/proc/self/autogroup")


def lower_cpu_priority() -> None:
    """From here on this process runs only on cores that nothing else wants; whoever wakes up on such a
    core takes it at once. That is Linux; elsewhere the lowest priority comes close."""
    if not hasattr(os, "SCHED_IDLE"):
        os.nice(19)
        return
    # Linux may share each core between sessions before it shares it between threads, and a session weighs
    # there what its threads weigh: whoever shared this one with idle threads would be kept waiting with them.
    os.setsid()
    with contextlib.suppress(OSError):
        # Refused where a container mounts it read-only; then this session only weighs as much as another.
        _AUTOGROUP.write_text("19")
    # Of each thread by itself, and inherited: torch has some already.
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def _reply(encoder: "Encoder", frame: Frame) -> tuple[Frame, bool]:
    """The reply, and whether this process can go on. The error itself goes with this call: its frames hold
    the tensors of the pass that failed, in the way of the smaller ones after it."""
    from backends.embedding.encoder import is_out_of_memory

    if frame.kind is FrameKind.RELEASE:
        encoder.release()
    if frame.kind in (FrameKind.PING, FrameKind.RELEASE):
        return Frame(FrameKind.PONG, frame.batch, b""), True
    try:
        lengths, ids = unpack_inputs(frame.payload)
        return Frame(FrameKind.VECTORS, frame.batch, encoder.run_pass(lengths, ids).pack()), True
    except Exception as error:
        # Whatever one batch does to the model is that batch's failure; the server narrows it down.
        kind = FrameKind.OUT_OF_MEMORY if is_out_of_memory(error) else FrameKind.FAILED
        message = f"{type(error).__name__}: {error}".encode()
        return Frame(kind, frame.batch, message), not encoder.is_fatal(error)


def _run_lane(
    encoder: "Encoder", connection: socket.socket, sending: threading.Lock, frames: "SimpleQueue[Frame]"
) -> None:
    encoder.set_thread_count()
    while True:
        reply, is_usable = _reply(encoder, frames.get())
        with sending:
            if is_usable:
                connection.sendall(reply.pack())
            else:
                connection.sendall(Frame(FrameKind.LEAVING, 0, b"").pack() + reply.pack())
                os._exit(1)


def _run_tokenizer(
    encoder: "Encoder", connection: socket.socket, sending: threading.Lock, texts: "SimpleQueue[Frame]"
) -> None:
    tokenizer = encoder.raw_tokenizer
    while True:
        frame = texts.get()
        try:
            # One text at a time: a batch would wake a thread for every core.
            token_ids = [tokenizer.encode(text).ids for text in json.loads(frame.payload)]
            payload = pack_inputs([np.array(ids, dtype=np.uint32) for ids in token_ids])
        except Exception:
            # The server tries again by itself, and then tells its caller what is wrong with the text.
            payload = b""
        with sending:
            connection.sendall(Frame(FrameKind.TOKENS, frame.batch, payload).pack())


def _serve(connection: socket.socket, options: EncoderOptions) -> int:
    """Returns only when the model does not load."""
    frames: SimpleQueue[Frame] = SimpleQueue()
    texts: SimpleQueue[Frame] = SimpleQueue()
    threading.Thread(target=_read_ahead, args=(connection, frames, texts), daemon=True).start()
    try:
        # Imported here because it takes seconds, which the thread above already watches over.
        from backends.embedding.encoder import Encoder

        encoder = Encoder(options)
        ready = Frame(FrameKind.READY, 0, encoder.facts(options.batch_tokens).to_json())
    except Exception as error:
        # Whatever keeps the model from loading is for the server to report, in one place.
        message = f"{type(error).__name__}: {error}".encode()
        connection.sendall(Frame(FrameKind.LOAD_FAILED, 0, message).pack())
        return 1
    if encoder.yields_cpu:
        lower_cpu_priority()
    connection.sendall(ready.pack())
    gc.freeze()
    sending = threading.Lock()
    threading.Thread(target=_run_tokenizer, args=(encoder, connection, sending, texts), daemon=True).start()
    for _ in range(encoder.lanes - 1):
        threading.Thread(target=_run_lane, args=(encoder, connection, sending, frames), daemon=True).start()
    _run_lane(encoder, connection, sending, frames)
    return 0


def main(arguments: list[str]) -> int:
    """Arguments: the number of the inherited socket, the options as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, options = arguments
    with socket.socket(fileno=int(descriptor)) as connection:
        return _serve(connection, EncoderOptions.from_json(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
