"""Attention over a KV cache whose blocks may store hidden states instead of keys and values.

One pool of blocks serves both forms. The memory of a block for `block_tokens` keys and values holds
`rows_per_block` rows of hidden states; a row is the exact input of a layer's key and value projections.
`reference` defines each operation in plain torch, `launch` runs the same operations with Triton kernels,
`ops` checks the arguments and dispatches to one of the two, and `decode` builds attention from them.
"""
