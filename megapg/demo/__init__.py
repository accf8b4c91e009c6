"""The main job, end to end: a real Megatron-core GPT trained on groups from a session.

``gpt`` trains, ``ranks`` has the function of each process, ``verdict``
compares, and ``show`` displays.
"""
