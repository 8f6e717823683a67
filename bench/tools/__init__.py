"""Other programs that load a server over HTTP, each in an environment of its own, and what they report."""
