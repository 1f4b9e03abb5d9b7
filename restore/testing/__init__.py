"""Stand-ins for devices, for tests of what uses them."""
