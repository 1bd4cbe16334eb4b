"""A KV cache whose requests may keep hidden states instead: half the blocks, inside vLLM, without a fork.

The scheduler (`scheduling`) says which requests keep hidden states; the block counts follow (`cache`); every
step carries the answer to the worker (`worker`, `forms`), which sorts the batch (`batch`), and the attention
layers (`attention`) of the models that can (`models`) decode each request from what it kept.
"""
