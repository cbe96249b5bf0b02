"""The vLLM plugin: vLLM finds :func:`register` by its entry point and calls it in every process.

Switched on by ``--additional-config '{"kvkeep": {"policy": ..., "budget": ...}}'``; without it vLLM is as ever. Nothing
here is imported before vLLM asks for it.
"""

VERSIONS = (">=0.30", "<0.34")  # of vLLM: what its hooks look like; 0.32.0 on the CPU is what the tests run


def register() -> None:
    """Make kvkeep's attention backends and cache layout known to vLLM; may be called any number of times.

    Raises:
        ValueError: for a vLLM outside :data:`VERSIONS`. It stops vLLM: a server that was meant to evict must not run
            dense because of it.
    """
    from kvkeep.serving.vllm import plugin

    plugin.register(VERSIONS)
