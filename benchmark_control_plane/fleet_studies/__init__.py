"""Studies of simulated fleets, which `tandem bench run` runs from configs/bench/fleet-*.yaml."""
