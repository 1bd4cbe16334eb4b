"""A KV cache in vLLM, without a fork, in which some requests store hidden states at half the blocks.

The form of a request says what its blocks hold: keys and values, or hidden states. The scheduler
(`scheduling`) chooses it, and the block counts follow (`cache`). Each step carries the forms to the worker
(`worker`, `step_forms`), which splits the batch by form (`batch`). The attention layers (`attention`) of the
supported models (`models`) decode each request from its form.
"""
