"""Create communicators: choose those that a rank needs, their backend and their WORLD.

``needed`` lists the communicators of a rank, ``backends`` describes each backend, and ``world``
creates or adopts torch's WORLD. ``create`` creates and destroys communicators, and ``warm_up`` uses
each once.
"""
