"""What each Megatron-core has, and what to write instead: for the codemod and the bridge alike.

It needs the standard library alone.
"""
