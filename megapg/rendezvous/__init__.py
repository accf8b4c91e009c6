"""Communication between ranks over a store, without a communicator.

``job_store`` finds the store of a job, and ``store`` is its client with deadlines. ``rendezvous``
lets ranks meet and disconnect. With a ``coordinator``, connected ranks agree on what to do next.
``joint_work`` is for long work. ``waiting`` detects ranks that wait for each other under two names.
"""
