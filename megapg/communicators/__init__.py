"""Create communicators: choose those that a rank needs, their backend and their WORLD.

``plan`` lists the communicators of a rank, ``backends`` describes each backend, and ``world``
creates or adopts torch's WORLD. ``create`` creates and destroys communicators, and ``assemble``
puts those of a rank into a collection. ``warm_up`` and ``health`` use each communicator once.
"""
