"""Put new process groups into objects that hold old ones.

A session that re-creates its groups hands out new ones, and a model, its optimizer and its schedule
go on holding the old: as attributes, in buckets and dicts, bound into partials and closures.
:func:`rebind` walks over such objects, puts the new groups in by identity, and tells which
references it replaced, which it saw and could not replace, and who else in the process still holds
an old group.
"""

from megapg.ownership.rebind.rebound import Rebound, rebind
from megapg.ownership.rebind.successors import Replacements

__all__ = ["Rebound", "Replacements", "rebind"]
