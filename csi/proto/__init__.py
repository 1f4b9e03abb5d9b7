"""The interface, and the Python that `make proto` generates from it."""
