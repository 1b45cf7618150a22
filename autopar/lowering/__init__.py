"""From labels to the code of one rank: the graph of a block, the table of conversions, and the functions that send.

It imports `autopar.ir`, `autopar.capture` and `autopar.rules`. The cost model and the runtime both import it.
"""
