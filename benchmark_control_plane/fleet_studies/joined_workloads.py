"""Puts the requests of several sources into one workload."""

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.simulator.cluster.scenario import FleetWorkload


def joined(*parts: FleetWorkload) -> tuple[FleetWorkload, npt.NDArray[np.int64]]:
    """All requests in the order of arrival, and the number of the part of each.

    Only one part may have shared prefixes: their numbers are kept.
    """
    part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
    order = np.argsort(np.concatenate([each.at for each in parts]), kind="stable")
    columns = {
        column.name: np.concatenate([getattr(each, column.name) for each in parts])[order]
        for column in fields(FleetWorkload)
    }
    return FleetWorkload(**columns), part[order]
