"""`tandem replay`: the requests of a decision log through the live gate on a simulated device."""
