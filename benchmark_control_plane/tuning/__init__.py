"""`tandem tune`: a better configuration for the traffic of a decision log."""
