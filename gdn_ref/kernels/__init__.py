"""Triton kernels.

The fused forward: prep.py, then scan.py or its twin for Hopper, hopper_scan.py; launch.py calls them. The fused
backward: the same beginning, then adjoints.py and backward.py, with a twin in hopper.py; launch_backward.py calls them.
decode.py: a decode step, and the way back from rejected drafts. stages.py: the forward pass stage by stage. tiles.py
and gates.py: what all share; calls.py: what a call costs the processor.

Importing this package imports no triton; its modules do.
"""
