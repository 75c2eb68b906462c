"""Pallas kernels, one file each, for what XLA cannot fuse on a platform.

A kernel is a form of an expression that stands elsewhere in plain JAX, and equals it. It is chosen
by the platform that a program is compiled for, and never on a CPU.
"""
