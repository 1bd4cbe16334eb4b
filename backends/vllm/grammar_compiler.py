"""Process that compiles grammars before the engine sees them, each in a child that the kernel may end.

A compiler cannot be interrupted, and the engine has few compiler threads. This process loads vLLM and the
tokenizer once. For each grammar it forks: the child validates and compiles the grammar as the engine would,
takes some steps with it, replies and exits. Processor time and memory of the child are limited by the kernel,
and its end releases all of it. Requests come over a Unix socket, one connection each; both messages are JSON
that ends with the stream. Importing this module does not import vLLM.
"""

import json
import logging
import os
import random
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from backends.device.probe import UNCOUNTED_NAME
from backends.vllm.grammar_limits import GrammarLimits

Reply = dict[str, Any]
Check = Callable[[dict[str, Any]], Reply]

_NICENESS = 10
_CHUNK_BYTES = 1 << 16
# The child may have to wait for a core; it is ended then only if it makes no progress.
_WALL_FACTOR = 10
# Tokens generated to measure the cost per token, and the multiple of the limit after which one is ended.
_STEPS = 32
_STEP_FACTOR = 10
_OBJECT = {"json_object": True}
_SHOWN_CHARACTERS = 200
_REGEX_TIMEOUT = "VLLM_REGEX_COMPILATION_TIMEOUT_S"
# The engine's limit for regular expressions is of wall time, and it may run more slowly than this process.
_REGEX_MARGIN = 4


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What the compilation of one grammar may cost: seconds of processor time, and memory."""

    cpu_seconds: float
    memory_bytes: int

    def apply(self) -> None:
        """Has the kernel end this process beyond them."""
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
        most = used + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Both end the process, as none of them has a handler.
        signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * self.cpu_seconds)


def run(parent: Connection, path: str, limits: GrammarLimits) -> None:
    """Loads the compiler of the VllmConfig that `parent` sends, reports None or an error, and serves `path`.

    Ends with its parent.
    """
    # Ctrl-C and the end of a terminal reach the whole process group; the server ends this process.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    Path("/proc/self/comm").write_text(UNCOUNTED_NAME, encoding="ascii")
    try:
        _import_compilers()
        grammars = EngineGrammars(parent.recv(), step_seconds=limits.grammar_step_ms / 1_000)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(64)
    except Exception as error:
        parent.send(f"{type(error).__name__}: {error}")
        raise
    parent.send(None)
    # The engine's start waited for this process; from now on it yields to the server and the engine.
    os.nice(_NICENESS)
    costs = CompileLimits(limits.grammar_ms / 1_000, limits.grammar_memory)
    serve(listener, parent, grammars.check, costs)


def _import_compilers() -> None:
    """Imports vLLM, which takes 10 s and more; its log would show what clients sent."""
    import vllm.v1.structured_output  # noqa: F401

    logging.getLogger("vllm.v1.structured_output").setLevel(logging.CRITICAL)


def serve(listener: socket.socket, parent: Connection, check: Check, limits: CompileLimits) -> None:
    """Answers each connection by `check` in a child of its own; returns when `parent` closes.

    If a signal or a fault ended the child, the reply is {"signal": number}, 0 for a fault.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is parent:
                    return
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    child = os.fork()
                    if child == 0:
                        _answer(connection, check, limits)
                    selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _end(*key.data)


def _end(child: int, connection: socket.socket) -> None:
    _, status = os.waitpid(child, 0)
    # The server no longer reads if it is ending.
    with connection, suppress(OSError):
        if status:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            connection.sendall(json.dumps({"signal": number}).encode())
        # Closing does not end the stream while other children have the descriptor.
        connection.shutdown(socket.SHUT_RDWR)


def _answer(connection: socket.socket, check: Check, limits: CompileLimits) -> None:
    """Answers one request within the limits and exits; never returns."""
    status = 1
    try:
        received = bytearray()
        while chunk := connection.recv(_CHUNK_BYTES):
            received += chunk
        limits.apply()
        connection.sendall(json.dumps(check(json.loads(received))).encode())
        status = 0
    finally:
        # The exit handlers of this process are those of its parent.
        os._exit(status)


