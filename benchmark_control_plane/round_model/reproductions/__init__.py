"""Published tables and figures, made again with our policies."""
