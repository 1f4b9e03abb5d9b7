"""Puts the bytes of an image where a process needs them: host memory, a GPU, a process tree."""
