"""The main job, end to end: a real Megatron-core GPT trained on groups from a session.

``text`` finds something to read, ``gpt`` trains, ``ranks`` is what each process does, ``verdict``
compares, ``show`` shows.
"""
