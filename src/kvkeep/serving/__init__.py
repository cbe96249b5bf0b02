"""Serving: a policy inside vLLM, behind its OpenAI server, and the smallest server for a laptop.

Floor 6. What decides and writes (``rows``, ``pages``, ``entry``, ``interval``, ``shards``, ``settings``) imports
without vLLM; only ``kvkeep.serving.vllm`` needs it.
"""
