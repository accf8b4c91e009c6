"""Replace old process groups with new ones in the objects that hold them.

When a session re-creates its groups, a model, its optimizer and its schedule still hold the old
ones: as attributes, in buckets and dicts, in partials and closures. :func:`rebind` walks over such
objects and replaces each old group, by identity. It reports the references that it replaced, those
that it found and could not replace, and other holders of an old group in the process.
"""

from megapg.ownership.rebind.rebinding import Rebound, rebind
from megapg.ownership.rebind.replacements import Replacements

__all__ = ["Rebound", "Replacements", "rebind"]
