"""Raises this process's limit of open files to that of an open-loop client: a connection for each request."""

import resource

from benchmark_control_plane.common.command_line import BadInput

_OTHER_FILES = 256
"""Files of a server or of the client besides its connections."""


def allow_open_files(connections: int) -> None:
    """Raises the soft limit if it is too low for so many connections, for child processes too.

    Raises BadInput if the hard limit is too low.
    """
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadInput(
            f"the largest run has {connections} requests, which may all be in flight at a time, and this "
            f"process may open {hard} files; raise it (ulimit -Hn {needed}), or lower loads or measured_s"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
