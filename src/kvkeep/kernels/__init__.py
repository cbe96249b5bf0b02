"""Inner loops that torch alone does not make fast enough, each behind one function beside its torch reference.

Knows tensors only. A function picks its form by where the tensors are: compiled loops of numba on the CPU, Triton or
FlexAttention on CUDA (:mod:`kvkeep.kernels.choice`), torch anywhere else and inside ``torch.compile``. Only files named
``triton_*`` need Triton.
"""
