"""The image format: pure functions and frozen data, bytes in and bytes out."""
