"""`tandem capacity`: the highest rate of a workload that a configuration sustains, and what limits it."""
