"""Inner loops that torch alone does not make fast enough, each behind one function beside its torch reference.

Knows tensors only. A function picks its form by where the tensors are: compiled loops of numba on the CPU, torch
anywhere else and inside ``torch.compile``.
"""
