"""``megapg doctor``: what launched us, what this machine can do, and what looks wrong.

Data flows one way: every process collects :mod:`~megapg.doctor.survey` about itself and runs the
table of :mod:`~megapg.doctor.checks` over them; the ranks' accounts meet at rank 0 over the store
(:mod:`~megapg.doctor.gather`) and become one :mod:`~megapg.doctor.report`, which
:mod:`~megapg.doctor.render` prints. It makes no process group.
"""
