"""``megapg doctor``: the launcher, the abilities of this machine, and problems.

Data flows one way. Every process collects a :mod:`~megapg.doctor.survey` of itself, and runs the
:mod:`~megapg.doctor.checks` on it. The ranks send their accounts to rank 0 over the store
(:mod:`~megapg.doctor.gather`). Rank 0 merges them into one :mod:`~megapg.doctor.report`, which
:mod:`~megapg.doctor.render` prints. No process group is made.
"""
