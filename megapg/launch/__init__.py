"""Read from the launcher this process's rank, the world size, and where the ranks meet."""

from megapg.launch.detect import detect
from megapg.launch.network import Network, choose_network
from megapg.launch.process import Launch

__all__ = ["Launch", "Network", "choose_network", "detect"]
