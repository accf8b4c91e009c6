"""How communicators come to be, rest and end: who meets, what is made, on which backend.

``meeting`` is where the ranks find each other, ``rollcall`` brings them together, and a ``council``
of them decides what to do next; ``world`` owns or adopts torch's WORLD. ``plan`` says which
communicators a rank needs, ``backends`` knows each backend's ways, ``groups`` makes and ends them,
``offload`` gives their memory back for a while.
"""
