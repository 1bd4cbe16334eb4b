"""Published tables and figures, reproduced with our policies."""
