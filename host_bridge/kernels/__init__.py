"""Managed kernels: one process per agent, reached over signed sockets."""
