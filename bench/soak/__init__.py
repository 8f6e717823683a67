"""The soak: a server of its own under mixed load and injected faults, and what must hold all the same (docs/reliability.md)."""
