"""How ranks talk to each other before there is a communicator, and without one: over a store.

``connect`` finds the store of a job, and ``store`` is its bounded client. ``rendezvous`` brings the
ranks together and lets them part, a ``coordinator`` lets ranks that are together agree on what to
do next, and ``joint_work`` is work that takes long. ``waiting`` tells ranks that wait under two
names.
"""
