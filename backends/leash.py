"""Does a process end with the one that started it, however that ended? A server that is killed, by hand or
for want of memory, would leave its engine behind, and with it the device's memory.

For processes that `multiprocessing` starts, forked or spawned: each has a pipe that ends with its parent.
"""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """From now on; at once, whatever it does then. Raises RuntimeError in a process that has none."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError(f"process {os.getpid()} was not started by multiprocessing: it has no parent")

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="leash", daemon=True).start()
