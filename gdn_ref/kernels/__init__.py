"""Triton kernels: the stages one by one (stages.py) and what they share with the fused forward (tiles.py).

Importing this package imports no triton; its modules do.
"""
