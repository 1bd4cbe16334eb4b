"""The client module can be imported without vLLM."""

import subprocess
import sys


def test_importing_the_client_does_not_import_vllm():
    script = "import sys, backends.vllm.client; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"
