"""The path of a request from its arrival to its last token, in the order in which a request meets it."""