def unsupported_part(schema: Any) -> str:
    """A sentence with the innermost part of a schema that xgrammar cannot enforce, as vLLM judges it.

    Empty if there is none. vLLM's own message names no part.
    """
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    part, path = schema, ""
    if not isinstance(part, dict) or not has_xgrammar_unsupported_json_features(part):
        return ""
    while inner := next(
        (one for one in _children(part) if has_xgrammar_unsupported_json_features(one[1])), None
    ):
        path, part = f"{path}.{inner[0]}", inner[1]
    return f" They are in {path[1:] or 'the schema itself'}: {json.dumps(part):.{_SHOWN_CHARACTERS}}"


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in schema.items():
        if isinstance(value, dict):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}[{at}]", one) for at, one in enumerate(value) if isinstance(one, dict))


class EngineGrammars:
    """Validates and compiles grammars by vLLM's own code, with the backend that the engine uses."""

    def __init__(self, config: Any, *, step_seconds: float) -> None:
        from vllm import envs
        from vllm.v1.structured_output import StructuredOutputManager

        self._regex_seconds: float = envs.VLLM_REGEX_COMPILATION_TIMEOUT_S
        # Here processor time is limited.
        os.environ[_REGEX_TIMEOUT] = "0"
        self._config, self._step_seconds = config, step_seconds
        self._manager = StructuredOutputManager(config)
        # Compile in the calling thread: a child has no other.
        self._manager._use_async_grammar_compilation = False
        # As in the engine, the warm-up selects the backend.
        self._compiled(self._validated(_OBJECT))

    def check(self, stated: dict[str, Any]) -> Reply:
        """Compiles the grammar with these fields of vLLM's StructuredOutputsParams.

        The reply has the fields after validation as `grammar`, the processor time of the compilation in
        `seconds`, and whether one of some tokens `is_slow`; or `refused`, a reason. A token that takes far
        too long ends the process by SIGVTALRM.
        """
        from backends.vllm.compat import CLIENT_ERRORS, client_message

        refusals: tuple[type[Exception], ...] = (*CLIENT_ERRORS, RuntimeError)
        try:
            params = self._validated(stated)
            grammar = self._compiled(params)
        except refusals as error:
            reason = client_message(error)
            if reason.endswith("not supported by xgrammar."):
                reason += unsupported_part(json.loads(stated["json"]))
            return {"refused": reason}
        seconds = time.process_time()
        if stated.get("regex") and 0 < self._regex_seconds < _REGEX_MARGIN * seconds:
            limit = self._regex_seconds / _REGEX_MARGIN
            return {"refused": f"it took {seconds:.1f} s of processor time, and at most {limit:g} s are safe"}
        is_slow = self._slowest_step(grammar) > self._step_seconds
        return {"grammar": vars(params.structured_outputs), "seconds": seconds, "is_slow": is_slow}

    def _validated(self, stated: dict[str, Any]) -> Any:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        given = {field.name: stated[field.name] for field in fields(StructuredOutputsParams)
                 if field.init and field.name in stated}  # fmt: skip
        config = self._config
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
        params.verify(
            config.model_config, config.speculative_config, config.structured_outputs_config,
            self._manager.tokenizer,
        )  # fmt: skip
        return params

    def _compiled(self, params: Any) -> Any:
        from vllm.v1.structured_output.request import StructuredOutputRequest

        request = SimpleNamespace(
            request_id="check",
            sampling_params=params,
            structured_output_request=StructuredOutputRequest.from_sampling_params(params),
        )
        self._manager.grammar_init(request)
        grammar = request.structured_output_request.grammar
        if isinstance(grammar, Exception):
            raise grammar
        return grammar

    def _slowest_step(self, grammar: Any) -> float:
        """Processor time of the slowest of some steps: the mask of allowed tokens, and one token of it."""
        import numpy as np

        mask = self._manager.backend.allocate_token_bitmask(1)
        chosen, slowest = random.Random(0), 0.0
        for _ in range(_STEPS):
            signal.setitimer(signal.ITIMER_VIRTUAL, _STEP_FACTOR * self._step_seconds)
            start = time.process_time()
            grammar.fill_bitmask(mask, 0)
            filled = time.process_time()
            allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            token = int(chosen.choice(allowed))
            before = time.process_time()
            is_accepted = grammar.accept_tokens("check", [token])
            slowest = max(slowest, filled - start + time.process_time() - before)
            if slowest > self._step_seconds or not is_accepted or grammar.is_terminated():
                break
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return slowest
