"""Tables of the names of each Megatron-core and of their replacements, for codemod and bridge.

It needs only the standard library.
"""
