"""How communicators come to be and end: who meets, what is made, on which backend.

``rollcall`` brings the ranks together, ``world`` owns or adopts torch's WORLD, ``plan`` says which
communicators a rank needs, ``backends`` knows each backend's ways, ``groups`` makes and ends them.
"""
