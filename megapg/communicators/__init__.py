"""How communicators come to be: which a rank needs, on which backend, on whose WORLD.

``plan`` says which communicators a rank needs, ``backends`` knows each backend's ways, ``world``
owns or adopts torch's WORLD, ``create`` makes and ends communicators, and ``assemble`` puts those
of a rank into a collection. ``warm_up`` and ``health`` use each communicator once.
"""
