"""Moves chunks between stores and host memory within bounds; knows no GPU library."""
