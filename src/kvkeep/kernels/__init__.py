"""Inner loops that torch alone does not make fast enough, each behind one function beside its torch reference.

Knows tensors only. A function picks its form by where the tensors are: Triton or FlexAttention on CUDA, torch anywhere
else and inside ``torch.compile`` (:mod:`kvkeep.kernels.choice`). Only files named ``triton_*`` need Triton.
"""
