"""Compiled loops for the CPU: what a token costs there is the number of calls, so one loop does all of a step.

Numba compiles a loop when it is first used and keeps it on the disk. Importing a file of this folder imports numba,
which costs more than everything else on this floor: :func:`kvkeep.kernels.place.compiled` does it where a loop is used.

Keys and values come as torch has them; what numpy has no type for comes as its bits, bfloat16 as int16 and float16 as
uint16 (see :func:`kvkeep.kernels.place.raw`). The loops of an entry policy's step have their arguments in common:

    keys, values ``[B, H, N, D]``, positions int32 ``[B, H, N]``, priority ``[B, H, N]``, recent ``[B, H, window]``,
    clock ``[B]``, new_keys, new_values ``[B, H, 1, D]``, sinks, window: as in
    :func:`kvkeep.kernels.place.replace_lowest`.
"""
