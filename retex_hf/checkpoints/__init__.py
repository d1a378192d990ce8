"""Reading of base and expert checkpoints from any source, one tensor at a time."""

from .adapters import AdapterSource, align_source
from .expert_set import Checkpoint, ExpertSet, check_experts, check_integers, check_range, check_related, read_finite
from .inventory import Inventory, take_inventory
from .locate import download, fetch, is_open_clip, locate, open_source, typed_path
from .sources import Source, TensorInfo

__all__ = [
    "AdapterSource",
    "Checkpoint",
    "ExpertSet",
    "Inventory",
    "Source",
    "TensorInfo",
    "align_source",
    "check_experts",
    "check_integers",
    "check_range",
    "check_related",
    "download",
    "fetch",
    "is_open_clip",
    "locate",
    "open_source",
    "read_finite",
    "take_inventory",
    "typed_path",
]
