"""What owns process groups: makes them, lends them out, suspends, resumes and ends them.

``session`` owns groups that it made; ``owner`` is what it shares with
:class:`~megapg.megatron.adopting.adopted.Adopted`, which owns those of Megatron-core. ``offload``
gives the memory of groups back for a while, and ``rebind`` puts new groups where old ones were.
"""
