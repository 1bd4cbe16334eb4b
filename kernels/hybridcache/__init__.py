"""Attention over a cache of hidden states: what is computed, and kernels that compute it quickly.

One pool of blocks serves both caches. A block of `block_tokens` keys and values holds, read another way,
`rows_per_block` rows of hidden states, a row being the exact input of a layer's key and value projections.
`reference` says in plain torch what each operation is, `launch` runs the same by Triton, `ops` checks the
arguments and picks one of the two, `decode` builds attention from them.
"""
