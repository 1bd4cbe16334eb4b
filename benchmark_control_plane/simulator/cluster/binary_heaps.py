"""Binary heaps in arrays, compiled: of the events of all boxes, and of the last steps of a box's requests."""

from typing import NamedTuple

import numpy as np

from benchmark_control_plane.simulator.cluster.compiling import compiled
from benchmark_control_plane.simulator.cluster.scenario import Floats, Ints


class EventHeap(NamedTuple):
    """Binary heap of (time, box, version); `size` has one element. An entry of an old version is ignored."""

    time: Floats
    box: Ints
    version: Ints
    size: Ints


def new_heap(capacity: int) -> EventHeap:
    """An empty heap for `capacity` entries."""
    return EventHeap(
        np.zeros(capacity), np.zeros(capacity, np.int64), np.zeros(capacity, np.int64), np.zeros(1, np.int64)
    )


@compiled
def push_event(heap: EventHeap, time: float, box: int, version: int) -> None:
    """Adds an entry."""
    at = heap.size[0]
    while at > 0:
        parent = (at - 1) >> 1
        if heap.time[parent] <= time:
            break
        heap.time[at], heap.box[at], heap.version[at] = (
            heap.time[parent],
            heap.box[parent],
            heap.version[parent],
        )
        at = parent
    heap.time[at], heap.box[at], heap.version[at] = time, box, version
    heap.size[0] += 1


@compiled
def pop_event(heap: EventHeap) -> None:
    """Removes the earliest entry, which the caller has read at index 0."""
    heap.size[0] -= 1
    size = heap.size[0]
    time, box, version = heap.time[size], heap.box[size], heap.version[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap.time[child + 1] < heap.time[child]:
            child += 1
        if heap.time[child] >= time:
            break
        heap.time[at], heap.box[at], heap.version[at] = heap.time[child], heap.box[child], heap.version[child]
        at = child
    heap.time[at], heap.box[at], heap.version[at] = time, box, version


@compiled
def push_end(ends: Ints, ending: Ints, size: int, step: int, request: int) -> None:
    """Adds the last step of a request to a heap of `size` entries."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if ends[parent] <= step:
            break
        ends[at], ending[at] = ends[parent], ending[parent]
        at = parent
    ends[at], ending[at] = step, request


@compiled
def pop_end(ends: Ints, ending: Ints, size: int) -> None:
    """Removes the first entry of a heap of `size` entries."""
    step, request = ends[size - 1], ending[size - 1]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= step:
            break
        ends[at], ending[at] = ends[child], ending[child]
        at = child
    ends[at], ending[at] = step, request
