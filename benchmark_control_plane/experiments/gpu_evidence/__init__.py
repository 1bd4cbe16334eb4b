"""Everything that only a GPU can show, in one command: `make gpu-evidence`."""
