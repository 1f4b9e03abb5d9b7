"""Where objects live: one module a backend, all of one protocol."""
