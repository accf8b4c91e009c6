"""The main jobs, end to end: real Megatron-core GPTs trained on groups from sessions.

``megapg demo``: ``gpt`` trains, ``ranks`` has the function of each process, ``verdict``
compares, and ``show`` displays.

``megapg demo rl``: ``rl`` is the driver, ``rl_workers`` has the actors of Ray, ``rl_models`` their
models, and ``rl_verdict`` compares.
"""
