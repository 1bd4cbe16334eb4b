"""Embedding process: computes batches that arrive on a socket, one per lane at a time.

A reader thread receives frames while the lanes compute, so the next batch is available when one ends. Lanes
are threads, because torch releases the GIL while it computes. The process exits as soon as the server's end
of the socket closes. It ignores the signals that also reach the server's process group: the server
decides when work ends.
"""

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from backends.embedding.handshake import EncoderOptions
from backends.embedding.ipc import HEADER, Frame, FrameKind, pack_inputs, unpack_header, unpack_inputs
from backends.garbage_collection import paused_collection

# Passes of different shapes scatter the heap's free memory: within an hour of random texts a worker of 90 MB
# of weights grew by 590 MB; `malloc_trim` returns such memory in 15 to 22 ms. Returning it at once, by
# MALLOC_TRIM_THRESHOLD_ (8 MiB) or MALLOC_MMAP_THRESHOLD_ (1 MiB), made passes 32 and 22 % longer.
_BUSY_SECONDS_PER_TRIM = 2.0
# Tokenization leaves up to 400 bytes in the heap for each character of a text.
_CHARACTERS_PER_TRIM = 100_000

# On a CPU oneDNN keeps entries for each shape of a pass, by default 1,024: a worker grew by 1 MB with 45
# passes of random shapes, and with one entry by 0.1. Passes were as fast with 1, 64 and 1,024.
_ONEDNN_ENTRIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

if TYPE_CHECKING:
    from backends.embedding.encoder import Encoder


def _receive(connection: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. Raises EOFError if the server closed the socket."""
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
            kind, number, size = unpack_header(_receive(connection, HEADER.size))
            frame = Frame(kind, number, _receive(connection, size))
            (texts if kind is FrameKind.TEXTS else frames).put(frame)
    except (EOFError, ConnectionError):
        # The server is gone, so the results of a batch in progress would be discarded.
        os._exit(0)


def _reply(encoder: "Encoder", frame: Frame) -> tuple[Frame, bool]:
    """Computes the response to `frame`, and whether this process can continue.

    The exception is dropped with this call: its traceback holds the tensors of the failed pass, which would
    occupy the memory that the next, smaller passes need.
    """
    from backends.embedding.encoder import is_out_of_memory

    if frame.kind is FrameKind.RELEASE:
        encoder.release()
    if frame.kind in (FrameKind.PING, FrameKind.RELEASE):
        return Frame(FrameKind.PONG, frame.number, str(encoder.reserved_bytes).encode()), True
    try:
        lengths, ids = unpack_inputs(frame.payload)
        return Frame(FrameKind.VECTORS, frame.number, encoder.run_pass(lengths, ids).pack()), True
    except Exception as error:
        # Any exception fails only this batch; the server halves it to find the input at fault.
        kind = FrameKind.OUT_OF_MEMORY if is_out_of_memory(error) else FrameKind.FAILED
        message = f"{type(error).__name__}: {error}".encode()
        return Frame(kind, frame.number, message), not encoder.is_fatal(error)


def _run_lane(
    encoder: "Encoder", connection: socket.socket, sending: threading.Lock, frames: "SimpleQueue[Frame]"
) -> None:
    encoder.set_thread_count()
    busy_s = 0.0
    while True:
        frame = frames.get()
        start = time.monotonic()
        reply, is_usable = _reply(encoder, frame)
        if is_usable and reply.kind is FrameKind.OUT_OF_MEMORY:
            # The allocator has kept what the failed pass took, and other processes on the device may need it.
            encoder.release()
        busy_s += time.monotonic() - start
        with sending:
            if is_usable:
                connection.sendall(reply.pack())
            else:
                connection.sendall(Frame(FrameKind.LEAVING, 0, b"").pack() + reply.pack())
                os._exit(1)
        if busy_s >= _BUSY_SECONDS_PER_TRIM:
            encoder.trim()
            busy_s = 0.0


def _run_tokenizer(
    encoder: "Encoder", connection: socket.socket, sending: threading.Lock, texts: "SimpleQueue[Frame]"
) -> None:
    tokenizer = encoder.raw_tokenizer
    characters = 0
    while True:
        frame = texts.get()
        characters += len(frame.payload)
        try:
            # One text at a time: `encode_batch` would use a thread on every core.
            # As arrays at once: a list of ids takes nine times as much.
            token_ids = [
                np.array(tokenizer.encode(text).ids, dtype=np.uint32) for text in json.loads(frame.payload)
            ]
            payload = pack_inputs(token_ids)
        except Exception:
            # An empty payload reports the failure; the server then tokenizes in its own process.
            payload = b""
        with sending:
            connection.sendall(Frame(FrameKind.TOKENS, frame.number, payload).pack())
        if characters >= _CHARACTERS_PER_TRIM and texts.empty():
            encoder.trim()
            characters = 0


def _serve(connection: socket.socket, options: EncoderOptions) -> int:
    """Runs the worker; returns, with exit status 1, only if the model does not load."""
    frames: SimpleQueue[Frame] = SimpleQueue()
    texts: SimpleQueue[Frame] = SimpleQueue()
    threading.Thread(target=_read_ahead, args=(connection, frames, texts), daemon=True).start()
    try:
        # Imported late because it takes seconds, in which the reader thread already notices a closed socket.
        with paused_collection():
            from backends.embedding.cross_encoder import PairEncoder
            from backends.embedding.encoder import Encoder

        encoder = PairEncoder(options) if options.scores_pairs else Encoder(options)
        connection.sendall(Frame(FrameKind.MEASURING, 0, b"").pack())
        ready = Frame(FrameKind.READY, 0, encoder.facts(options.batch_tokens).to_json())
    except Exception as error:
        # Any exception becomes LOAD_FAILED; the server reports it.
        message = f"{type(error).__name__}: {error}".encode()
        connection.sendall(Frame(FrameKind.LOAD_FAILED, 0, message).pack())
        return 1
    if encoder.idle_cpu_priority:
        # In a session of its own, threads in the idle class do not lower the share of the server's session.
        os.setsid()
    connection.sendall(ready.pack())
    gc.freeze()
    sending = threading.Lock()
    threading.Thread(target=_run_tokenizer, args=(encoder, connection, sending, texts), daemon=True).start()
    for _ in range(encoder.lanes - 1):
        threading.Thread(target=_run_lane, args=(encoder, connection, sending, frames), daemon=True).start()
    _run_lane(encoder, connection, sending, frames)
    return 0


def main(arguments: list[str]) -> int:
    """Entry point; `arguments` are the number of the inherited socket and the options as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    descriptor, options = arguments
    os.environ.setdefault(*_ONEDNN_ENTRIES)
    with socket.socket(fileno=int(descriptor)) as connection:
        return _serve(connection, EncoderOptions.from_json(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
