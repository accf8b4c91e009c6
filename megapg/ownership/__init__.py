"""Process groups and their owners: create, lend out, suspend, resume and close groups.

A ``session`` owns groups that it created. :class:`~megapg.megatron.adopting.adopted.Adopted` owns
groups that Megatron-core created. ``owner`` holds their common base class. ``suspension`` releases
the memory of groups for a while, and ``rebind`` replaces references to old groups with new ones.
"""
