"""The decision log: one row for each ended request, each second of memory, and each change of the models."""
