"""To import last in an interpreter from which ranks are forked: what is there by now stays.

The collector passes over it in every rank, and writes nothing on the pages that they share. To look
through torch and Megatron-core takes it a quarter of a second, and many a test has it look several
times. But a rank that asks who holds something is not told of these modules, either.
"""

import gc

gc.collect()
gc.freeze()
