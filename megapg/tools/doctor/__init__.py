"""``megapg doctor``: the launcher, the abilities of this machine, and problems.

Data flows one way. Every process collects a ``survey`` of itself, and runs the ``checks`` on it.
The ranks send their accounts to rank 0 over the store (``gather``). Rank 0 merges them into one
``report``, which ``render`` prints. No process group is made.
"""
