"""The server takes the descriptors that it may have: each connection needs one."""

import os
import resource
import subprocess
import sys

import pytest

# In a process of its own, since a hard limit cannot be raised again; it ends at once, as its port is taken.
_SCRIPT = """
import resource, socket, sys
from backends.testing.scripted import ScriptedEmbedder
from controlplane.api.graceful_server import host_forever
from controlplane.config import parse
from controlplane.service.bootstrap import build_service

resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
with socket.create_server(("127.0.0.1", 0)) as taken:
    server = {"port": taken.getsockname()[1]}
    config = parse({"server": server, "models": {"embeddings": [{"model": "m"}]}})
    embedder = ScriptedEmbedder(model="m")
    service = build_service(config, [], [embedder], workspace_bytes=embedder.workspace_bytes)
    assert host_forever(service, config) == 1
print(resource.getrlimit(resource.RLIMIT_NOFILE), round(sys.getswitchinterval(), 6))
"""


@pytest.mark.parametrize("hard", [300, 1_000_000])
def test_the_limit_is_raised_as_far_as_it_may_be(hard: int):
    hard = min(hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _SCRIPT, str(hard)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    # A thread gives the interpreter lock back to the event loop soon.
    assert found.stdout.strip() == f"{(min(hard, 65_536), hard)} 0.0002"
